"""A journal carried out again: the records of a run, one by one, on the state that a snapshot kept.

A syncer that starts, a standby that follows, and a reader of an outer step of the past all use this one replay.  The
machine decides again, every outer step is computed again from its payloads, and both are compared with what was written
when it happened.

Left out.  ``ReplayerWithout`` carries a journal out again with some of its updates left out: the values that would have
come of the others.  "The same journal without those updates" means this.  The journal's own decisions stand: which
updates were merged in which outer step, and in which order the steps were made.  From each step the chosen updates are
taken out, and what remains of it is merged as a round that held nothing else, with the weights of
``rounds.outer_step``; whether such a round would have met its quorum, and when, is not asked.  A step of which nothing
remains is skipped and keeps its number: values, momentum and published values are those of the version before.  The
down-link chain is computed again, because what a codec rounds off in one version is part of the next.

Not undone: an update that was measured from a base with a chosen one in it stays as it is.  Those are counted.  They
can do harm: after a poisoned version the other sites learn to get away from it, and what takes them back from there
leads astray from where the poison never was.  With ``and_later`` they are left out as well.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from diloco.codec.base import shorter
from diloco.sync.effects import StartOuterStep, TakeVersion
from diloco.sync.events import LineageBegan, OuterStepDone, OuterStepFailed
from diloco.sync.journal import JournalError, decide_again
from diloco.sync.rounds import outer_step, under_merge
from diloco.syncer.holdings import Holdings
from diloco.syncer.outer_step import OuterResult, run_outer_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.outer.rule import OuterRule
    from diloco.sync.effects import OuterEffect
    from diloco.sync.journal import Record
    from diloco.sync.rounds import Selection
    from diloco.sync.state import OuterState, Pending
    from diloco.sync.syncer import OuterSync
    from diloco.syncer.images import Held, Lineages
    from diloco.syncer.snapshots import FragmentValues
    from diloco.syncer.spool import Spool


class Replayer:
    """Starts at ``machine`` with ``values``, which are a snapshot's, and takes them on record by record.

    ``holdings`` is what the process that wrote the records held in memory: the newest values, and the latest down-links
    within the same bounds.  After a failure the state is that of no instant: throw the replayer away.

    The one place where it turns numbers into numbers is ``step``; whoever wants the same decisions with other numbers
    (some updates left out, for example) overrides that.
    """

    def __init__(
        self,
        machine: OuterSync,
        values: Sequence[FragmentValues],
        spool: Spool,
        rule: OuterRule,
        down_codec: str,
        downlinks_kept: int = 32,
        lineages: Lineages | None = None,
    ) -> None:
        """``lineages`` are the values that the lineages began with which begin in these records, if any does."""
        self.machine = machine
        self.holdings = Holdings(values, down_codec, downlinks_kept)
        self.spool = spool
        self.rule = rule
        self.lineages = lineages
        self.records = 0
        self._under_way = {
            index: machine.under_way(index)
            for index, fragment in enumerate(machine.state.fragments)
            if fragment.merging_since_ns is not None
        }

    @property
    def values(self) -> list[FragmentValues]:
        """Every fragment as of the last record that was applied."""
        return self.holdings.values

    def apply(self, record: Record) -> list[OuterEffect]:
        """The effects that ``record`` had; by then the values are those of after it.

        ``JournalError`` when the machine decides otherwise or the arithmetic gives other bits than when the record was
        written; ``SpoolError`` when a payload is missing or damaged.
        """
        effects = decide_again(self.machine, record, self.records)
        self.records += 1
        event = record.event
        if isinstance(event, OuterStepDone):
            self.holdings.take(event.fragment, self.step(event, self._under_way.pop(event.fragment)))
        elif isinstance(event, OuterStepFailed):
            del self._under_way[event.fragment]
        elif isinstance(event, LineageBegan):
            self._under_way.clear()
            self.holdings.begin_again(self.began(event))
        for effect in effects:
            if isinstance(effect, StartOuterStep | TakeVersion):
                self._under_way[effect.fragment] = effect
        return effects

    def began(self, event: LineageBegan) -> Sequence[FragmentValues]:
        """The values that the lineage began with: nothing before it gives them."""
        if self.lineages is None:
            raise JournalError(f"lineage {event.lineage} began here, and its values are not kept")
        return self.lineages.values(event)

    def step(self, event: OuterStepDone, command: StartOuterStep | TakeVersion) -> OuterResult:
        """Compute the outer step that ended in ``event`` again; ``JournalError`` unless it gives the same bits."""
        values = self.values[event.fragment]
        down_codec = self.holdings.down_codec
        result = run_outer_step(command, values, self.spool, self.rule, down_codec, event.digest)
        found = (result.values.digest, result.downlink_digest) if result else ("not finite", "")
        if result is None or found != (event.digest, event.downlink_digest):
            raise JournalError(
                f"version {event.version} of fragment {event.fragment} was {shorter(event.digest)} when it was "
                f"published and is {shorter(found[0])} when computed again: the spool, the options or the arithmetic "
                "changed"
            )
        return result


class LeaveOutError(ValueError):
    """What remains of the journal gives no state."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An update that was taken out of ``version``, the version into which the run had merged it.

    ``chosen``: it was meant itself; otherwise it goes because it was trained on one that is gone.
    """

    site: str
    fragment: int
    sequence: int
    version: int
    tokens: int
    chosen: bool = True


class ReplayerWithout(Replayer):
    """A ``Replayer`` whose numbers lack the updates that ``selections`` mean, up to version ``last`` of each fragment.

    The machine is the journal's own to the end; only the values are others.  Until the first update of a fragment is
    left out, its versions are compared with the journal's digests like in any replay.
    """

    def __init__(
        self,
        machine: OuterSync,
        values: Sequence[FragmentValues],
        spool: Spool,
        rule: OuterRule,
        down_codec: str,
        selections: Sequence[Selection] = (),
        last: int | None = None,
        lineages: Lineages | None = None,
        *,
        and_later: bool = False,
    ) -> None:
        """``and_later``: leave out as well what was measured from a base with one that was left out inside."""
        super().__init__(machine, values, spool, rule, down_codec, 1, lineages)
        self.selections = tuple(selections)
        self.last = last
        self.and_later = and_later
        self.left_out: list[LeftOut] = []
        self.skipped: list[tuple[int, int]] = []
        self.compared = 0
        """Versions whose digest was compared with the journal's and is the same."""
        self.on_old_base: Counter[str] = Counter()
        """By site: the updates merged later that were measured from a base with one in it that was left out."""
        self.held = held_of(machine.state)
        """What the values hold of each (site, fragment): tokens and updates."""
        self._first: dict[int, int] = {}
        self._merging: list[tuple[str, Pending]] = []

    def apply(self, record: Record) -> list[OuterEffect]:
        """Like ``Replayer.apply``; ``LeaveOutError`` when a step has no finite result without the updates left out."""
        if isinstance(record.event, OuterStepDone):
            self._merging = under_merge(self.machine.state, record.event.fragment)
            self._lacking = self._without(record.event)
        return super().apply(record)

    def step(self, event: OuterStepDone, command: StartOuterStep | TakeVersion) -> OuterResult:
        """The outer step of what remains; the journal's own where nothing of the fragment was left out so far."""
        values = self.values[event.fragment]
        if self.last is not None and event.version > self.last:
            return _unchanged(values)
        if event.fragment not in self._first:
            result = super().step(event, command)
            self.compared += 1
            return result
        lacks = command if isinstance(command, TakeVersion) else self._lacking
        if lacks is self._lacking and not lacks.contributions:
            self.skipped.append((event.fragment, event.version))
            return _unchanged(values)
        lacking = run_outer_step(lacks, values, self.spool, self.rule, self.holdings.down_codec)
        if lacking is None:
            raise LeaveOutError(
                f"version {event.version} of fragment {event.fragment} has no finite result without what is left out"
            )
        return lacking

    def began(self, event: LineageBegan) -> Sequence[FragmentValues]:
        """The values that the lineage began with; ``LeaveOutError`` when something of an earlier one was left out."""
        if self.left_out:
            raise LeaveOutError(
                f"lineage {event.lineage} began after what is left out, with values that were given to it; leaving "
                "something out of an earlier lineage changes nothing of it"
            )
        values = super().began(event)
        if self.last is None or all(first.version <= self.last for first in values):
            self.held = held_of(self.machine.state)
            return values
        return [
            first if first.version <= self.last else _unchanged(held).values
            for first, held in zip(values, self.values, strict=True)
        ]

    def old_base_waiting(self) -> int:
        """Updates that wait, or are being merged, at the end, and were measured from a base with one left out in it."""
        return sum(
            pending.base_version >= self._first[fragment]
            for site in self.machine.state.sites.values()
            for fragment, line in enumerate(site.lines)
            if fragment in self._first
            for pending in line.undecided
        )

    def _without(self, event: OuterStepDone) -> StartOuterStep:
        """The step that ended in ``event`` without what is chosen of it; notes what that is."""
        fragment, version = event.fragment, event.version
        gone: set[tuple[str, int]] = set()
        for site, pending in self._merging if self.last is None or version <= self.last else ():
            on_old_base = pending.base_version >= self._first.get(fragment, pending.base_version + 1)
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
        return outer_step(self.machine.options, self.machine.state, fragment, gone)


def held_of(state: OuterState) -> Held:
    """What the values of a machine's versions hold: all that it has merged."""
    return {
        (name, index): (line.tokens_merged, line.updates_merged)
        for name, site in sorted(state.sites.items())
        for index, line in enumerate(site.lines)
    }


def _unchanged(values: FragmentValues) -> OuterResult:
    """The next version with the same values: nothing to send, nothing moved."""
    return OuterResult(replace(values, version=values.version + 1), b"", "", 0.0, 0.0)
