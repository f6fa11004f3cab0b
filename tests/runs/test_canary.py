"""A machine that repeats a site's steps to the bit is told from one that does not."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.config import build
from diloco.config.compose import compose, write
from diloco.config.errors import ConfigError
from diloco.inner.parallel import SiteGroup
from diloco.runs.canary import Canaries, command, digest_after, recorded, repeatable
from tests.runs.processes import TINY, Place
from tests.syncer.building import Events

BOUND_S = 60.0


def trained_site(folder: Path, steps: int = 3) -> Path:
    """A site's folder with one checkpoint, as training leaves it."""
    Place(folder)
    paths = [f"data.path={folder / 'text'}", f"data.cache={folder / 'cache'}"]
    config = compose([*TINY, *paths, "run.name=x", "cluster.sites.site-a.nproc=1", "inner.checkpoint_every_steps=100"])
    site = folder / "sites" / "site-a"
    write(config, site / "config.yaml")
    trainer, _ = build.build_trainer(
        config, SiteGroup(device="cpu"), (0, 1), site / "checkpoints", lambda *told: None, None
    )
    trainer.run(until_step=steps)
    return site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_site(tmp_path_factory.mktemp("site"))


def digest_of(site: Path, steps: int = 2) -> str:
    place = recorded(site)
    digest, begun = digest_after(repeatable(place.config), place.checkpoint, steps)
    assert begun == 3
    return digest


def test_the_same_steps_end_in_the_same_bits_and_write_nothing(site: Path) -> None:
    before = sorted(site.rglob("*"))
    first = digest_of(site)
    assert digest_of(site) == first
    assert digest_of(site, steps=3) != first
    assert sorted(site.rglob("*")) == before


def test_one_wrong_bit_in_the_second_run_shows(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = digest_of(site)
    right = build.build_optimizers

    def wrong(model: Any, *options: Any) -> Any:
        optimizers = right(model, *options)
        step = optimizers.step

        def step_and_flip() -> None:
            step()
            optimizers.step = step
            with torch.no_grad():
                next(iter(model.parameters())).view(torch.int32)[0, 0] ^= 1

        optimizers.step = step_and_flip
        return optimizers

    monkeypatch.setattr(build, "build_optimizers", wrong)
    assert digest_of(site) != first


def test_a_site_or_its_checkpoint_is_found_and_what_is_none_is_named(site: Path, tmp_path: Path) -> None:
    (one,) = (site / "checkpoints").iterdir()
    assert recorded(site) == recorded(one)
    with pytest.raises(ConfigError, match="is no site's folder and no checkpoint of one"):
        recorded(tmp_path / "nothing")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(ConfigError, match="holds no checkpoint yet"):
        recorded(tmp_path)


def saying(text: str) -> list[str]:
    return [sys.executable, "-c", text]


PARENT = "import os; print('{\"same\": true, \"parent\": %s}' % os.environ['DILOCO_PARENT'])"


@pytest.mark.parametrize(
    ("command", "same", "why"),
    [
        (saying(PARENT), True, ""),
        (saying("import sys; sys.exit('no checkpoint yet')"), None, "no checkpoint yet"),
        (["/nowhere/python"], None, "/nowhere/python: No such file or directory"),
        (saying("print([1])"), None, "it printed no JSON object: [1]"),
        (saying("import sys; sys.stdout.buffer.write(bytes([255]))"), None, "can't decode byte 0xff"),
    ],
)
def test_each_canary_ends_in_an_event_however_it_ends_and_the_next_is_tried(
    command: list[str], same: bool | None, why: str
) -> None:
    events = Events()
    with Canaries(command, 0.05, events.emit):
        told = events.wait_for("canary", count=2, bound_s=BOUND_S)
    for each in told[:2]:
        assert each["same"] is same
        assert why in str(each.get("why", ""))


def test_a_site_that_ends_does_not_wait_for_its_canary_and_0_means_none() -> None:
    events = Events()
    with Canaries(saying("import time; time.sleep(600)"), 0.01, events.emit):
        time.sleep(0.3)
        began = time.monotonic()
    assert time.monotonic() - began < 10
    with Canaries(saying("print('{}')"), 0.0, events.emit):
        time.sleep(0.05)
    assert events.all == []
    assert "canary" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.slow
def test_a_site_that_runs_a_canary_beside_training_says_how_it_ended(site: Path) -> None:
    events = Events()
    with Canaries(command(site, 2), 0.05, events.emit):
        (told, *_) = events.wait_for("canary", bound_s=BOUND_S)
    assert json.loads(json.dumps(told)) == told
    assert (told["same"], told["digest"], told["step"]) == (True, digest_of(site), 3)
