"""Reading a data folder's past, and restarting a run from restored values.

Reading. ``Kept`` reads what a syncer's data folder keeps of the past; it never writes, creates or cuts anything there.
The folder may be that of a running syncer. Its journal then grows during the read, and a snapshot, a segment or a
payload may be deleted: ``Kept.replay`` then reads again, a bounded number of times.

Restoring. In the data folder of a stopped run, whose lock the caller holds, the order of writes is such that no crash
leaves half a restore:

1. the values, as each fragment's next version, into ``lineages/``: durable, and nothing reads them yet;
2. the record ``LineageBegan`` into the journal, durable: from here on the restore has happened, and every recovery of
   the folder finds the values of 1;
3. a snapshot right after it, so that no recovery needs 1 any more; 4. the number into ``run.json``, for display.

In an empty or lost folder everything is made in ``.restoring/`` inside it, and then moved out, the snapshots last. A
syncer that starts on a folder with a ``.restoring/`` and without a snapshot refuses it; the next attempt to restore
starts over there.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.codec.base import shorter
from diloco.durable import LOCK, PLAIN_DISK, Disk, ReadingDisk, Step
from diloco.sync.data_units import Units, added
from diloco.sync.effects import TellFate
from diloco.sync.events import LineageBegan
from diloco.sync.journal import JournalError, PlainError, Record, digest_effects, from_plain, parse_json
from diloco.sync.members import next_lineage
from diloco.sync.state import FragmentState, Line, OuterState, Part, Site, Status, Upstream
from diloco.sync.syncer import OuterSync
from diloco.syncer.replaying import DataFolder, LeaveOutError, ReplayerWithout, Rules, held_of
from diloco.syncer.snapshots import FragmentValues, Held, Image, Retention, Snapshot, SnapshotError, same_values
from diloco.syncer.spool import SpoolError
from diloco.syncer.store import STAGING, RunCard, Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from diloco.sync.rounds import Selection
    from diloco.syncer.journal_files import SegmentRead

ATTEMPTS = 5
"""Attempts at reading a folder that changes meanwhile, before that is an error."""


BROKEN = (JournalError, SpoolError, SnapshotError, LeaveOutError, PlainError)
"""What a replay raises where the folder is damaged, or its journal gives no valid state."""


class KeptError(ValueError):
    """The folder lacks what was requested, or it is damaged; the text says what is there, or names the file."""


@dataclass(frozen=True, slots=True)
class Point:
    """A snapshot from which a replay may start."""

    number: int
    state: OuterState
    segment: int


class Kept(DataFolder):
    """Reads ``folder``; ``note`` gets a text about each damaged item that is skipped."""

    def __init__(self, folder: Path, note: Callable[[str], None] = lambda why: None) -> None:
        self._note = note
        self.card = _card(folder / "run.json")
        super().__init__(folder, {"run_id": self.card.run_id}, ReadingDisk())

    def points(self) -> list[Point]:
        """Return the intact snapshots, oldest first."""
        found: list[Point] = []
        for number in self.snapshots.numbers():
            try:
                snapshot = self.snapshots.load(number, whole=False)
                state = from_plain(OuterState, snapshot.state, "state")
                found.append(Point(number, state, snapshot.journal_segment))
            except SnapshotError as error:
                self._note(f"{error}; it is skipped")
            except PlainError as error:
                raise KeptError(f"snapshot {number} in {self.folder} is of another version: {error}") from error
        if not found:
            raise KeptError(f"{self.folder / 'snapshots'} has no whole snapshot: there is nothing to start from")
        return found

    def segments(self, first: int, chain: str = "") -> list[SegmentRead]:
        """Return the journal from segment ``first`` on, without a record that is being written."""
        try:
            return list(self.journal.walk(first, chain))
        except JournalError as error:
            raise KeptError(str(error)) from error

    def replay(
        self,
        rules: Rules,
        selections: Sequence[Selection] = (),
        last: int | None = None,
        *,
        and_later: bool = False,
        verify: bool = False,
        shortest: bool = False,
    ) -> ReplayerWithout:
        """Replay the journal without the updates that ``selections`` name, each fragment up to version ``last``.

        Starts from the newest snapshot that is old enough; from the oldest if nothing is left out (unless
        ``shortest``), or with ``verify``, which also compares every kept snapshot on the way. Raises ``KeptError`` with
        a clear text.
        """
        from_oldest, why = verify or not (selections or shortest), ""
        for _ in range(ATTEMPTS):
            before = self.snapshots.numbers()
            try:
                points = self.points()
                snapshot = self._begins(points, selections, last, from_oldest=from_oldest)
                machine = OuterSync.restore(rules.outer, snapshot.state)
                values = snapshot.fragments
                replayer = ReplayerWithout(machine, values, self, rules, selections, last, and_later=and_later)
                self._apply(replayer, snapshot, points if verify else [])
                return replayer
            except (KeptError, FileNotFoundError, *BROKEN) as error:
                why = f"{error.filename} is missing" if isinstance(error, FileNotFoundError) else str(error)
                if self.snapshots.numbers() == before:
                    raise KeptError(why) from error
        raise KeptError(f"{self.folder} changed {ATTEMPTS} times while it was read: {why}")

    def _begins(
        self, points: Sequence[Point], selections: Sequence[Selection], last: int | None, *, from_oldest: bool
    ) -> Snapshot:
        """Return the snapshot from which a replay without ``selections`` up to version ``last`` starts."""
        fit = [
            point
            for point in points
            if (last is None or all(fragment.version <= last for fragment in point.state.fragments))
            and not any(_merged_before(point.state, chosen) for chosen in selections)
        ]
        if not fit:
            _check_sites(points[-1].state, selections)
            asked = " and ".join([*map(str, selections), *([] if last is None else [f"version {last}"])])
            oldest, newest = points[0].state.fragments, points[-1].state.fragments
            parts = [
                f"{old.version + 1} (snapshot up to {new.version}) of fragment {index}"
                for index, (old, new) in enumerate(zip(oldest, newest, strict=True))
            ]
            can = f"a replay can begin at version {', '.join(parts)}"
            raise KeptError(f"{asked}: outside what is kept; {can}")
        for point in fit if from_oldest else reversed(fit):
            try:
                return self.snapshots.load(point.number)
            except SnapshotError as error:
                self._note(f"{error}; it is skipped")
        raise KeptError(f"{self.folder / 'snapshots'} has no whole snapshot that is old enough")

    def _apply(self, replayer: ReplayerWithout, snapshot: Snapshot, compare: Sequence[Point]) -> None:
        """Replay the journal after ``snapshot``; compare the values with those of the snapshots in ``compare``."""
        last, state = replayer.last, replayer.machine.state
        for read in self.segments(snapshot.journal_segment, snapshot.journal_chain):
            for point in compare:
                if point.segment == read.index > snapshot.journal_segment and not replayer.left_out and last is None:
                    self._compare(point, replayer)
            for record in read.records:
                replayer.apply(record)
        _check_sites(state, replayer.selections)
        for chosen in replayer.selections:
            if not any(chosen.takes(out.site, out.fragment, out.sequence, out.version) for out in replayer.left_out):
                newest = " ".join(str(fragment.version) for fragment in state.fragments)
                raise KeptError(f"{chosen}: no such update was merged; the newest versions are {newest}")
        if last is not None:  # Later steps changed only the version numbers.
            replayer.holdings.values = [replace(each, version=min(last, each.version)) for each in replayer.values]

    def _compare(self, point: Point, replayer: ReplayerWithout) -> None:
        """Raise ``KeptError`` unless the values equal those of a snapshot taken at this instant."""
        there = self.snapshots.load(point.number).fragments
        for index, (mine, kept) in enumerate(zip(replayer.values, there, strict=True)):
            if not same_values(mine, kept):
                raise KeptError(
                    f"fragment {index} in snapshot {point.number} of {self.folder} is not what the journal gives: "
                    f"version {kept.version}, {shorter(kept.digest)} there, {shorter(mine.digest)} computed again"
                )
        replayer.snapshots += 1


def _card(path: Path) -> RunCard:
    try:
        facts = parse_json(path.read_bytes())
        return RunCard(facts["run_id"], facts["layout_fingerprint"], facts["shared_digest"])
    except FileNotFoundError:
        if any(path.parent.glob("snapshots/[0-9]*")):
            raise KeptError(f"{path} is missing: start the run's syncer, which writes it again") from None
        raise KeptError(f"{path.parent} is no syncer's data folder: it has no {path.name}") from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise KeptError(f"{path} is damaged: {error}") from error


def _check_sites(known: OuterState, selections: Sequence[Selection]) -> None:
    for chosen in selections:
        if chosen.site not in known.sites:
            raise KeptError(f"{chosen}: the run has no site {chosen.site}; it has {', '.join(sorted(known.sites))}")
        if chosen.fragment is not None and chosen.fragment >= len(known.fragments):
            raise KeptError(f"{chosen}: the run has no fragment {chosen.fragment}, only {len(known.fragments)}")


def _merged_before(state: OuterState, chosen: Selection) -> bool:
    """Return whether a ``chosen`` update may have been merged in ``state``."""
    for index, fragment in enumerate(state.fragments):
        if not chosen.of(chosen.site, index):
            continue
        if chosen.kind == "versions":
            if fragment.version >= chosen.first:
                return True
        elif (site := state.sites.get(chosen.site)) is not None:
            waiting = {pending.sequence for pending in site.lines[index].undecided}
            accepted = range(chosen.first, min(chosen.last, site.lines[index].watermark) + 1)
            if not waiting.issuperset(accepted):
                return True
    return False


KEEP_PAST = Retention(steps=1 << 40, bytes_max=1 << 60)
"""A restore deletes nothing that can be replayed; the syncer that continues applies its own settings."""
LEFT_ALONE = frozenset({LOCK, "leadership.json", STAGING})
MOVED = ("journal", "run.json", "spool", "lineages", "snapshots")
"""The order in which a restored folder's parts are moved into place: it is recoverable only with the last."""


