"""A run begins again from restored values: what is written in which order, so that no crash leaves half of it.

What a restore does in the data folder of a run that is stopped, whose lock the caller holds:

1. the values, as each fragment's next version, into ``lineages/``: durable, and nobody looks for them yet;
2. the record ``LineageBegan`` into the journal, durable: from here on the restore has happened, and whoever recovers
   the folder finds the values of 1;
3. a snapshot right behind it, so that no recovery needs 1 any more; 4. the number into ``run.json``, for people.

Into a folder that is empty or lost everything is made in ``.restoring/`` inside it, and then moved out, the snapshots
last.  A syncer that starts on a folder with a ``.restoring/`` and without a snapshot refuses it; the next attempt to
restore begins anew there.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from diloco.durable import LOCK, PLAIN_DISK, Step
from diloco.sync.effects import TellFate
from diloco.sync.events import LineageBegan
from diloco.sync.journal import Record, digest_effects
from diloco.sync.lineage import next_lineage
from diloco.sync.state import FragmentState, OuterState, Site, Status
from diloco.sync.syncer import OuterSync
from diloco.sync.units import begun_before
from diloco.syncer.images import Held, Image
from diloco.syncer.leaving_out import held_of
from diloco.syncer.retention import Retention
from diloco.syncer.store import STAGING, RunCard, Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from diloco.durable import Disk
    from diloco.sync.state import Line
    from diloco.syncer.kept import Rules
    from diloco.syncer.snapshots import FragmentValues

KEEP_PAST = Retention(steps=1 << 40, bytes_max=1 << 60)
"""A restore lets nothing go of what can be replayed; the syncer that goes on does what its settings say."""
LEFT_ALONE = frozenset({LOCK, "leadership.json", STAGING})
MOVED = ("journal", "run.json", "spool", "lineages", "snapshots")
"""The order in which a restored folder is moved into its place: recoverable only with the last."""


class RestoreError(ValueError):
    """Nothing was restored; the text says why."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of the run's numbers beside what is restored: the largest ``lineage`` and ``epoch`` that anything
    else tells of.  ``clock_s`` is the present second since 1970 (``next_lineage``)."""

    clock_s: int
    lineage: int = 0
    epoch: int = 0

    def next_lineage(self, own: int) -> int:
        """The number of the lineage that begins now in a run that says its present one is ``own``."""
        return next_lineage(max(own, self.lineage), self.clock_s)


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore came to.  ``refused`` counts the updates that had no fate; ``held`` is as in ``LineageBegan``."""

    lineage: int
    versions: tuple[int, ...]
    digests: tuple[str, ...]
    run_tokens: int
    refused: int
    held: tuple[tuple[str, int, int, int], ...]


def begin_lineage(
    store: Store, machine: OuterSync, values: Sequence[FragmentValues], held: Held | None, why: str, lineage: int
) -> Restored:
    """Publish ``values`` as each fragment's next version, whole, in a new lineage of the run in ``store``.

    ``machine`` is what was recovered there.  ``held`` is what the values hold of each site; None: all that is merged.
    """
    state = machine.state
    published = [
        replace(each, version=fragment.version + 1) for each, fragment in zip(values, state.fragments, strict=True)
    ]
    image = Image(asdict(store.card), tuple(published), held or {}, {"why": why})
    store.lineages.keep(lineage, image)
    listed = None if held is None else tuple((name, index, *counts) for (name, index), counts in sorted(held.items()))
    event = LineageBegan(lineage, tuple(each.digest for each in published), why, listed)
    effects = machine.handle(event, state.now_ns)
    store.journal.append([Record(state.now_ns, event, digest_effects(effects))])
    store.journal.flush()
    fates = [effect for effect in effects if isinstance(effect, TellFate)]
    for told in fates:
        store.decided(told.site, told.fate)
    store.snapshot_writer(machine, published)()
    store.write_lineage(lineage)
    versions = tuple(fragment.version for fragment in state.fragments)
    now_held = tuple((name, index, *counts) for (name, index), counts in sorted(held_of(state).items()))
    return Restored(lineage, versions, event.digests, state.run_tokens(), len(fates), now_held)


