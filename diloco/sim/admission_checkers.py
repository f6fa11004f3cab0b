"""What must hold of updates that look like no other: nothing of them is merged without somebody's word."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.sim.checkers import accepted, ids_of
from diloco.sim.checking import Checker
from diloco.sync.effects import AnswerDone, AnswerPush, Note, StartOuterStep, TellFate
from diloco.sync.events import Reason, UpdateAdmitted, UpdateArrived
from diloco.sync.health import Vital, judge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.sim.checkers import Id
    from diloco.sim.outer_process import OuterPlan
    from diloco.sync.effects import OuterEffect
    from diloco.sync.events import OuterEvent
    from diloco.sync.syncer import OuterSync


class Admission(Checker):
    """A flagged update is refused, or noted, or held and merged by an operator's word only; nothing of it is silent.

    One that was refused is never taken afterwards.  What the sites say of their updates is believed: they do not lie.
    """

    name = "admission"
    mutation = "a held update is merged with those that wait"
    of_the_disk = ("usual", "held", "refused")

    def __init__(self, plan: OuterPlan, *, conserving: bool = False) -> None:
        super().__init__(plan, conserving=conserving)
        self.usual: dict[tuple[str, int], list[Vital]] = {}
        self.held: dict[Id, Vital] = {}
        self.refused: set[tuple[str, int, int, str]] = set()

    def outer(self, now_ns: int, event: OuterEvent, effects: Sequence[OuterEffect], machine: OuterSync) -> None:
        """Judge every update again, by a book of one's own."""
        del now_ns, machine
        if isinstance(event, UpdateArrived):
            self._arrived(event, effects)
        if isinstance(event, UpdateAdmitted) and any(isinstance(e, AnswerDone) and e.reason is None for e in effects):
            vital = self.held.pop((event.site, event.fragment, event.sequence), None)
            if vital is not None:
                self._remember(event.site, event.fragment, vital)
        for effect in effects:
            if isinstance(effect, TellFate):
                key = (effect.site, effect.fate.fragment, effect.fate.sequence)
                self.require(not effect.fate.merged or key not in self.held, key, "is merged and was held")
                self.held.pop(key, None)
            elif isinstance(effect, StartOuterStep):
                merged = ids_of(effect) & set(self.held)
                self.require(not merged, "held, and merged without a word:", sorted(merged))
                behind = [key for key in ids_of(effect) if self._overtakes(key)]
                self.require(not behind, "overtakes one that is held:", behind)

    def _arrived(self, event: UpdateArrived, effects: Sequence[OuterEffect]) -> None:
        answer = next(effect for effect in effects if isinstance(effect, AnswerPush))
        notes = [effect.what for effect in effects if isinstance(effect, Note)]
        taken = accepted(event, effects) is not None
        key = (event.site, event.fragment, event.sequence, event.digest)
        self.require(not taken or key not in self.refused, event, "was refused as an outlier and is taken")
        if "outlier_again" in notes:
            self.require(key in self.refused, event, "was never refused as an outlier")
            return
        self.require(answer.reason is not Reason.IMPLAUSIBLE, event, "is no lie, and refused as one")
        self.require(answer.reason is not Reason.OUTLIER or "outlier_refused" in notes, event, "is refused silently")
        if answer.reason is Reason.OUTLIER:
            self.refused.add(key)
        if not taken and answer.reason is not Reason.OUTLIER:
            return
        vital = Vital(event.steps, event.norm, event.cosine)
        own = self.usual.get((event.site, event.fragment), [])
        others = [
            each
            for (site, fragment), window in sorted(self.usual.items())
            if fragment == event.fragment and site != event.site
            for each in window
        ]
        flagged = bool(judge(self.plan.health, vital, own, others).why)
        self.require(flagged or taken, event, "is like the others and refused as an outlier")
        policy = self.plan.health.policy_of(event.site)
        self.require(not flagged or taken == (policy != "refuse"), event, "is an outlier under", policy, "and", answer)
        self.require(not flagged or not {"update_held", "outlier_refused", "outlier_admitted"}.isdisjoint(notes), event)
        if flagged and policy == "hold":
            self.held[event.site, event.fragment, event.sequence] = vital
        elif taken:
            self._remember(event.site, event.fragment, vital)

    def _remember(self, site: str, fragment: int, vital: Vital) -> None:
        window = self.usual.setdefault((site, fragment), [])
        window.append(vital)
        del window[: -self.plan.health.history]

    def _overtakes(self, key: Id) -> bool:
        site, fragment, sequence = key
        return any(held[:2] == (site, fragment) and held[2] < sequence for held in self.held)
