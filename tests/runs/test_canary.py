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
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from diloco.config import build
from diloco.config.compose import compose, write
from diloco.config.errors import ConfigError
from diloco.config.run_dir import SiteDir
from diloco.config.schema import RunConfig
from diloco.durable import PLAIN_DISK
from diloco.inner.holding import Holding
from diloco.inner.parallel import SiteGroup
from diloco.inner.trainer import Resumed
from diloco.learner.agent import Agent
from diloco.learner.exchange import Follower
from diloco.learner.ranks import Dealt
from diloco.learner.several_syncers import Agents
from diloco.outer.fragments import Layout, named_parameters_once
from diloco.runs import canary, site_agent
from diloco.runs.canary import canaries, command, digest_after, recorded, repeatable
from diloco.runs.site_agent import _client, agent_of, follower_of
from diloco.wire.options import MBPS_MIN
from tests.runs.processes import TINY, Place
from tests.syncer.building import Events

BOUND_S = 120.0


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
    checkpoint, config = recorded(site)
    digest, begun = digest_after(repeatable(config), checkpoint, steps)
    assert begun == 3
    return digest


def test_the_same_steps_end_in_the_same_bits_and_write_nothing(site: Path) -> None:
    before = sorted(site.rglob("*"))
    first = digest_of(site)
    assert digest_of(site) == first
    assert digest_of(site, steps=3) != first
    assert sorted(site.rglob("*")) == before


def test_one_wrong_bit_in_the_second_run_shows(site: Path) -> None:
    first, once = digest_of(site), iter([True])

    @torch.no_grad()
    def flip(optimizer: Optimizer, *_: object) -> None:
        if next(once, False):
            optimizer.param_groups[0]["params"][0].view(torch.int32).view(-1)[0] ^= 1

    with register_optimizer_step_post_hook(flip):
        assert digest_of(site) != first
    assert digest_of(site) == first


def test_a_site_or_its_checkpoint_is_found_and_what_is_none_is_named(site: Path, tmp_path: Path) -> None:
    (one,) = (site / "checkpoints").iterdir()
    assert recorded(site) == recorded(one)
    with pytest.raises(ConfigError, match="is neither a site's folder nor its checkpoint"):
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
    with canaries(command, 0.05, events.emit):
        told = events.wait_for("canary", count=2, bound_s=BOUND_S)
    for each in told[:2]:
        assert each["same"] is same
        assert why in str(each.get("why", ""))


def test_a_site_that_ends_does_not_wait_for_its_canary_and_0_means_none() -> None:
    events = Events()
    began = time.monotonic()
    with canaries(saying("import time; time.sleep(600)"), 0.01, events.emit):
        time.sleep(0.3)
    assert time.monotonic() - began < 10
    with canaries(saying("print('{}')"), 0.0, events.emit):
        time.sleep(0.05)
    assert events.all == []
    assert "canary" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.slow
def test_a_site_that_runs_a_canary_beside_training_says_how_it_ended(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Beside other tests on two cores, a process of the canary's niceness gets no second of a core in a minute.
    monkeypatch.setattr(canary, "NICE", 0)
    events = Events()
    with canaries(command(site, 2), 0.05, events.emit):
        (told, *_) = events.wait_for("canary", bound_s=BOUND_S)
    assert json.loads(json.dumps(told)) == told
    assert (told["same"], told["digest"], told["step"]) == (True, digest_of(site), 3)


# --- What a rank puts beside its trainer -----------------------------------------------------------------------------

SMALL = ["model=tiny", "run.name=x", "outer.num_fragments=2"]


def made(config: RunConfig, folder: Path) -> Agent | Agents:
    agent = agent_of(config, SiteDir(folder), held(config), lambda what, fields: None, None, PLAIN_DISK)
    agent.close()
    return agent


def following(config: RunConfig, folder: Path, resumed: Resumed | None = None, *, spread: bool = False) -> Follower:
    return follower_of(config, SiteDir(folder), held(config), resumed, PLAIN_DISK, spread=spread)


def held(config: RunConfig) -> Holding:
    return Holding(named_parameters_once(build.build_model(config)), SiteGroup())


TWO = [*SMALL, "outer.num_syncers=2", "site.syncer=127.0.0.1:1/127.0.0.1:2"]


def test_each_syncer_has_an_agent_with_a_folder_of_its_own(tmp_path: Path) -> None:
    assert isinstance(made(compose(SMALL), tmp_path), Agent)
    assert (tmp_path / "agent/odometer").is_file()
    config = compose(TWO)
    agents = made(config, tmp_path)
    assert isinstance(agents, Agents)
    assert [each.client.address for each in agents._agents] == ["127.0.0.1:1", "127.0.0.1:2"]
    assert [len(each.tensors.layout.fragments) for each in agents._agents] == [1, 1]
    for index in range(2):
        assert (tmp_path / f"agent/syncer-{index}/odometer").is_file()
    assert [len(each.fragments) for each in following(config, tmp_path)._layouts] == [1, 1]
    for name in "syncer", "token_file":
        with pytest.raises(ConfigError, match=rf"^site\.{name} is 'nowhere'"):
            made(compose([*SMALL, f"site.{name}=nowhere"]), tmp_path)


def test_where_every_rank_has_all_no_rank_but_the_first_owns_anything(tmp_path: Path) -> None:
    for config in compose(SMALL), compose(TWO):
        assert following(config, tmp_path, spread=True).state() == ({}, {})


def test_what_a_rank_owns_is_of_the_syncer_that_has_it_also_where_it_owns_nothing_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Owned:
        def __init__(self, *given: Any) -> None:
            self.restored: dict[str, Tensor] = given[6]

        def state(self) -> dict[str, Tensor]:
            return {"base.1": self.restored["base.1"]}

    def deal(layout: Layout, holding: Holding) -> Dealt:
        return Dealt((0, 1), {0: None}) if len(layout.fragments) == 2 else Dealt((0,), {})  # type: ignore[dict-item]

    monkeypatch.setattr(site_agent, "deal", deal)
    monkeypatch.setattr(site_agent, "Owner", Owned)
    config = compose([*TWO, "outer.num_fragments=3", "model.layers=3"])
    restored = Resumed(1, {"0.base.1": torch.zeros(1), "1.base.1": torch.ones(1)}, {"parts": [{}, {}]})
    follower = following(config, tmp_path, restored, spread=True)
    assert [len(layout.fragments) for layout in follower._layouts] == [1, 2]
    assert follower.state()[0] == {"1.base.1": torch.ones(1)}


def test_ranks_that_own_fragments_share_what_the_link_has(tmp_path: Path) -> None:
    config = compose([*SMALL, "site.up_mbps=90", "site.down_mbps=0.2"])
    alone, third = _client(config, Dealt((0, 0), {})), _client(config, Dealt((0, 2, 1, 2), {}))
    assert (alone.options.up_mbps, alone.options.down_mbps) == (90, 0.2)
    assert (third.options.up_mbps, third.options.down_mbps) == (30, MBPS_MIN)
    assert _client(compose(SMALL), Dealt((0, 1), {})).options.up_mbps == 0, "what is learned is each one's own"
