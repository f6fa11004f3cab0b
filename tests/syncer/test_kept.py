"""A data folder read for its past: never written, and words for what it does not hold."""

from __future__ import annotations

import random
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from diloco.sync.rounds import Selection, parse_selection
from diloco.sync.syncer import OuterSync
from diloco.syncer.journal_files import SegmentRead
from diloco.syncer.replaying import Replayer, Rules
from diloco.syncer.restoring import ATTEMPTS, Kept, KeptError
from diloco.syncer.snapshots import Snapshot, same_values
from diloco.wire.messages import PullAsk
from tests.syncer.building import RUN, files
from tests.syncer.desk import OUTER, RULE, Desk
from tests.syncer.test_store import Story, assert_same, telling

RULES = Rules(OUTER, RULE, "int8")


def run(folder: Path, seed: int = 4, snapshots: int = 3, keep: int = 100) -> Desk:
    """A run with ``snapshots`` snapshots behind version 0, and something after the last one."""
    desk = Desk(folder)
    if keep > 2:
        desk.store.snapshots.prune = lambda *_: ([], False)  # type: ignore[method-assign]
    desk.begin()
    story = Story(desk, seed)
    for _ in range(snapshots):
        story.tell(25)
        desk.snapshot()
    story.tell(15)
    return desk


def versions(desk: Desk) -> list[int]:
    return [fragment.version for fragment in desk.machine.state.fragments]


def began(point: Any) -> list[int]:
    return [fragment.version for fragment in point.state.fragments]


def test_a_replay_of_a_live_folder_gives_the_run_and_leaves_every_byte_as_it_was(tmp_path: Path) -> None:
    desk = run(tmp_path)
    before, notes = files(tmp_path), list[str]()
    kept = Kept(tmp_path, notes.append)
    whole = kept.replay(RULES, verify=True)
    assert files(tmp_path) == before
    assert (whole.began_at, whole.compared, whole.snapshots) == ([0, 0], sum(versions(desk)), 3)
    assert all(same_values(mine, theirs) for mine, theirs in zip(whole.values, desk.values, strict=True))
    assert notes == []
    assert [values.version for values in kept.replay(RULES, last=2).values] == [2, 2]
    shortest = kept.replay(RULES, shortest=True)
    assert shortest.began_at == began(kept.points()[-1])
    assert shortest.records < whole.records
    assert all(same_values(mine, theirs) for mine, theirs in zip(shortest.values, whole.values, strict=True))
    second = began(kept.points()[1])
    assert kept.replay(RULES, last=max(second), shortest=True).began_at == second
    desk.close()


def test_without_some_updates_it_starts_from_the_newest_snapshot_that_is_old_enough(tmp_path: Path) -> None:
    desk = run(tmp_path)
    kept = Kept(tmp_path)
    middle = began(kept.points()[2])[0]
    assert middle < versions(desk)[0]
    sites = {name for name, site in desk.machine.state.sites.items() if site.lines[0].updates_merged}
    late = [Selection(site, "versions", middle + 1, 10**6, 0) for site in sorted(sites)]
    rebuilt = kept.replay(RULES, late)
    assert rebuilt.began_at[0] == middle
    assert {out.version for out in rebuilt.left_out} <= set(range(middle + 1, versions(desk)[0] + 1))
    assert rebuilt.values[0].version == versions(desk)[0]
    early = kept.replay(RULES, late, verify=True)
    assert early.began_at == [0, 0]
    assert all(same_values(one, other) for one, other in zip(early.values, rebuilt.values, strict=True))
    assert same_values(early.values[1], desk.values[1]), "the other fragment is the run's"
    by_number = kept.replay(RULES, [parse_selection("site=b:sequences=1..2:fragment=1")])
    assert [out.sequence for out in by_number.left_out] == [1, 2]
    assert by_number.began_at == [0, 0], "what a snapshot has merged needs an older one"
    desk.close()


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    desk = run(tmp_path / "run", keep=2)
    desk.close()
    kept = Kept(tmp_path / "run")
    for text, said in (
        ("site=x:versions=1..2", "no site x; it has a, b, c"),
        ("site=b:versions=1:fragment=2", "no fragment 2, only 2"),
        ("site=b:versions=1..3", "site=b:versions=1..3: outside what is kept; a replay can begin at version "),
        ("site=b:versions=9000", "no such update was merged; the newest versions are "),
        ("site=b:sequences=9000", "no such update was merged"),
    ):
        with pytest.raises(KeptError) as caught:
            kept.replay(RULES, [parse_selection(text)])
        assert said in str(caught.value), text
    with pytest.raises(KeptError, match="version 1: outside what is kept"):
        kept.replay(RULES, last=1)
    with pytest.raises(KeptError, match="is no syncer's data folder"):
        Kept(tmp_path)
    (tmp_path / "run" / "run.json").write_text("[]")
    with pytest.raises(KeptError, match=r"run\.json is damaged"):
        Kept(tmp_path / "run")


