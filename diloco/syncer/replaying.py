"""A journal carried out again: the records of a run, one by one, on the state that a snapshot kept.

One replay for everybody who has a journal and wants its state: a syncer that starts, a standby that follows, and
whoever wants to see an outer step of the past.  The machine decides again, every outer step is computed again from its
payloads, and both are compared with what was written when it happened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.codec.digests import shorter
from diloco.sync.effects import StartOuterStep, TakeVersion
from diloco.sync.events import LineageBegan, OuterStepDone, OuterStepFailed
from diloco.sync.journal import JournalError, decide_again
from diloco.syncer.executor import OuterResult, run_outer_step
from diloco.syncer.holdings import Holdings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.outer.rule import OuterRule
    from diloco.sync.effects import OuterEffect
    from diloco.sync.journal import Record
    from diloco.sync.syncer import OuterSync
    from diloco.syncer.lineages import Lineages
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