def restore_in_place(
    folder: Path, card: RunCard, rules: Rules, image: Image, why: str, known: Known, disk: Disk = PLAIN_DISK
) -> Restored:
    """Take the run in ``folder`` up from ``image``.  ``RestoreError``; ``StoreError`` when the folder is not whole."""
    for name, ours in asdict(card).items():
        theirs = image.card.get(name)
        if theirs != ours:
            raise RestoreError(f"the image is of another run: its {name} is {theirs!r}, and here it is {ours!r}")
    with _opened(folder, card, disk) as store:
        if store.is_new():
            raise RestoreError(f"{folder} holds no run: an image says what the values are, and not who was in the run")
        # What waits is refused, whole or not.
        machine = store.recover(rules.outer, rules.rule, rules.down_codec, merges=False).machine
        lineage = known.next_lineage(machine.state.lineage)
        return begin_lineage(store, machine, image.fragments, image.held, why, lineage)


def restore_backup(
    folder: Path,
    card: RunCard,
    rules: Rules,
    fetch: Callable[[Path], object],
    why: str,
    known: Known,
    disk: Disk = PLAIN_DISK,
) -> Restored:
    """Make an empty ``folder`` what a backup was (``fetch`` puts it where it is told), and begin a lineage there."""
    with _staged(folder, disk) as staging:
        fetch(staging)
        with _opened(staging, card, disk) as store:
            recovered = store.recover(rules.outer, rules.rule, rules.down_codec, merges=False)
            state = recovered.machine.state
            state.epoch = max(state.epoch, known.epoch)
            lineage = known.next_lineage(state.lineage)
            return begin_lineage(store, recovered.machine, recovered.holdings.values, None, why, lineage)


def restore_values(
    folder: Path,
    card: RunCard,
    rules: Rules,
    values: Sequence[FragmentValues],
    lines: Mapping[str, Sequence[Line]],
    why: str,
    known: Known,
    disk: Disk = PLAIN_DISK,
    units_begun: int = 0,
) -> Restored:
    """Make an empty ``folder`` the run that has ``values``, and begin a lineage there.

    ``lines`` is what is known of each site, and all that will count as merged.  Of units of the data, where they are
    leased, none before ``units_begun`` is leased again.
    """
    with _staged(folder, disk) as staging, _opened(staging, card, disk) as store:
        state = OuterState([FragmentState(version=each.version, digest=each.digest) for each in values])
        state.lineage, state.epoch, state.started_ns = max(1, known.lineage), known.epoch, 0
        for name, each in sorted(lines.items()):
            state.sites[name] = Site(1, "", Status.LEFT, list(each))
        if rules.outer.unit_sequences:
            state.units = begun_before(units_begun)
        machine = OuterSync(rules.outer, state)
        store.begin(machine, values)
        return begin_lineage(store, machine, values, None, why, known.next_lineage(state.lineage))


@contextlib.contextmanager
def _opened(folder: Path, card: RunCard, disk: Disk) -> Iterator[Store]:
    store = Store(folder, card, disk, KEEP_PAST)
    try:
        yield store
    finally:
        store.journal.close()


@contextlib.contextmanager
def _staged(folder: Path, disk: Disk) -> Iterator[Path]:
    """A place inside ``folder`` for what it will hold; moved out at the end.  ``RestoreError`` unless it is empty."""
    staging = folder / STAGING
    there = sorted(path.name for path in folder.iterdir() if path.name not in LEFT_ALONE)
    # One that was cut short after its last move has left a whole run, and maybe that has gone on since.
    if there and staging.exists() and any(folder.glob("snapshots/[0-9]*")):
        raise RestoreError(f"{folder} is restored, and only what tidies up after it was cut short: start the syncer")
    if there and not staging.exists():
        raise RestoreError(
            f"{folder} is not empty (it holds {', '.join(there[:5])}): move it away first, nothing in it is overwritten"
        )
    # An attempt that was cut short had begun to move things out: while any of it may be there, so is the staging place.
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
