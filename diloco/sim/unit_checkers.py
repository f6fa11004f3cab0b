"""What must hold where units of the data are leased: each counts once, and each is in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.sim.checking import Checker
from diloco.sync.effects import AnswerUnits, TellFate
from diloco.sync.events import Sealed, UnitsAsked
from diloco.sync.spans import common, size
from diloco.sync.unit_leases import columns_of, in_hand
from diloco.sync.units import SKIPPED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.sim.outer_process import OuterPlan
    from diloco.sim.site_process import Drawn, SiteProcess
    from diloco.sim.values import Value
    from diloco.sync.effects import LearnerEffect, OuterEffect, Seal
    from diloco.sync.events import LearnerEvent, OuterEvent
    from diloco.sync.syncer import OuterSync

Place = tuple[str, int, int]
"""A site, a unit, and which of its sequences."""


class CountedOnce(Checker):
    """A unit is merged when every sequence of it is, in every fragment, and a second time only as a repeat.

    The book is made of what each site has really trained on, which the syncer is never told.
    """

    name = "counted_once"
    mutation = "a unit counts as soon as one fragment has it"
    of_the_disk = ("times", "listed")

    def __init__(self, plan: OuterPlan, *, conserving: bool = False) -> None:
        super().__init__(plan, conserving=conserving)
        self.drawn: dict[tuple[str, int, int], list[Drawn | None]] = {}
        self.carried: dict[tuple[int, str], list[tuple[int, Drawn]]] = {}
        self.at: dict[tuple[str, int, int], list[int]] = {}
        self.times: list[dict[Place, int]] = [{} for _ in range(plan.options.num_fragments)]
        self.listed: dict[str, set[int]] = {}

    def sealed(self, site: SiteProcess, seal: Seal, gradient: Value) -> None:
        """What the update was trained on."""
        del gradient
        if self.plan.options.unit_sequences:
            key = (site.name, seal.fragment, seal.sequence)
            self.at[key] = [at for start, stop in seal.spans for at in range(start, stop)]
            self.drawn[key] = [site.drawn.get(at) for at in self.at[key]]

    def learner(self, site: SiteProcess, event: LearnerEvent, effects: Sequence[LearnerEffect]) -> None:
        """The update has a digest now."""
        del effects
        key = (site.name, event.fragment, event.sequence) if isinstance(event, Sealed) else None
        if isinstance(event, Sealed) and key in self.at:
            pairs = list(zip(self.at.pop(key), self.drawn.pop(key), strict=True))
            named = all(drawn and not drawn[1] for _, drawn in pairs)
            self.require(named, key, "names what was not drawn, or was drawn over again:", pairs)
            self.carried[event.fragment, event.digest] = [(at, drawn) for at, drawn in pairs if drawn]

    def outer(self, now_ns: int, event: OuterEvent, effects: Sequence[OuterEffect], machine: OuterSync) -> None:
        """Count what is merged, and look at what is leased."""
        del now_ns
        if machine.state.units is None:
            return
        for effect in effects:
            if isinstance(effect, TellFate) and effect.fate.merged:
                self._merged(effect.site, effect.fate.fragment, effect.fate.digest)
            elif isinstance(effect, AnswerUnits) and isinstance(event, UnitsAsked):
                self._leased(event.site, effect)

    def told(self, machine: OuterSync, chain: bytes | None, effects: Sequence[OuterEffect]) -> None:
        """What the machine has counted is in the book."""
        units = machine.state.units
        if units is None or chain is None or not effects:
            return
        found = self._complete()
        counted = {unit for start, stop in units.over for unit in range(start, stop)}
        wrong = counted - set(found)
        self.require(len(wrong) <= units.partly, "counted as merged, and not merged:", sorted(wrong))
        again = sum(times - 1 for times in found.values())
        self.require(again <= units.repeated, again, "were merged again and", units.repeated, "are shown")

    def _merged(self, site: str, fragment: int, digest: str) -> None:
        times, unit = self.times[fragment], self.plan.options.unit_sequences
        for at, (number, _) in self.carried[fragment, digest]:
            key = (site, number, at % unit)
            times[key] = times.get(key, 0) + 1

    def _complete(self) -> dict[int, int]:
        """How often each unit was merged as a whole by one site; every site may have merged a part of it besides."""
        offsets, found = range(self.plan.options.unit_sequences), dict[int, int]()
        for site, number in {(site, number) for site, number, _ in self.times[0]}:
            least = min(times.get((site, number, at), 0) for times in self.times for at in offsets)
            found[number] = found.get(number, 0) + least
        return {number: times for number, times in found.items() if times}

    def _leased(self, site: str, told: AnswerUnits) -> None:
        """Nothing of a unit is merged when a site is leased it."""
        before = self.listed.setdefault(site, set())
        begun = {number for times in self.times for _, number, _ in times}
        for start, count in told.pieces:
            new = set(range(start, start + count)) - before if start != SKIPPED else set()
            self.require(not new & begun, site, "is leased", sorted(new & begun), "of which something is merged")
            before |= new


class Balanced(Checker):
    """Every unit that was ever leased is merged, partly, in hand or given back: in one of them."""

    name = "balanced"
    mutation = "what is given back stays in the list of who comes back"

    def told(self, machine: OuterSync, chain: bytes | None, effects: Sequence[OuterEffect]) -> None:
        """Look at each pair of places."""
        units, options = machine.state.units, self.plan.options
        if units is None or chain is None or not effects:
            return
        found = columns_of(options, machine.state)
        self.require(found.balanced(), "after", effects, found)
        held = in_hand(options, machine.state)
        for name, pair in {
            "merged and given back": (units.over, units.free),
            "merged and in hand": (units.over, held),
            "given back and in hand": (units.free, held),
            "begun and given back": (units.begun, units.free),
            "begun and merged": (units.begun, units.over),
        }.items():
            self.require(not common(*pair), "after", effects, name, common(*pair))
        self.require(size(units.begun) <= sum(h.end - h.first for h in units.holders.values()), "begun:", units.begun)

    def at_end(self, machine: OuterSync, sites: Sequence[SiteProcess]) -> None:
        """When everybody has left nothing is in hand."""
        del sites
        if machine.state.units is not None and all(site.status != "live" for site in machine.state.sites.values()):
            found = columns_of(self.plan.options, machine.state)
            silent = any(site.status == "silent" for site in machine.state.sites.values())
            self.require(silent or found.in_hand == 0, "the run has ended, and in hand are", found)
