"""What a folder holds after any end of its process: the same state to the bit, or a sentence that says why not."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco.outer.optimizer import OuterRule
from diloco.sync.events import JoinRequested, SiteEvicted
from diloco.sync.journal import JournalError
from diloco.sync.options import OuterOptions
from diloco.syncer.replaying import Replayer, Rules
from diloco.syncer.restoring import Kept, Known, begin_lineage
from diloco.syncer.snapshots import Retention, SnapshotError, same_values
from diloco.syncer.spool import SpoolError
from diloco.syncer.store import Store, StoreError, payloads_in, verify
from tests.sooner import sooner
from tests.syncer.building import NO_WAIT, files, update
from tests.syncer.desk import CARD, OPTIMIZER, OUTER, Desk

SITES = ("a", "b", "c")


class Story:
    """A run told by dice: joins, updates and outer steps, as many events as it is told."""

    def __init__(self, desk: Desk, seed: int) -> None:
        self.desk, self.dice = desk, random.Random(seed)
        for site in SITES:
            desk.handle(JoinRequested(1, site, "0123abcd"))

    def restart(self, **options: Any) -> None:
        """As a new process that takes the folder over."""
        self.desk.close()
        self.desk = Desk(self.desk.store.folder, **options)
        self.desk.begin()

    def tell(self, times: int = 1) -> None:
        for _ in range(times):
            self._tell()

    def _tell(self) -> None:
        desk, dice = self.desk, self.dice
        if desk.under_way and dice.random() < 0.4:
            desk.finish(dice.choice(sorted(desk.under_way)))
            return
        site, fragment = dice.choice(SITES), dice.randrange(2)
        line = desk.machine.state.sites[site].lines[fragment]
        if len(line.undecided) >= OUTER.updates_in_flight_max:
            return
        version = desk.machine.state.fragments[fragment].version
        header, payload = update(
            site,
            line.watermark + 1,
            fragment,
            encoding=dice.choice(("fp32", "int8")),
            base_version=max(0, version - dice.randrange(3)),
            tokens=dice.randrange(1, 200),
        )
        desk.push(header, payload)


@contextmanager
def telling(folder: Path, seed: int, **options: Any) -> Iterator[Story]:
    desk = Desk(folder, **options)
    desk.begin()
    story = Story(desk, seed)
    yield story
    story.desk.close()


def assert_same(recovered: Desk | Replayer, desk: Desk, why: object) -> None:
    """Invariant 11a: memory and every tensor, bit for bit."""
    mine, theirs = recovered.machine.snapshot(), desk.machine.snapshot()
    # Events that changed nothing are not journalled; only the clock has seen them.
    assert {**mine, "now_ns": 0} == {**theirs, "now_ns": 0}, why
    assert all(same_values(left, right) for left, right in zip(recovered.values, desk.values, strict=True)), why


def assert_copied(desk: Desk, why: object, *, harmed: bool = False) -> None:
    """A process that takes a copy of the folder over has the same; ``harmed``: also when the newest snapshot is not."""
    folder = desk.store.folder.with_name("copy")
    shutil.copytree(desk.store.folder, folder)
    kept = sorted(path for path in (folder / "snapshots").iterdir() if path.name.isdigit())
    if harmed and len(kept) > 1:
        (kept[-1] / "state.json").unlink()
    again = Desk(folder, desk.codec)
    assert_same(again, desk, why)
    again.begin()
    assert again.under_way == desk.under_way, why
    again.close()
    shutil.rmtree(folder)


def taken_over(desk: Desk, why: object) -> list[str]:
    """What a process says that takes the folder over, and finds the same in it."""
    again = Desk(desk.store.folder)
    assert_same(again, desk, why)
    assert not again.is_new
    again.close()
    return again.notes


@pytest.mark.parametrize(
    ("codec", "seed"),
    sooner([("fp32", 1), ("int4:32+zstd1", 2), ("int4:32+zstd1", 3)], ("fp32", 1), ("int4:32+zstd1", 2)),
)
def test_invariant_11a_recovery_is_the_uninterrupted_syncer_bit_for_bit(tmp_path: Path, codec: str, seed: int) -> None:
    """Killed after any event, in the middle of merges too, and then going on as if nothing had been."""
    merging = 0
    with telling(tmp_path / "run", seed, codec=codec) as story:
        for number in range(60):
            story.tell()
            if number % 13 == 12:
                story.desk.snapshot()
            if number % 4 == 0:
                merging += bool(story.desk.under_way)
                assert_copied(story.desk, (seed, number))
    assert merging > 3, "no kill was in the middle of a merge: the dice prove nothing"


def told(folder: Path, snapshots: int = 3, seed: int = 8) -> Desk:
    with telling(folder, seed) as story:
        for _ in range(snapshots):
            story.tell(15)
            story.desk.snapshot()
        story.tell(9)
    return story.desk


def harm(path: Path, how: str) -> bytes:
    """Do to a file what a disk may do; returns what it held."""
    if path.is_dir():
        shutil.rmtree(path)
        return b""
    whole, middle = path.read_bytes(), path.stat().st_size // 2
    path.unlink()
    if how == "flipped":
        path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 0x80]) + whole[middle + 1 :])
    elif how == "unreadable":
        path.mkdir()
    return whole


def test_a_damaged_newest_snapshot_is_named_set_aside_and_the_one_before_it_used(tmp_path: Path) -> None:
    """``test_snapshots`` has what damage there is."""
    desk = told(tmp_path)
    newest = max(desk.store.snapshots.numbers())
    harm(tmp_path / "snapshots" / f"{newest:08d}" / "fragment-1.safetensors", "flipped")
    again = Desk(tmp_path)
    assert_same(again, desk, "from the one before it")
    (note,) = again.notes
    assert f"{newest:08d}" in note
    assert "the snapshot before it is used" in note
    again.begin()
    again.snapshot()
    again.close()
    assert len(again.store.snapshots.numbers()) == 2, "the damaged one must not push a whole one out"
    assert (tmp_path / "snapshots" / f"{newest:08d}.damaged").is_dir()
    assert taken_over(again, "after one more snapshot") == []


@pytest.mark.parametrize("where", ["snapshots/*/state.json", "journal/journal-*.log"])
def test_what_only_an_older_snapshot_needs_stops_no_start_and_is_said(tmp_path: Path, where: str) -> None:
    desk = told(tmp_path)
    path = min(tmp_path.glob(where))
    harm(path, "flipped")
    notes = taken_over(desk, "what is needed was whole")
    assert str(path if path.suffix == ".log" else path.parent) in notes[0]


@pytest.mark.parametrize(
    ("where", "how", "words"),
    [
        ("spool/*/*.update", "missing", r"\.update is missing: the journal names it"),
        ("journal/journal-*2.log", "flipped", r"\.log: unit at byte \d+ is damaged"),
        ("journal/journal-*2.log", "missing", r"\.log is missing"),
        ("snapshots/*/state.json", "missing", r"no whole snapshot: .*state\.json.*state\.json"),
        ("snapshots", "missing", "no whole snapshot: it is empty"),  # And no new folder.
    ],
)
def test_a_folder_that_was_changed_is_refused_in_words(tmp_path: Path, where: str, how: str, words: str) -> None:
    told(tmp_path, snapshots=1)
    for path in sorted(tmp_path.glob(where)):
        harm(path, how)
    with pytest.raises(StoreError, match=words):
        Desk(tmp_path)


BITS = r"version 1 of fragment \d was xxh3:\w{12} when it was published and is xxh3:\w{12}.*options or the arithmetic"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"outer": OuterOptions(**{**NO_WAIT, "quorum": 3})},  # type: ignore[arg-type]
            r"record \d+ .* had effects \w{16} .*other options",
        ),
        ({"rule": OuterRule(replace(OPTIMIZER, lr=0.5))}, BITS),
        ({"down_codec": "int4"}, BITS),
    ],
)
def test_other_options_than_the_journal_was_written_with_are_noticed_in_words(
    tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    told(tmp_path, snapshots=0)
    with closing((store := Store(tmp_path, CARD)).journal), pytest.raises(StoreError, match=words):
        store.recover(replace(Rules(OUTER, OuterRule(OPTIMIZER), "int8"), **changed))


def test_the_folder_of_another_run_is_refused_with_the_field(tmp_path: Path) -> None:
    Desk(tmp_path).close()
    before = files(tmp_path)
    for field in ("run_id", "layout_fingerprint", "shared_digest"):
        with pytest.raises(StoreError, match=f"run.json has {field} .*use another folder"):
            Store(tmp_path, replace(CARD, **{field: "else"}))
    assert files(tmp_path) == before


def test_a_damaged_run_card_is_named(tmp_path: Path) -> None:
    """Also where a bit flips in what no start needs: it is said then."""
    Desk(tmp_path).close()
    path = tmp_path / "run.json"
    whole = path.read_bytes()
    flips = [(bit // 8, 1 << bit % 8) for bit in range(0, 8 * len(whole), 5)]
    flipped = [whole[:at] + bytes([whole[at] ^ mask]) + whole[at + 1 :] for at, mask in flips]
    for content in (b"", b"{", b"[]", b"[1]", b"\xff\xfe", b"7", *flipped):
        path.write_bytes(content)
        try:
            desk = Desk(tmp_path)
        except StoreError as error:
            said = str(error)
        else:
            desk.close()
            assert content in flipped
            said = " ".join(desk.notes)
        assert path.name in said, content


def test_a_process_that_died_before_version_0_was_kept_left_a_new_folder(tmp_path: Path) -> None:
    store = Store(tmp_path, CARD)
    store.journal.rotate()
    store.journal.close()
    halves = (
        "snapshots/.00000001.tmp/x",
        ".run.json.123.tmp",
        ".leadership.json.123.tmp",
        "lineages/.7.tmp/image.json",
    )
    for name in halves:  # What it and others have left beside their files goes with the next start.
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"half")
    with telling(tmp_path, 1) as story:
        assert story.desk.is_new
        assert list(tmp_path.rglob(".*.tmp")) == []
        story.tell(8)
    assert taken_over(story.desk, "begun at the second attempt") == []


# --- the life of a payload -------------------------------------------------------------------------------------------


def test_payloads_do_not_gather_over_many_snapshots_and_restarts(tmp_path: Path) -> None:
    """Bound: what is undecided, what the journal behind the older of two snapshots names, and nothing else."""
    with telling(tmp_path, 21) as story:
        for cycle in range(12):
            story.tell(12)
            story.desk.snapshot()
            if cycle % 3 == 2:
                story.restart()
            assert len(list((tmp_path / "spool").glob("*/*.update"))) <= 2 * 12 + 2 * len(SITES) * 2
        for site in SITES[1:]:  # What is undecided of a site goes with it.
            story.desk.handle(SiteEvicted(1, site))
        while story.desk.under_way:
            story.desk.finish(min(story.desk.under_way))
        for _ in range(3):
            story.desk.snapshot()
    assert list((tmp_path / "spool").glob("*/*.update")) == [], "everything is decided and snapshots are past it"


@pytest.mark.parametrize("seed", range(2))
def test_no_payload_goes_while_a_snapshot_that_is_kept_may_need_it(tmp_path: Path, seed: int) -> None:
    """At any point the newest snapshot may turn out damaged: the one before it and its journal must still do."""
    writer: Callable[[], int] | None = None
    with telling(tmp_path / "run", seed) as story:
        for number in range(70):
            story.tell()
            if number % 9 == 3:
                writer = story.desk.snapshot_writer()  # Cut here ...
            if number % 9 == 6 and writer is not None:
                writer()  # ... and written and pruned while the run has gone on.
            if number % 7 == 0:
                assert_copied(story.desk, (seed, number), harmed=True)


def test_any_outer_step_within_retention_can_be_replayed_and_what_is_older_goes(tmp_path: Path) -> None:
    """From the oldest snapshot that is kept: the same bits as the run has now, with every payload on the way."""
    retention = Retention(12, 1 << 30)
    with telling(tmp_path, 31, retention=retention) as story:
        for cycle in range(14):
            story.tell(12)
            story.desk.snapshot()
            if cycle % 4 == 3:
                story.restart(retention=retention)
            store = story.desk.store
            kept = [store.snapshots.point(number) for number in store.snapshots.numbers()]
            assert len(kept) <= 6
            assert kept[0].number == 1 or kept[-1].steps - kept[0].steps >= 12
            assert min(store.journal.segments()) == kept[0].segment
            rebuilt = Kept(tmp_path).replay(story.desk.rules)
            assert rebuilt.began_at == [
                each["version"] for each in store.snapshots.load(kept[0].number).state["fragments"]
            ]
            assert [each.digest for each in rebuilt.values] == [each.digest for each in story.desk.values], cycle
    assert kept[0].number > 1, "something went"


def test_the_past_is_measured_with_its_payloads(tmp_path: Path) -> None:
    with telling(tmp_path, 33, retention=Retention(1000, 1 << 30)) as story:
        story.tell(20)
        store, waiting = story.desk.store, payloads_in(story.desk.machine.snapshot())
        decided = [path for path in (tmp_path / "spool").glob("*/*.update") if "/".join(path.parts[-2:]) not in waiting]
        assert len(decided) > 3, "the dice prove nothing"
        store.release("a/0-1-0123456789abcdef.update")  # As of an update that was refused: its payload is not here.
        wanted = sum(path.stat().st_size for path in [*decided, store.journal.path(1)])
        assert (store._bytes_in(range(1, 2)), store._bytes_in(range(2, 9))) == (wanted, 0)


def test_a_bound_on_the_past_is_kept_and_said_and_a_full_disk_takes_all_of_it(tmp_path: Path) -> None:
    with telling(tmp_path, 32, retention=Retention(1000, 20_000)) as story:
        store = story.desk.store
        for _ in range(20):
            story.tell(10)
            story.desk.snapshot()
        (note,) = story.desk.notes
        assert note == "less than the last 1000 outer steps can be replayed: they need more than 20000 bytes"
        kept = [store.snapshots.point(number) for number in store.snapshots.numbers()]
        past = sum(point.size for point in kept[:-2]) + store._bytes_in(range(kept[0].segment, kept[-2].segment))
        assert past <= 20_000
        story.restart(retention=Retention(1000, 1 << 30))
        for _ in range(3):
            story.tell(10)
            story.desk.snapshot()
        assert len(story.desk.store.snapshots.numbers()) > 2
        story.desk.store.let_go_of_the_past()
        assert len(story.desk.store.snapshots.numbers()) == 2
        assert story.desk.notes[-1].endswith("and the journal behind them are deleted: the disk is full")
    taken_over(story.desk, "what recovery needs is there")


# --- ``run.json`` ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [None, 1, "7"])
def test_a_run_card_that_is_missing_or_of_another_lineage_is_named_and_written_anew(
    tmp_path: Path, wrong: object
) -> None:
    """A card that said lineage 1 for a restored run had been made in silence."""
    desk = Desk(tmp_path)
    desk.begin()
    began = begin_lineage(desk.store, desk.machine, desk.values, None, "a test", Known(7))
    desk.close()
    path = tmp_path / "run.json"
    whole = json.loads(path.read_text())
    assert whole["lineage"] == began.lineage == 7
    path.write_text(json.dumps({**whole, "lineage": wrong}))
    said = f"had lineage {wrong!r}: now it has the journal's, 7"
    if wrong is None:
        path.unlink()
        said = "was missing: it is written again"
    again = Desk(tmp_path)
    again.close()
    assert [note for note in again.notes if f"{path} {said}" in note]
    assert json.loads(path.read_text()) == whole


def test_a_run_card_of_an_earlier_release_is_accepted_and_written_anew(tmp_path: Path) -> None:
    """It has another digest where a setting that may change was not at its default."""
    Desk(tmp_path).close()
    path = tmp_path / "run.json"
    whole = {**json.loads(path.read_text()), "comment": "what this release does not know stays"}
    path.write_text(json.dumps({**whole, "shared_digest": "earlier"}))
    with pytest.raises(StoreError, match=r"run\.json has shared_digest 'earlier' and this run has 'shared'"):
        Store(tmp_path, replace(CARD, earlier_digest="another"))
    Store(tmp_path, replace(CARD, earlier_digest="earlier")).journal.close()
    assert json.loads(path.read_text()) == whole


# --- What is acknowledged and not merged yet is looked at on start ---------------------------------------------------


@pytest.mark.parametrize(
    ("how", "words"),
    [("flipped", "is damaged"), ("missing", "is missing"), ("unreadable", "cannot be read")],
)
def test_a_payload_that_waits_is_looked_at_on_start_and_its_update_named(tmp_path: Path, how: str, words: str) -> None:
    """It had started without a word, and had ended for ever at the outer step of that update."""
    with telling(tmp_path, 1) as story:  # One is being merged, one waits behind it, and nothing is merged.
        for site in ("a", "b"):
            story.desk.push(*update(site, 1, 1))
    (pending,) = story.desk.machine.state.sites["b"].lines[1].undecided
    path = tmp_path / "spool" / pending.payload
    for with_snapshot in (False, True):
        whole = harm(path, how)
        before = files(tmp_path)
        with pytest.raises(StoreError, match=rf"{path} {words}.*it is update 1 of fragment 1 from site b, .*restore"):
            Desk(tmp_path)
        assert files(tmp_path) == before
        if how == "unreadable":
            path.rmdir()
        path.write_bytes(whole)
        again = Desk(tmp_path)
        if not with_snapshot:
            again.snapshot()
            again.close()
    again.begin()
    for _ in range(2):
        again.finish(1)
    assert again.values[1].version == 2, "put back, it is merged"
    again.close()


# --- Whatever is damaged in a data folder is named, also what a start would not look at; and nothing is touched ------


def test_a_whole_folder_is_left_as_it_is_and_a_flipped_bit_anywhere_and_a_missing_file_are_named(
    tmp_path: Path,
) -> None:
    with pytest.raises(JournalError, match="holds no journal"):
        verify(tmp_path)
    assert list(tmp_path.iterdir()) == []
    told(tmp_path)
    (tmp_path / "snapshots" / ".00000009.tmp").mkdir()  # Beside a syncer that is writing one.
    before = files(tmp_path)
    found = verify(tmp_path)
    assert files(tmp_path) == before
    assert (tmp_path / "snapshots" / ".00000009.tmp").is_dir()
    assert found.segments == len(list((tmp_path / "journal").glob("journal-*.log")))
    assert (found.snapshots, found.torn_bytes) == (2, 0)
    assert found.payloads > 5
    assert found.records > 20
    seed = random.randrange(1 << 30)
    dice, last = random.Random(seed), max((tmp_path / "journal").glob("journal-*.log"))
    for path in (tmp_path / name for name in before):
        if path.name in ("run.json", "lock", "journal.end"):
            continue
        whole = path.read_bytes()
        at = dice.randrange(len(whole) - 44 if path == last else len(whole))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << dice.randrange(8))]) + whole[at + 1 :])
        with pytest.raises((JournalError, SnapshotError, SpoolError), match=path.name) as raised:
            verify(tmp_path)
        assert str(path) in str(raised.value), (seed, at)
        path.unlink()
        with pytest.raises((JournalError, SnapshotError, SpoolError), match=path.name):
            verify(tmp_path)
        path.write_bytes(whole)
    assert verify(tmp_path) == found


def test_a_snapshot_of_another_chain_is_named(tmp_path: Path) -> None:
    told(tmp_path / "run")
    told(tmp_path / "other", seed=9)
    for path in (tmp_path / "run" / "journal").glob("journal-*.log"):
        path.write_bytes((tmp_path / "other" / "journal" / path.name).read_bytes())
    (tmp_path / "run" / "journal" / "journal.end").unlink()
    with pytest.raises(JournalError, match="is of another chain: snapshot"):
        verify(tmp_path / "run")