class RestoreError(ValueError):
    """Nothing was restored; the text gives the reason."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of the run's numbers besides the restored state: the largest ``lineage`` and ``epoch`` found
    elsewhere. ``clock_s`` is the present second since 1970 (``next_lineage``)."""

    clock_s: int
    lineage: int = 0
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Restored:
    """A restore's result. ``refused`` counts the updates that had no fate; ``held`` is as in ``LineageBegan``."""

    lineage: int
    versions: tuple[int, ...]
    digests: tuple[str, ...]
    run_tokens: int
    refused: int
    held: tuple[tuple[str, int, int, int], ...]


def begin_lineage(
    store: Store, machine: OuterSync, values: Sequence[FragmentValues], held: Held | None, why: str, known: Known
) -> Restored:
    """Publish ``values`` as each fragment's next version, whole, in a new lineage of the run in ``store``.

    ``machine`` is the recovered one. ``held`` is what the values contain of each site; None: all that is merged. The
    lineage is above every one that ``known`` names.
    """
    state = machine.state
    lineage = next_lineage(max(state.lineage, known.lineage), known.clock_s)
    published = [
        replace(each, version=fragment.version + 1) for each, fragment in zip(values, state.fragments, strict=True)
    ]
    image = Image(store.card.facts(), tuple(published), held or {}, {"why": why})
    store.lineages.keep(lineage, image)
    listed = None if held is None else tuple((name, index, *counts) for (name, index), counts in sorted(held.items()))
    event = LineageBegan(lineage, tuple(each.digest for each in published), why, listed)
    effects = machine.handle(event, state.now_ns)
    store.journal.append([Record(state.now_ns, event, digest_effects(effects))])
    store.journal.flush()
    store.carried_out(effects)
    store.snapshot_writer(machine, published)()
    store.write_lineage(lineage)
    versions = tuple(fragment.version for fragment in state.fragments)
    refused = sum(isinstance(effect, TellFate) for effect in effects)
    now_held = tuple((name, index, *counts) for (name, index), counts in sorted(held_of(state).items()))
    return Restored(lineage, versions, event.digests, state.run_tokens(), refused, now_held)


