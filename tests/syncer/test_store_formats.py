"""What earlier versions have left is read and gone on from; what later ones leave is refused in words.

``tests/fixtures/v1`` was made by commit f4dc07c: a toy run with two sites, its syncer killed in the middle of it by
SIGKILL, the checkpoints that its sites had at that moment, and what that version made of the syncer's folder.
``tests/fixtures/v2`` is the same of commit e4cbd8b, the last one whose digests are SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.codec.base import is_sha256
from diloco.durable import PLAIN_DISK
from diloco.inner import checkpoint
from diloco.inner.checkpoint import read_sealed, write_sealed
from diloco.inner.trainer import Resumed
from diloco.sync.journal import FORMAT, canonical
from diloco.syncer.journal_files import read_file
from diloco.syncer.replaying import Replayer, Rules
from diloco.syncer.snapshots import Snapshots
from diloco.syncer.store import RunCard, Store, StoreError, verify
from tests.loopback.cluster import Log, serving
from tests.loopback.toy import Toy, ToySite

FIXTURE = Path(__file__).parents[1] / "fixtures" / "v1"
FIXTURE_2 = FIXTURE.with_name("v2")
OUTER = {"grace": "fixed", "grace_ns": 30_000_000, "num_fragments": 2, "token_budget": 1_000_000, "quorum": 1}


def toy_of(folder: Path) -> Toy:
    return Toy(
        folder=str(folder),
        seed=7,
        codec="int8",
        inner_steps=6,
        snapshot_every=6,
        shapes=(("a", (6, 4)), ("b", (10,)), ("c", (7,))),
        outer=dict(OUTER),
        optimizer={"kind": "nesterov", "lr": 0.7, "momentum": 0.9},
    )


def left(folder: Path, fixture: Path) -> Toy:
    shutil.copytree(fixture, folder / "run")
    return toy_of(folder / "run")


def card_of(toy: Toy) -> RunCard:
    return RunCard("toy", toy.layout().fingerprint, "shared")


def recovered(toy: Toy) -> Replayer:
    """Without a word of anything that was not as it should be."""
    rules, rule = toy.rules()
    log = Log()
    store = Store(Path(toy.folder) / "syncer", card_of(toy), emit=log.emit)
    found = store.recover(Rules(rules, rule, toy.codec))
    store.journal.close()
    assert log.events == []
    return found


def assert_as_expected(found: Replayer, fixture: Path) -> None:
    expected: dict[str, Any] = json.loads((fixture / "expected.json").read_bytes())
    state = found.machine.state
    values = found.holdings.values
    assert [each.version for each in values] == expected["versions"]
    assert [each.digest for each in values] == expected["digests"]
    assert (state.now_ns, state.run_tokens()) == (expected["now_ns"], expected["run_tokens"])
    sites = sorted(state.sites.items())
    assert {name: [line.watermark for line in site.lines] for name, site in sites} == expected["watermarks"]
    undecided = {name: [[each.sequence for each in line.undecided] for line in site.lines] for name, site in sites}
    assert undecided == expected["undecided"]


@pytest.mark.parametrize("fixture", [FIXTURE, FIXTURE_2])
def test_the_folder_of_an_earlier_release_gives_the_same_bits(tmp_path: Path, fixture: Path) -> None:
    toy = left(tmp_path, fixture)
    folder = Path(toy.folder) / "syncer"
    verify(folder)
    for _ in range(2):
        found = recovered(toy)
        assert_as_expected(found, fixture)
        if fixture is FIXTURE:
            assert found.records == json.loads((fixture / "expected.json").read_bytes())["records"]
        else:
            assert all(is_sha256(held.digest) for held in found.holdings.values)
    card = json.loads((folder / "run.json").read_bytes())
    assert card["format"] == FORMAT, "a process of the earlier version must not touch it any more"


@pytest.mark.slow
@pytest.mark.parametrize("fixture", [FIXTURE, FIXTURE_2])
def test_sites_with_checkpoints_of_an_earlier_release_go_on_with_it(tmp_path: Path, fixture: Path) -> None:
    """The syncer first, then each site with its checkpoint and outbox, and all of them merge again."""
    toy = left(tmp_path, fixture)
    folder = Path(toy.folder) / "syncer"
    before = json.loads((fixture / "expected.json").read_bytes())
    with serving(toy) as (syncer, address, log):
        for name in ("a", "b"):
            if fixture is FIXTURE:
                kept = checkpoint.load(Path(toy.folder) / name / "checkpoints" / "00000001")
                site: ToySite = Restored(toy, name, address, kept)
                assert site.steps == kept.meta["steps"]
            else:
                site = ToySite(toy, name, address, Log().emit)
                assert site.steps == 160, "it has found its checkpoint"
            begun = site.steps
            finished = site.run(step_s=0.002, until_step=begun + 60)
            assert finished.ledger["processed"] > begun
            assert finished.ledger["merged"] > 0
        log.wait_for("published", 4, 30.0)
        state = syncer.core.ask(lambda machine: machine.snapshot())
        assert not any(is_sha256(held.digest) for held in syncer.holdings.values)
    for name in ("a", "b"):
        marks = [line["watermark"] for line in state["sites"][name]["lines"]]
        assert all(now > then for now, then in zip(marks, before["watermarks"][name], strict=True))
    assert log.of("note") == [], "no base was found to differ, and no update corrupt"
    assert verify(folder).records > 0
    assert not read_file(max(folder.glob("journal/journal-*.log"))).is_old, "what is new is written in format 2"
    kept_now = Snapshots(folder / "snapshots")
    assert all(kept_now.load(number).journal_chain for number in kept_now.numbers())


class Restored(ToySite):
    """A toy site that begins from a checkpoint of the trainer's own kind."""

    def __init__(self, toy: Toy, site: str, address: str, kept: checkpoint.Checkpoint) -> None:
        self._kept = kept
        super().__init__(toy, site, address, Log().emit)

    def _load(self) -> Resumed:
        for name, values in self._kept.part("model").items():
            self.parameters[name].copy_(values)
        self.steps = int(self._kept.meta["steps"])
        return Resumed(self.steps, self._kept.part("outer"), self._kept.meta["outer"])


