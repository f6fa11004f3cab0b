"""Records become the state that they led to: the machine decides again, and every outer step is computed again.

Recovery does so with what it finds, a standby with what it is sent; who leads uses the same arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.sim import values
from diloco.sim.storage import Damaged
from diloco.sim.values import Value
from diloco.sync.effects import StartOuterStep
from diloco.sync.events import LineageBegan, OuterStepDone, OuterStepFailed
from diloco.sync.journal import JournalError, decide_again

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco.sim.values import OuterRule
    from diloco.sync.effects import OuterEffect
    from diloco.sync.journal import Record
    from diloco.sync.syncer import OuterSync

VERSIONS_KEPT = 4
"""Of each fragment, in memory: so far may a site be behind and still follow the down-links."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One version.  ``link`` is the decoded down-link from the version before."""

    theta: Value
    momentum: Value
    published: Value
    link: Value


ZERO = Kept(values.ZERO, values.ZERO, values.ZERO, values.ZERO)
Versions = list[dict[int, Kept]]


class Replayer:
    """A machine with its versions.  ``payload`` reads an update's values, or raises ``Damaged``."""

    def __init__(
        self, machine: OuterSync, versions: Versions, payload: Callable[[str], Value], rule: OuterRule
    ) -> None:
        self.machine, self.versions = machine, versions
        self._payload, self._rule = payload, rule
        self._under_way = {
            index: machine.outer_step(index)
            for index, fragment in enumerate(machine.state.fragments)
            if fragment.merging_since_ns is not None
        }
        self._records = 0

    def apply(self, record: Record) -> list[OuterEffect]:
        """What the machine says to the next record; ``Damaged`` when it is not what it said when that was written."""
        try:
            effects = decide_again(self.machine, record, self._records)
        except JournalError as error:
            raise Damaged(str(error)) from error
        self._records += 1
        event = record.event
        if isinstance(event, OuterStepDone):
            made = self.made_again(self._under_way.pop(event.fragment))
            if (digest(made.published), digest(made.link)) != (event.digest, event.downlink_digest):
                raise Damaged(f"version {event.version} of fragment {event.fragment} is another one now")
            self.store(event.fragment, event.version, made)
        elif isinstance(event, OuterStepFailed):
            del self._under_way[event.fragment]
        elif isinstance(event, LineageBegan):
            self.versions, self._under_way = restored(self.versions), {}
        self._under_way |= {effect.fragment: effect for effect in effects if isinstance(effect, StartOuterStep)}
        return effects

    def made_again(self, command: StartOuterStep) -> Kept:
        """The outer step ``command``, also long after it was computed for the first time."""
        contributions = [
            (part.weight, [self._payload(update.payload) for update in part.updates]) for part in command.contributions
        ]
        before = self.versions[command.fragment][command.version - 1]
        return self.made(before, contributions, command.share)

    def made(self, before: Kept, contributions: list[tuple[float, list[Value]]], share: float = 1) -> Kept:
        """The version after ``before``."""
        rule, merged = self._rule, values.merged(contributions)
        theta, momentum = values.outer_step(before.theta, before.momentum, merged, rule, share)
        if rule.published_quantum == 1:
            return Kept(theta, momentum, theta, values.minus(theta, before.published))
        link = values.quantised(values.minus(theta, before.published), rule.published_quantum)
        return Kept(theta, momentum, values.plus(before.published, link), link)

    def store(self, fragment: int, version: int, made: Kept) -> None:
        """``made`` is the newest version; the oldest one of too many goes."""
        self.versions[fragment][version] = made
        self.versions[fragment].pop(version - VERSIONS_KEPT, None)


def restored(versions: Versions) -> Versions:
    """The first versions of a new lineage: the newest values again, and nothing of the momentum.

    No site can follow a down-link to them: whoever has the version before has it from another lineage.
    """
    newest = [(max(kept), kept[max(kept)]) for kept in versions]
    return [{version + 1: Kept(kept.theta, values.ZERO, kept.published, values.ZERO)} for version, kept in newest]


def digest(value: Value) -> str:
    """What stands for the digest of a tensor."""
    return f"{value[0]}:{value[1]}:{value[2]}"
