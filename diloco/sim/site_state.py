"""The state of a site in one life of its process: plan, disk, machine, and the numbers that stand for its model.

Also a site's arithmetic on them: measuring an update, and adopting a version.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from diloco.sim import world
from diloco.sim.world import Link, Process, Value
from diloco.sync.events import UpdateArrived
from diloco.sync.learner import LearnerSync
from diloco.sync.options import LearnerOptions

if TYPE_CHECKING:
    from diloco.sim.world import Heap
    from diloco.sync.effects import Adopt, Retake, Seal

Key = tuple[int, int]
Drawn = tuple[int, bool]
"""The unit of a sequence, and whether it was drawn again because the site had no new unit."""
Trouble = defaultdict[str, float]
"""The shares of steps that ruin the values ("poison"), of updates that arrive not finite ("ruin"), and of outlier
updates ("outlier"); all end with the safety phase."""


@dataclass(frozen=True, slots=True)
class SitePlan:
    """The settings of one site: its speed, batches, codec, checkpoints and reports."""

    options: LearnerOptions
    step_ns: int
    step_jitter: float
    tokens: int
    transfer_ns: int
    encode_ns: int
    quantum: int
    alpha_tenths: int
    checkpoint_steps: int
    checkpoint_ns: int
    report_ns: int
    overlap_steps: int = 0
    final: bool = False
    """Whether the site is to end a finished run with its final versions."""
    ranks: bool = False
    """Whether the site has several ranks, which decide before a step ends whether to seal or adopt after it."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a site's process needs to resume, taken after an optimizer step and before the machine is told of it.

    ``values`` are the attributes of ``SiteState`` that ``KEPT`` names.
    """

    machine: bytes
    values: dict[str, Any]
    step_tokens: int
    step_ns: int


@dataclass(slots=True)
class SiteDisk:
    """The part of a site that outlives its process."""

    checkpoint: Checkpoint | None = None
    outbox: dict[Key, tuple[UpdateArrived, Value]] = field(default_factory=dict)
    """The updates to be sent, each with its decoded value."""
    odometer: int = 0


@dataclass(slots=True)
class Side:
    """A site's settings, link and disk for one syncer; its process draws from ``random``."""

    plan: SitePlan
    link: Link
    random: Random
    disk: SiteDisk = field(default_factory=SiteDisk)


KEPT = ("theta", "base", "adopted", "sent", "poisoned", "step", "cursor", "drawn")


class SiteState(Process):
    """One life of a learner, as its checkers see it."""

    def __init__(self, site: str, name: str, heap: Heap, side: Side) -> None:
        super().__init__(heap, lambda: None)
        self.site, self.name = site, name
        self.plan, self.link, self.random, self.disk = side.plan, side.link, side.random, side.disk
        parts = range(self.plan.options.num_fragments)
        self.machine = LearnerSync(self.plan.options)
        self.theta: list[Value] = [world.COLD for _ in parts]
        self.base: list[tuple[int, Value]] = [(-1, world.COLD) for _ in parts]
        self.adopted: list[Value] = [world.COLD for _ in parts]
        """The values right after the latest adopt, from which all adopt modes but rebase measure."""
        self.sent: dict[Key, Value] = {}
        """The decoded pseudo-gradients of the in-flight list."""
        self.sealing: dict[Key, Value] = {}
        self.arrived: dict[int, tuple[int, Value]] = {}
        self.poisoned: set[int] = set()
        self.step = self.cursor = 0
        self.drawn: dict[int, Drawn] = {}
        """Where units are leased: the unit that each sequence was drawn from, by cursor."""
        self.training = self.stopping = self.at_rest = False
        self.twin = False
        """Whether another process of this site was started while this one still runs."""
        self.rounded: Value = world.ZERO
        """What the codec's rounding changed in the update sealed last."""

    def measured(self, seal: Seal) -> Value:
        """Return the pseudo-gradient that ``seal`` asks for."""
        since = self.adopted[seal.fragment] if self.plan.options.adopt != "rebase" else self.base[seal.fragment][1]
        gradient = world.minus(since, self.theta[seal.fragment])
        for sequence in seal.in_flight:
            gradient = world.minus(gradient, self.sent[seal.fragment, sequence])
        return gradient

    def adopt(self, effect: Adopt) -> None:
        """Adopt the version that has arrived."""
        index = effect.fragment
        version, new = self.arrived.pop(index)
        assert version == effect.version, (version, effect)
        _, old = self.base[index]
        if self.plan.options.adopt == "rebase":
            rest = world.minus(self.theta[index], old)
            for sequence in effect.merged:
                rest = world.plus(rest, self.sent[index, sequence])
            self.theta[index] = world.plus(new, rest)
        elif self.plan.options.adopt == "overwrite":
            self.theta[index] = new
        elif self.plan.options.adopt == "blend":
            self.theta[index] = world.blended(self.theta[index], new, self.plan.alpha_tenths)
        self.base[index], reference = (version, new), self.theta[index]
        if self.plan.options.adopt == "eager":
            unsent, reference = world.minus(self.adopted[index], self.theta[index]), new
            for sequence in effect.fresh:
                unsent = world.minus(unsent, self.sent[index, sequence])
            for sequence in effect.under_way:
                ahead = world.minus(reference, self.sent[index, sequence])
                reference = world.blended(ahead, reference, self.plan.alpha_tenths)
            self.theta[index] = world.minus(reference, unsent)
        self.adopted[index] = reference
        for sequence in effect.merged:
            del self.sent[index, sequence]

    def retake(self, effect: Retake) -> None:
        """Adopt the version and discard what was trained since, except for the updates in ``keep``."""
        index = effect.fragment
        if index in self.arrived and self.arrived[index][0] >= effect.version:
            self.base[index] = self.arrived.pop(index)
        version, new = self.base[index]
        assert version == effect.version, (version, effect)
        self.theta[index] = new
        for sequence in effect.keep:
            self.theta[index] = world.minus(self.theta[index], self.sent[index, sequence])
        for key in [key for key in self.sent if key[0] == index and key[1] not in effect.keep]:
            del self.sent[key]
        self.adopted[index] = self.theta[index]
        self.poisoned.discard(index)
