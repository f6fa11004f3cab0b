"""How a property is checked while a simulation runs: the hooks, and who calls whom.

A checker keeps its own book from what it is shown and never believes the machine's.  ``mutation`` names a change of the
product that it must notice; ``tests/sim/test_mutants.py`` makes that change and sees it noticed.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.sim.outer_process import OuterPlan
    from diloco.sim.replaying import Kept
    from diloco.sim.replicator import Unit
    from diloco.sim.site_process import SiteProcess
    from diloco.sim.storage import Storage
    from diloco.sim.values import Value
    from diloco.sync.effects import LearnerEffect, OuterEffect, Seal, StartOuterStep
    from diloco.sync.events import LearnerEvent, OuterEvent
    from diloco.sync.syncer import OuterSync


class Violation(Exception):
    """Something that must hold did not; ``checker`` is who saw it."""

    def __init__(self, checker: str, text: str) -> None:
        super().__init__(f"{checker}: {text}")
        self.checker = checker


class Checker:
    """One property.  The simulator calls every hook; a checker has those that it needs."""

    name: ClassVar[str]
    mutation: ClassVar[str]
    of_the_disk: ClassVar[tuple[str, ...]] = ()
    """The attributes that are a book of what lies on the syncer's disk: a restore sets them back with it."""

    def __init__(self, plan: OuterPlan, *, conserving: bool = False) -> None:
        """``conserving``: nothing in this run throws progress away, and the outer step is the plain mean."""
        self.plan, self.conserving = plan, conserving
        self._backup: dict[str, object] = {}

    def require(self, holds: bool, *parts: object) -> None:
        """Raise ``Violation`` with ``parts`` unless it ``holds``."""
        if not holds:
            raise Violation(self.name, " ".join(str(part) for part in parts))

    def outer(self, now_ns: int, event: OuterEvent, effects: Sequence[OuterEffect], machine: OuterSync) -> None:
        """``event`` is in the journal and none of its ``effects`` was carried out yet."""

    def recovered(self, machine: OuterSync) -> None:
        """A new process of the syncer has read the disk."""

    def told(self, machine: OuterSync, chain: bytes | None, effects: Sequence[OuterEffect]) -> None:
        """A process is about to carry out ``effects``, or (no ``chain``) to answer who only asked."""

    def replicated(self, storage: Storage, journal: str, unit: Unit) -> None:
        """A standby is about to acknowledge a frame."""

    def resumed(self, storage: Storage, journal: str, chain: bytes) -> None:
        """A standby is about to ask for what follows the frame with this chain value."""

    def stands_alone(self) -> None:
        """From now on no standby is waited for: an operator has said so, or it was promoted itself."""

    def backed_up(self) -> None:
        """The syncer's disk was copied."""
        self._backup = {name: copy.deepcopy(getattr(self, name)) for name in self.of_the_disk}

    def set_back(self) -> None:
        """The syncer's disk is the copy again, and no process has read it yet."""
        for name, book in self._backup.items():
            setattr(self, name, copy.deepcopy(book))

    def restored(self, lineage: int, made: Sequence[Kept]) -> None:
        """``made`` are going to be the first versions of ``lineage``, by fragment."""

    def stored(self, effect: StartOuterStep, made: Kept) -> None:
        """An outer step was computed."""

    def process_started(self, site: SiteProcess) -> None:
        """A learner process has read its checkpoint, or begins cold."""

    def learner(self, site: SiteProcess, event: LearnerEvent, effects: Sequence[LearnerEffect]) -> None:
        """The site's machine took ``event``; its ``effects`` are not carried out yet."""

    def carried_out(self, site: SiteProcess, event: LearnerEvent) -> None:
        """The effects of ``event`` are carried out."""

    def step_begun(self, site: SiteProcess, step_ns: int) -> None:
        """An inner step begins that takes ``step_ns``."""

    def stepped(self, site: SiteProcess, step_ns: int, learned: Sequence[int]) -> None:
        """An inner step is done; the machine has not heard of it."""

    def sealed(self, site: SiteProcess, seal: Seal, gradient: Value) -> None:
        """``gradient`` was measured for ``seal``."""

    def encoded(self, site: SiteProcess, fragment: int, digest: str, decoded: Value) -> None:
        """An update is in the outbox; the syncer would decode it to ``decoded``."""

    def fetched(self, site: SiteProcess, fragment: int, version: int, value: Value) -> None:
        """A site got the ``value`` of ``version``."""

    def at_end(self, machine: OuterSync, sites: Sequence[SiteProcess]) -> None:
        """Everything is over; ``sites`` are the last processes of all sites, those that failed included."""