@dataclass(frozen=True, slots=True)
class Restore:
    """Restores the run of ``card`` in the data folder ``folder``, whose lock the caller holds; ``why`` is for the
    journal. Each method makes one restore."""

    folder: Path
    card: RunCard
    rules: Rules
    why: str
    known: Known
    disk: Disk = PLAIN_DISK

    def in_place(self, image: Image) -> Restored:
        """Continue the run in ``folder`` from ``image``; raise ``RestoreError``, or ``StoreError`` for a damaged
        folder."""
        if (name := self.card.difference(image.card)) is not None:
            theirs, ours = image.card.get(name), getattr(self.card, name)
            raise RestoreError(f"the image is of another run: its {name} is {theirs!r}, and here it is {ours!r}")
        store = Store(self.folder, self.card, self.disk, KEEP_PAST)
        with contextlib.closing(store.journal):
            if store.is_new():
                raise RestoreError(f"{self.folder} holds no run: an image has the run's values, but not its sites")
            # Waiting updates are refused, intact or not.
            machine = store.recover(self.rules, merges=False).machine
            return begin_lineage(store, machine, image.fragments, image.held, self.why, self.known)

    def backup(self, fetch: Callable[[Path], object]) -> Restored:
        """Restore a backup into an empty ``folder`` (``fetch(path)`` copies it there), and begin a lineage there."""
        with _staged(self.folder, self.disk) as staging:
            fetch(staging)
            store = Store(staging, self.card, self.disk, KEEP_PAST)
            with contextlib.closing(store.journal):
                recovered = store.recover(self.rules, merges=False)
                state = recovered.machine.state
                state.epoch = max(state.epoch, self.known.epoch)
                return begin_lineage(store, recovered.machine, recovered.values, None, self.why, self.known)

    def values(
        self,
        values: Sequence[FragmentValues],
        lines: Mapping[str, Sequence[Line]],
        units_begun: int = 0,
        site_above: str = "",
    ) -> Restored:
        """Make a run with ``values`` in an empty ``folder``, and begin a lineage there.

        ``lines`` is what is known of each site, and all that will count as merged. If data units are leased, none
        before ``units_begun`` is leased again. A region is the site ``site_above`` of the run above. It knows nothing
        more of that run: when it joins, it takes the values above.
        """
        with _staged(self.folder, self.disk) as staging:
            store = Store(staging, self.card, self.disk, KEEP_PAST)
            with contextlib.closing(store.journal):
                state = OuterState([FragmentState(version=each.version, digest=each.digest) for each in values])
                state.lineage, state.epoch, state.started_ns = max(1, self.known.lineage), self.known.epoch, 0
                for name, each in sorted(lines.items()):
                    state.sites[name] = Site(1, "", Status.LEFT, list(each))
                if self.rules.outer.unit_sequences:
                    # Merges are unknown: the units that have begun count as partly merged, and none is leased again.
                    state.units = Units(fresh=units_begun, over=added([(0, units_begun)], ()), partly=units_begun)
                if site_above:
                    state.upstream = Upstream([Part() for _ in values], site=site_above)
                machine = OuterSync(self.rules.outer, state)
                store.begin(machine, values)
                return begin_lineage(store, machine, values, None, self.why, self.known)


