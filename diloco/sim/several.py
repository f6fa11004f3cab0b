"""Simulated runs of one model held by several syncers, each with its own faults, and sites with theirs.

A site has a whole process for each syncer, and one ``Trainer`` steps them all.  A site may be cut off from one syncer
while it reaches the others, from its start or later, and one syncer may be restored from an old backup while the others
go on.  Each syncer and its site processes have the same checkers as in a run of one syncer.  ``Across`` checks all
syncers together: a site has one step count and one ledger, it ends when all syncers have said so, and an absent syncer
stops no other.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from diloco.sim.checkers import Violation
from diloco.sim.cluster import RESTART_NS, Site
from diloco.sim.plan import GENTLE, SwarmPlan, draw_plan
from diloco.sim.site_checkers import CHECKERS
from diloco.sim.site_state import SitePlan
from diloco.sim.swarm import EVENTS_MAX, LINEAGES_MAX, RISE_NS, Outcome, Run, needed
from diloco.sim.world import MILLISECOND_NS, Direction, OuterPlan
from diloco.sync.options import SECOND_NS
from diloco.sync.progress import combined, ledger_of
from diloco.sync.state import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.sim.checkers import Checker
    from diloco.sim.cluster import Syncers
    from diloco.sim.site_process import SiteProcess
    from diloco.sync.options import OuterOptions
    from diloco.sync.progress import Ledger
    from diloco.sync.state import OuterState
    from diloco.sync.syncer import OuterSync


FAULTS = (*GENTLE, "split", "kill", "restore")
AGES_MS = (400, 2000, 6000, 12_000)
"""The possible ages of a backup when a syncer is restored from it."""


@dataclass(frozen=True, slots=True)
class SeveralPlan:
    """What a seed decides: a run of one syncer, and how its fragments are divided among several."""

    whole: SwarmPlan
    outers: tuple[OuterPlan, ...]
    sites: tuple[tuple[SitePlan, ...], ...]
    """For each site, its plan towards each syncer."""
    reached_ns: tuple[tuple[int, ...], ...]
    """When each site first reaches each syncer; 0: from its start.  Each site reaches one of them from its start."""
    faults: tuple[str, ...]


def draw_several(seed: int) -> SeveralPlan:
    """Draw the plan of ``seed``, deterministically; never in lock-step, and without standbys."""
    whole, random = draw_plan(seed), Random(f"{seed}/several")
    sizes = [random.randint(1, 2) for _ in range(random.choice((2, 2, 3)))]
    total, apart = sum(sizes), Random(f"{seed}/apart")
    options = dataclasses.replace(whole.outer.options, run_ns=0, token_budget=_budget(apart, whole.sites))
    outers = [_outer(whole.outer, options, size, leases=index == 0) for index, size in enumerate(sizes)]
    split = ("split",) if apart.random() < 0.6 else ()
    return SeveralPlan(
        whole,
        tuple(outers),
        tuple(_site(site, sizes, total) for site in whole.sites),
        tuple(_reached_ns(apart, start_ns, len(sizes)) for start_ns in whole.starts_ns),
        tuple(kind for kind in whole.faults if kind in FAULTS) + split or ("outer_crash",),
    )


def _budget(random: Random, sites: Sequence[SitePlan]) -> int:
    """Draw a token budget: in six runs of ten, what the sites train on in some seconds; 0 in the others.

    Each syncer ends when it has merged the budget.
    """
    seconds, ends = random.randint(1, 12), random.random() < 0.6
    return (
        seconds * SECOND_NS * sum(site.tokens for site in sites) // max(site.step_ns for site in sites) if ends else 0
    )


def _outer(plan: OuterPlan, options: OuterOptions, size: int, *, leases: bool) -> OuterPlan:
    """Return the plan of one syncer with ``size`` fragments; only the first syncer ``leases`` data units."""
    unit = options.unit_sequences if leases else 0
    own = dataclasses.replace(options, num_fragments=size, unit_sequences=unit)
    return dataclasses.replace(plan, options=own, replication=None)


def _reached_ns(random: Random, start_ns: int, num_syncers: int) -> tuple[int, ...]:
    """Draw when a site first reaches each syncer: three sites of ten reach only some of them when they start."""
    if random.random() > 0.3:
        return (0,) * num_syncers
    near = random.randrange(num_syncers)
    late = [random.randint(1, 15) * SECOND_NS if random.random() < 0.7 else 0 for _ in range(num_syncers)]
    return tuple(start_ns + ns if ns and at != near else 0 for at, ns in enumerate(late))


def _site(site: SitePlan, sizes: Sequence[int], total: int) -> tuple[SitePlan, ...]:
    steps = max(site.options.inner_steps, total)
    all_of_them = dataclasses.replace(site.options, num_fragments=total, inner_steps=steps, lock_step=False)
    found, first = list[SitePlan](), 0
    for size in sizes:
        offsets = all_of_them.due_at[first : first + size]
        first += size
        unit = 0 if found else all_of_them.unit_sequences
        part = dataclasses.replace(all_of_them, num_fragments=size, offsets=offsets, unit_sequences=unit)
        found.append(dataclasses.replace(site, options=part, ranks=False))
    return tuple(found)


class Across:
    """The invariants that hold across all syncers of a run."""

    name = "across"
    mutation = "a step is told only to the parts that are connected"

    def __init__(self) -> None:
        self.undone: dict[tuple[str, int, int], int] = {}
        """By site, syncer and fragment: tokens merged after the backup from which the syncer was restored."""

    def require(self, holds: bool, *parts: object) -> None:
        """Raise ``Violation`` with ``parts`` unless it ``holds``."""
        if not holds:
            raise Violation(self.name, " ".join(str(part) for part in parts))

    def stepped(self, takers: Sequence[SiteProcess]) -> None:
        """All training parts of a site have made the same steps and were told of them, whichever syncers they reach."""
        there = [part for part in takers[0].trainer.parts if part.alive and not part.frozen and not part.stopping]
        made = {(part.step, part.machine.state.step) for part in there}
        self.require(len(made) <= 1, takers[0].site, "has parts that made other steps:", sorted(made))

    def site_ended(self, site: Site) -> None:
        """A site ends only when every syncer has told it so."""
        endings = [process.machine.state.ending for process in site.parts]
        self.require(None not in endings, site.name, "ends, and was told", endings)

    def set_back(self, at: int, was: OuterState, now: OuterState) -> None:
        """Count the merged tokens that syncer ``at`` undid when it was restored from state ``was`` to ``now``."""
        for name, site in was.sites.items():
            for index, line in enumerate(site.lines):
                kept = now.sites[name].lines[index].tokens_merged if name in now.sites else 0
                key = (name, at, index)
                self.undone[key] = self.undone.get(key, 0) + line.tokens_merged - kept

    def at_end(self, site: Site, machines: Sequence[OuterSync]) -> None:
        """The site and the syncers count the same merged tokens, over all fragments, and a site that never restarted
        has lost only tokens that restored syncers had merged after their backups."""
        ledgers: list[Ledger] = []
        merged = there = 0
        leasing = [at for at, machine in enumerate(machines) if machine.state.units is not None]
        self.require(leasing in ([], [0]), "units are leased by", leasing)
        for at, (process, machine) in enumerate(zip(site.parts, machines, strict=True)):
            for index, part in enumerate(process.machine.state.fragments):
                undone = self.undone.get((site.name, at, index), 0)
                explained = site.lives > 1 or part.tokens_lost <= undone
                self.require(
                    explained, site.name, "lost", part.tokens_lost, "and syncer", at, f"undid {undone} of {index}"
                )
                line = machine.state.sites[site.name].lines[index]
                fates = {fate.sequence: fate for fate in line.fates if fate.merged}
                waiting = [s.sequence for s in part.in_flight if s.merged_version is None and not s.outrun]
                waiting += [orphan.sequence for orphan in part.orphans]
                merged += part.tokens_merged + sum(fates[each].tokens for each in waiting if each in fates)
                there += line.tokens_merged
                ledgers.append(ledger_of(process.machine.state, index))
        whole = combined(ledgers)
        self.require(merged == there, site.name, "counts", merged, "merged tokens, the syncers", there)
        self.require(whole.balanced(), site.name, "has the ledger", whole)
        spread = abs(whole.merged * len(ledgers) - sum(ledger.merged for ledger in ledgers))
        self.require(spread <= len(ledgers), site.name, "counts", whole.merged, "as the mean of", ledgers)


class Several(Run):
    """A run of several syncers."""

    events_max = 2 * EVENTS_MAX

    def __init__(self, plan: SeveralPlan, only: Sequence[type[Checker]] = CHECKERS) -> None:
        self.across = Across()
        super().__init__(plan.whole, plan.outers, plan.sites, plan.faults, only)
        for site, reached_ns in zip(self.sites.values(), plan.reached_ns, strict=True):
            self.outcome.partly_reached += any(reached_ns)
            for side, instant_ns in zip(site.sides, reached_ns, strict=True):
                if instant_ns:
                    side.link.cut(*Direction)
                    self.heap.at(instant_ns, side.link.heal)

    # --- the phases --------------------------------------------------------------------------------------------

    def liveness(self) -> None:
        """Take down one syncer after the other while the others must go on; then cut sites off."""
        super().liveness()
        old = self.random.choice(self.syncers) if "restore" in self.faults else None
        if old is not None:
            old.back_up()
        self.rise(self.syncers, "after the heal")
        # A site that has not begun needs the values of all syncers; where rounds count every site, they wait for it.
        self.wait_for(self._begun, RISE_NS, "a site does not begin to train")
        for down in self.syncers:
            (seat,) = down.seats
            seat.up = False
            down.kill(seat)
            self.rise([each for each in self.syncers if each is not down], "while another machine is down")
            down.bring_up(seat)
        self.rise(self.syncers, "when all are up again")
        if old is not None:
            self._set_back(old)
            self.rise(self.syncers, "after a machine was set back")
        self._apart()

    def _apart(self) -> None:
        """Cut each site off from one syncer, and restart one site, maybe on an empty disk: each syncer that enough
        sites reach must go on."""
        sites, reach = [site for site in self.sites.values() if site.running()], Counter[int]()
        options, needs_all = self.plan.outer.options, list[Site]()
        old = [site for site in sites if all(side.disk.checkpoint is not None for side in site.sides)]
        if old and not self.plan.outer.conserving:
            site = self.random.choice(old)
            # A new site trains only once it reaches all syncers; where rounds count every site, they wait for it.
            if options.quorum != "all" and not options.round_updates and self.random.random() < 0.5:
                needs_all = [site]
                self.wipe_site(site.name, RESTART_NS)
            else:
                self.kill_site(site.name, RESTART_NS)
        for site in sites:
            away = self.random.randrange(len(self.syncers))
            site.sides[away].link.cut(*Direction)
            self.outcome.pairs_cut += 1
            if site not in needs_all:
                reach.update(at for at, _ in enumerate(self.syncers) if at != away)
        enough = [syncers for at, syncers in enumerate(self.syncers) if reach[at] >= needed(options)]
        self.rise(enough, "while sites are cut off from other machines")
        for site in sites:
            for side in site.sides:
                side.link.heal()
        self.rise(self.syncers, "when all sites reach all again")

    def _begun(self) -> bool:
        return all(part.step > 0 or part.stopping for site in self.sites.values() for part in site.parts)

    def end(self) -> None:
        """End the run, and check that the sites and the syncers have counted the same."""
        super().end()
        ended = [syncers.outer.machine for syncers in self.syncers if syncers.outer is not None]
        for site in self.sites.values():
            if site.parts:
                self.across.at_end(site, ended)

    # --- checks across all syncers -----------------------------------------------------------------------------

    def stepped(self, parts: Sequence[SiteProcess]) -> None:
        """As ``Across.stepped``."""
        self.across.stepped(parts)

    def site_ended(self, site: Site) -> None:
        """As ``Across.site_ended``."""
        self.across.site_ended(site)

    # --- faults ------------------------------------------------------------------------------------------------

    def _split(self, syncers: Syncers, site: Site) -> None:
        """Cut sites off from some syncers while they reach the others: any pair, several at once."""
        for each in self.sites.values():
            near = self.random.choice(self.syncers)
            for far in self.syncers:
                if far is not near and self.random.random() < 0.6:
                    self._partition(far, each)
                    self.outcome.pairs_cut += 1

    def _restore(self, syncers: Syncers, site: Site) -> bool:
        """Copy a syncer's disk and restore the copy after a while, when the sites are ahead of it."""
        if syncers.outer is not None and syncers.lineage <= LINEAGES_MAX:
            syncers.back_up()
            age_ns = self.random.choice(AGES_MS) * MILLISECOND_NS
            self.heap.after(age_ns, lambda: None if self.calm else self._set_back(syncers))
        return False

    def _set_back(self, syncers: Syncers) -> None:
        was = syncers.outer
        if was is None or was.machine.state.phase is not Phase.RUNNING:
            return  # Once the run is ending, sites come back only when their operators start them.
        syncers.restore()
        assert syncers.outer is not None
        now = syncers.outer.machine.state
        self.across.set_back(self.syncers.index(syncers), was.machine.state, now)
        self.outcome.faults["restore"] += 1
        self.outcome.undone += acknowledged(was.machine.state) - acknowledged(now)


def acknowledged(state: OuterState) -> int:
    """Return the number of updates that a syncer has accepted."""
    return sum(line.watermark for site in state.sites.values() for line in site.lines)


def run_several(seed: int, only: Sequence[type[Checker]] = CHECKERS) -> Outcome:
    """Run ``seed`` to its end or to the first violation."""
    return Several(draw_several(seed), only).run()