class Checkers(Checker):
    """All checkers of a run behind one face: each hook reaches those that have it, in order."""

    def __init__(self, checkers: Sequence[Checker]) -> None:
        self.all = tuple(checkers)
        self._outer = self._having("outer")
        self._recovered = self._having("recovered")
        self._told = self._having("told")
        self._replicated = self._having("replicated")
        self._restored = self._having("restored")
        self._stored = self._having("stored")
        self._process_started = self._having("process_started")
        self._learner = self._having("learner")
        self._carried_out = self._having("carried_out")
        self._step_begun = self._having("step_begun")
        self._stepped = self._having("stepped")
        self._sealed = self._having("sealed")
        self._encoded = self._having("encoded")
        self._fetched = self._having("fetched")

    def _having(self, hook: str) -> tuple[Checker, ...]:
        return tuple(each for each in self.all if getattr(type(each), hook) is not getattr(Checker, hook))

    def outer(self, now_ns: int, event: OuterEvent, effects: Sequence[OuterEffect], machine: OuterSync) -> None:
        """Tell those who have this hook."""
        for each in self._outer:
            each.outer(now_ns, event, effects, machine)

    def recovered(self, machine: OuterSync) -> None:
        """Tell those who have this hook."""
        for each in self._recovered:
            each.recovered(machine)

    def told(self, machine: OuterSync, chain: bytes | None, effects: Sequence[OuterEffect]) -> None:
        """Tell those who have this hook."""
        for each in self._told:
            each.told(machine, chain, effects)

    def replicated(self, storage: Storage, journal: str, unit: Unit) -> None:
        """Tell those who have this hook."""
        for each in self._replicated:
            each.replicated(storage, journal, unit)

    def resumed(self, storage: Storage, journal: str, chain: bytes) -> None:
        """Tell all."""
        for each in self.all:
            each.resumed(storage, journal, chain)

    def stands_alone(self) -> None:
        """Tell all."""
        for each in self.all:
            each.stands_alone()

    def backed_up(self) -> None:
        """Tell all."""
        for each in self.all:
            each.backed_up()

    def set_back(self) -> None:
        """Tell all."""
        for each in self.all:
            each.set_back()

    def restored(self, lineage: int, made: Sequence[Kept]) -> None:
        """Tell those who have this hook."""
        for each in self._restored:
            each.restored(lineage, made)

    def stored(self, effect: StartOuterStep, made: Kept) -> None:
        """Tell those who have this hook."""
        for each in self._stored:
            each.stored(effect, made)

    def process_started(self, site: SiteProcess) -> None:
        """Tell those who have this hook."""
        for each in self._process_started:
            each.process_started(site)

    def learner(self, site: SiteProcess, event: LearnerEvent, effects: Sequence[LearnerEffect]) -> None:
        """Tell those who have this hook."""
        for each in self._learner:
            each.learner(site, event, effects)

    def carried_out(self, site: SiteProcess, event: LearnerEvent) -> None:
        """Tell those who have this hook."""
        for each in self._carried_out:
            each.carried_out(site, event)

    def step_begun(self, site: SiteProcess, step_ns: int) -> None:
        """Tell those who have this hook."""
        for each in self._step_begun:
            each.step_begun(site, step_ns)

    def stepped(self, site: SiteProcess, step_ns: int, learned: Sequence[int]) -> None:
        """Tell those who have this hook."""
        for each in self._stepped:
            each.stepped(site, step_ns, learned)

    def sealed(self, site: SiteProcess, seal: Seal, gradient: Value) -> None:
        """Tell those who have this hook."""
        for each in self._sealed:
            each.sealed(site, seal, gradient)

    def encoded(self, site: SiteProcess, fragment: int, digest: str, decoded: Value) -> None:
        """Tell those who have this hook."""
        for each in self._encoded:
            each.encoded(site, fragment, digest, decoded)

    def fetched(self, site: SiteProcess, fragment: int, version: int, value: Value) -> None:
        """Tell those who have this hook."""
        for each in self._fetched:
            each.fetched(site, fragment, version, value)

    def at_end(self, machine: OuterSync, sites: Sequence[SiteProcess]) -> None:
        """Tell those who have this hook."""
        for each in self.all:
            each.at_end(machine, sites)
