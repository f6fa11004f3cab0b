"""Replay of a journal: the records of a run, one by one, on the state of a snapshot.

A starting syncer, a following standby, and a reader of a past outer step all use this one replay. It lets the machine
decide again, computes every outer step again from its payloads, and compares both with the records.

Left out. ``ReplayerWithout`` replays a journal with some of its updates left out: it computes the values that the other
updates would have given. "The same journal without those updates" means this. The journal's own decisions stand: which
updates were merged in which outer step, and in which order the steps were made. The chosen updates are removed from
each step, and the rest is merged as a round that held nothing else, with the weights of ``rounds.outer_step``. Whether
such a round would have met its quorum, and when, is not considered. A step of which nothing remains is skipped and
keeps its number: values, momentum and published values are those of the version before. The down-link chain is computed
again, because what a codec rounds off in one version is part of the next.

Not undone: an update that was measured from a base with a chosen one in it is merged unchanged, and counted. Such
updates can do harm: after a poisoned version the other sites learn to correct it, and those corrections are errors in a
run that was never poisoned. With ``and_later`` they are left out as well.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

from diloco.codec.base import shorter
from diloco.outer.optimizer import OuterRule
from diloco.sync.effects import StartOuterStep, TakeVersion
from diloco.sync.events import LineageBegan, OuterStepDone
from diloco.sync.journal import JournalError
from diloco.sync.options import OuterOptions
from diloco.sync.syncer import Replay
from diloco.syncer.journal_files import JournalFiles
from diloco.syncer.outer_step import OuterResult, run_outer_step
from diloco.syncer.publish import Holdings
from diloco.syncer.snapshots import Lineages, Snapshots
from diloco.syncer.spool import Spool

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from diloco.durable import Disk
    from diloco.sync.effects import OuterEffect
    from diloco.sync.journal import Record
    from diloco.sync.rounds import Selection
    from diloco.sync.state import OuterState
    from diloco.sync.syncer import OuterSync
    from diloco.syncer.snapshots import FragmentValues, Held


class DataFolder:
    """The parts of a syncer's data folder, whose journal is of the run that ``run`` identifies."""

    def __init__(self, folder: Path, run: Mapping[str, str], disk: Disk) -> None:
        self.folder, self.disk = folder, disk
        self.spool = Spool(folder / "spool", disk)
        self.journal = JournalFiles(folder / "journal", run, disk)
        self.snapshots = Snapshots(folder / "snapshots", disk)
        self.lineages = Lineages(folder / "lineages", disk)


@dataclass(frozen=True, slots=True)
class Rules:
    """The run's settings that a replay needs besides the folder's files."""

    outer: OuterOptions
    rule: OuterRule
    down_codec: str
    downlinks_kept: int = 32


class Replayer(Replay):
    """Starts at ``machine`` with ``values``, both of a snapshot, and advances them record by record.

    ``holdings`` is what the process that wrote the records held in memory: the newest values, and the latest down-links
    within the same bounds. After a failure the state is inconsistent: discard the replayer.

    All arithmetic is in ``step``; a subclass that wants the same decisions with other numbers (some updates left out,
    for example) overrides that.
    """

    def __init__(self, machine: OuterSync, values: Sequence[FragmentValues], folder: DataFolder, rules: Rules) -> None:
        """``folder`` has the payloads of the records, and the first values of the lineages that begin in them."""
        super().__init__(machine)
        self.holdings = Holdings(values, rules.down_codec, rules.downlinks_kept)
        self.folder = folder
        self.rule = rules.rule

    @property
    def values(self) -> list[FragmentValues]:
        """Every fragment as of the last record applied."""
        return self.holdings.values

    def step_done(self, event: OuterStepDone, command: StartOuterStep | TakeVersion) -> None:
        """Take the recomputed version. ``JournalError`` if its bits differ from the record; ``SpoolError`` if a payload
        is missing or damaged."""
        self.holdings.take(event.fragment, self.step(event, command))

    def lineage_began(self, event: LineageBegan) -> None:
        """Continue with the lineage's first values, which no earlier record gives."""
        self.holdings.begin_again(self.folder.lineages.values(event))

    def step(self, event: OuterStepDone, command: StartOuterStep | TakeVersion) -> OuterResult:
        """Recompute the outer step that ended in ``event``; ``JournalError`` unless it gives the same bits."""
        values = self.values[event.fragment]
        down_codec = self.holdings.down_codec
        result = run_outer_step(command, values, self.folder.spool, self.rule, down_codec, event.digest)
        found = (result.values.digest, result.downlink_digest) if result else ("not finite", "")
        if result is None or found != (event.digest, event.downlink_digest):
            raise JournalError(
                f"version {event.version} of fragment {event.fragment} was {shorter(event.digest)} when it was "
                f"published and is {shorter(found[0])} when computed again: the spool, the options or the arithmetic "
                "changed"
            )
        return result


class LeaveOutError(ValueError):
    """The remaining journal gives no valid state."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An update that was left out of ``version``, into which the run had merged it.

    ``chosen``: a selection named it; otherwise it was measured from a base with a left-out update.
    """

    site: str
    fragment: int
    sequence: int
    version: int
    tokens: int
    chosen: bool = True