@contextlib.contextmanager
def _staged(folder: Path, disk: Disk) -> Iterator[Path]:
    """Yield a staging folder inside ``folder``, finally moved out into it. ``RestoreError`` unless that is empty."""
    staging = folder / STAGING
    there = sorted(path.name for path in folder.iterdir() if path.name not in LEFT_ALONE)
    # A restore that was interrupted after its last move has left a complete run, which may have continued since.
    if there and staging.exists() and any(folder.glob("snapshots/[0-9]*")):
        raise RestoreError(f"{folder} is restored, and only the clean-up after it was interrupted: start the syncer")
    if there and not staging.exists():
        raise RestoreError(
            f"{folder} is not empty (it holds {', '.join(there[:5])}): move it away first, nothing in it is overwritten"
        )
    # An interrupted attempt may have moved some parts out: while any may be there, so is the staging folder.
    disk.make_folder(staging, Step.RESTORE_BEGIN)
    disk.sync_folder(folder, Step.RESTORE_BEGIN)
    for path in [*(folder / name for name in there), *sorted(staging.iterdir())]:
        disk.remove(path, Step.RESTORE_BEGIN)
    disk.sync_folder(folder, Step.RESTORE_BEGIN)
    disk.sync_folder(staging, Step.RESTORE_BEGIN)
    yield staging
    for name in MOVED:
        if (staging / name).exists():
            disk.rename(staging / name, folder / name, Step.RESTORE_MOVE)
            disk.sync_folder(folder, Step.RESTORE_MOVE)
    disk.remove(staging, Step.RESTORE_END)
    disk.sync_folder(folder, Step.RESTORE_END)