def test_a_damaged_snapshot_is_passed_over_and_damaged_history_is_named(tmp_path: Path) -> None:
    run(tmp_path).close()
    notes: list[str] = []
    broken = tmp_path / "snapshots" / "00000003" / "fragment-1.safetensors"
    broken.write_bytes(broken.read_bytes()[:-1] + b"\x01")
    kept = Kept(tmp_path, notes.append)
    assert kept.replay(RULES, [Selection("a", "versions", max(began(kept.points()[2])) + 1, 10**6)]).left_out
    assert any("fragment-1.safetensors is damaged" in note for note in notes), notes
    with pytest.raises(KeptError, match=r"fragment-1\.safetensors is damaged"):
        kept.replay(RULES, verify=True)
    shutil.rmtree(tmp_path / "spool" / "b")
    with pytest.raises(KeptError, match=r"^\S+/spool/b/\S+\.update is missing: the journal names it"):
        kept.replay(RULES)
    (tmp_path / "journal" / "journal-000002.log").unlink()
    with pytest.raises(KeptError, match=r"journal-000002\.log is missing: the journal is needed from segment 1 on"):
        kept.replay(RULES)


@pytest.mark.parametrize("times", [1, ATTEMPTS])
def test_a_folder_that_changes_while_it_is_read_is_read_again_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    run(tmp_path, snapshots=ATTEMPTS + 1).close()
    kept, read, gone = Kept(tmp_path), Kept.segments, iter(range(1, times + 1))

    def pruned(self: Kept, first: int, chain: str = "") -> list[SegmentRead]:
        for number in islice(gone, 1):
            shutil.rmtree(tmp_path / "snapshots" / f"{number:08d}")
            (tmp_path / "journal" / f"journal-{number:06d}.log").unlink()
        return read(self, first, chain)

    monkeypatch.setattr(Kept, "segments", pruned)
    if times == 1:
        assert kept.replay(RULES).began_at == began(kept.points()[0])
        assert kept.points()[0].number == 2
    else:
        with pytest.raises(KeptError, match=rf"changed {times} times while it was read: .*{times:06d}\.log is missing"):
            kept.replay(RULES)


# --- A replay from any snapshot --------------------------------------------------------------------------------------


class Told:
    """A run of ``length`` events with the records since its first snapshot."""

    def __init__(self, folder: Path, seed: int, codec: str = "int8", length: int = 40) -> None:
        with telling(folder, seed, codec=codec) as story:
            self.desk = story.desk
            self.first: Snapshot = self.desk.store.snapshots.load(1)
            story.tell(length)
        self.records = self.desk.store.journal.read(self.first.journal_segment)

    def replay(self, replayer: Replayer) -> Replayer:
        for record in self.records:
            replayer.apply(record)
        return replayer

    def replayer(self) -> Replayer:
        machine = OuterSync.restore(OUTER, self.first.state)
        return Replayer(machine, self.first.fragments, self.desk.store, self.desk.rules)


@pytest.mark.parametrize("codec", ["fp32", "int4:32+zstd1"])
def test_record_by_record_it_becomes_what_the_process_was(tmp_path: Path, codec: str) -> None:
    told = Told(tmp_path, random.Random(codec).randrange(1 << 20), codec)
    replayer = told.replayer()
    for number, record in enumerate(told.records, 1):
        replayer.apply(record)
        assert replayer.records == number
        versions = [fragment.version for fragment in replayer.machine.state.fragments]
        assert [values.version for values in replayer.values] == versions, "memory and values are of one instant"
    assert sum(versions) > 3, "no outer step: the dice prove nothing"
    assert_same(replayer, told.desk, codec)
    held = replayer.values[0]
    assert held.version > 1
    header = replayer.holdings.choose(PullAsk(RUN, "a", 0, held.version - 1, 0, 0), (), replayer.machine.state).header
    assert (header.version, header.digest) == (held.version, held.digest)
    assert header.whole is (codec == "fp32"), "it keeps the down-links of the steps that it made"