class ReplayerWithout(Replayer):
    """A ``Replayer`` whose values lack the updates that ``selections`` name, up to version ``last`` of each fragment.

    The machine stays the journal's own to the end; only the values differ. Until the first update of a fragment is left
    out, its versions are compared with the journal's digests as in any replay.
    """

    def __init__(
        self,
        machine: OuterSync,
        values: Sequence[FragmentValues],
        folder: DataFolder,
        rules: Rules,
        selections: Sequence[Selection] = (),
        last: int | None = None,
        *,
        and_later: bool = False,
    ) -> None:
        """``and_later``: also leave out updates that were measured from a base with a left-out update in it."""
        super().__init__(machine, values, folder, replace(rules, downlinks_kept=1))
        self.selections = tuple(selections)
        self.last = last
        self.and_later = and_later
        self.left_out: list[LeftOut] = []
        self.skipped: list[tuple[int, int]] = []
        self.compared = 0
        """Versions whose digest was compared with the journal's and equals it."""
        self.on_old_base: Counter[str] = Counter()
        """By site: the updates merged later that were measured from a base with a left-out update in it."""
        self.held = held_of(machine.state)
        """Tokens and updates that the values hold of each (site, fragment)."""
        self.began_at = [each.version for each in values]
        self.snapshots = 0
        """Number of snapshots whose every value was compared on the way and is the same."""
        self._first: dict[int, int] = {}

    def apply(self, record: Record) -> list[OuterEffect]:
        """Like ``Replayer.apply``; an outer step is made, and recorded here, without its left-out updates.

        Raises ``LeaveOutError`` when that has no finite result.
        """
        event = record.event
        if isinstance(event, OuterStepDone) and (self.last is None or event.version <= self.last):
            fragment, version = event.fragment, event.version
            gone: set[tuple[str, int]] = set()
            for site, pending in self.machine.attendance.merging(fragment):
                on_old_base = pending.base_version >= self._first.get(fragment, inf)
                chosen = any(each.takes(site, fragment, pending.sequence, version) for each in self.selections)
                if chosen or (on_old_base and self.and_later):
                    gone.add((site, pending.sequence))
                    self.left_out.append(LeftOut(site, fragment, pending.sequence, version, pending.tokens, chosen))
                    self._first.setdefault(fragment, version)
                    continue
                tokens, updates = self.held.get((site, fragment), (0, 0))
                self.held[site, fragment] = (tokens + pending.tokens, updates + 1)
                if on_old_base:
                    self.on_old_base[site] += 1
            self._lacking = self.machine.under_way(fragment, gone)
        return super().apply(record)

    def step(self, event: OuterStepDone, command: StartOuterStep | TakeVersion) -> OuterResult:
        """Compute the step of the remaining updates; the journal's own until an update of the fragment is left out."""
        values = self.values[event.fragment]
        if self.last is not None and event.version > self.last:
            return _unchanged(values)
        if event.fragment not in self._first:
            result = super().step(event, command)
            self.compared += 1
            return result
        if isinstance(self._lacking, StartOuterStep) and not self._lacking.contributions:
            self.skipped.append((event.fragment, event.version))
            return _unchanged(values)
        lacking = run_outer_step(self._lacking, values, self.folder.spool, self.rule, self.holdings.down_codec)
        if lacking is None:
            raise LeaveOutError(
                f"version {event.version} of fragment {event.fragment} has no finite result without left-out updates"
            )
        return lacking

    def lineage_began(self, event: LineageBegan) -> None:
        """Continue with the lineage's first values; ``LeaveOutError`` when an update of an earlier one was left out."""
        if self.left_out:
            raise LeaveOutError(
                f"lineage {event.lineage} began after the left-out updates, with values that a restore gave it: "
                "leaving out updates of an earlier lineage does not change it"
            )
        values, last = self.folder.lineages.values(event), self.last
        if last is None or all(first.version <= last for first in values):
            self.held = held_of(self.machine.state)
        else:
            pairs = zip(values, self.values, strict=True)
            values = tuple(first if first.version <= last else _unchanged(held).values for first, held in pairs)
        self.holdings.begin_again(values)

    @property
    def old_base_waiting(self) -> int:
        """The number of undecided updates at the end that were measured from a base with a left-out update in it."""
        return sum(
            pending.base_version >= self._first.get(fragment, inf)
            for site in self.machine.state.sites.values()
            for fragment, line in enumerate(site.lines)
            for pending in line.undecided
        )


def held_of(state: OuterState) -> Held:
    """Return the tokens and updates that a machine's versions hold: all that it has merged."""
    return {
        (name, index): (line.tokens_merged, line.updates_merged)
        for name, site in sorted(state.sites.items())
        for index, line in enumerate(site.lines)
    }


def _unchanged(values: FragmentValues) -> OuterResult:
    """Return the next version with the same values and an empty down-link."""
    return OuterResult(replace(values, version=values.version + 1), b"", "", 0.0, 0.0)