def test_a_checkpoint_of_format_1_is_read_and_one_of_a_later_format_refused(tmp_path: Path) -> None:
    shutil.copytree(FIXTURE / "a" / "checkpoints" / "00000001", tmp_path / "00000001")
    found = checkpoint.load(tmp_path / "00000001")
    assert all(bool(torch.isfinite(values).all()) for values in found.part("model").values())
    manifest = tmp_path / "00000001" / "manifest.json"
    write_sealed(manifest, {**read_sealed(manifest), "format": 3}, PLAIN_DISK)
    with pytest.raises(checkpoint.CheckpointError, match="has format 3, and this program reads 1 and 2"):
        checkpoint.load(tmp_path / "00000001")


def test_what_a_later_version_has_left_is_refused_and_left_alone(tmp_path: Path) -> None:
    toy = left(tmp_path, FIXTURE)
    folder = Path(toy.folder) / "syncer"
    newest = max((folder / "snapshots").iterdir())
    manifest = json.loads((newest / "manifest.json").read_bytes())
    later = {**manifest, "format": 3}
    later["sha256"] = hashlib.sha256(canonical(later)).hexdigest()
    (newest / "manifest.json").write_text(json.dumps(later, sort_keys=True, indent=1))
    with pytest.raises(StoreError, match=f"{newest} has format 3, and this version reads up to 2"):
        recovered(toy)
    assert newest.is_dir(), "it is not damaged"
    path = folder / "run.json"
    card = json.loads(path.read_bytes())
    path.write_text(json.dumps({**card, "format": FORMAT + 1}))
    with pytest.raises(StoreError, match=f"has format {FORMAT + 1}, and this version reads up to {FORMAT}"):
        Store(folder, card_of(toy))
    assert json.loads(path.read_bytes())["format"] == FORMAT + 1
