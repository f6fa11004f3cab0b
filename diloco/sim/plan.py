"""Draw a run from a seed: the sites and their speeds, the rules, the links' behaviour, and the faults.

``inject_pair_fault`` injects the faults of a syncer, its standby and their lease.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from diloco.sim.outer_disk import CrashPoint
from diloco.sim.site_state import SitePlan
from diloco.sim.standby_process import StandbyProcess
from diloco.sim.world import MILLISECOND_NS, Direction, OuterPlan, OuterRule, ReplicationPlan, Weather
from diloco.sync.options import (
    ADMISSION_POLICIES,
    GRACE_KINDS,
    SECOND_NS,
    WEIGHT_RULES,
    HealthOptions,
    LearnerOptions,
    OuterOptions,
)

if TYPE_CHECKING:
    from diloco.sim.cluster import Syncers
    from diloco.sim.outer_process import OuterProcess
    from diloco.sim.world import Link

GENTLE = ("outer_crash", "power_cut", "rot", "outer_freeze", "freeze", "partition", "half_partition", "storm")
"""Faults that discard no progress, so that conservation can be checked to the last bit."""
HARSH = ("kill", "wipe", "twin", "leave", "evict", "poison", "ruin", "drain", "restore", "outlier", "word")
"""Faults that may discard progress."""
OF_ONE_MACHINE = ("rot", "restore")
"""Not in runs with a standby: there an operator repairs rot with the other machine's files, promotes or restores."""


@dataclass(frozen=True, slots=True)
class SwarmPlan:
    """Everything that a seed decides before the first event."""

    seed: int
    outer: OuterPlan
    sites: tuple[SitePlan, ...]
    weathers: tuple[Weather, ...]
    starts_ns: tuple[int, ...]
    """When each site starts; late ones join in mid-run."""
    faults: tuple[str, ...]
    fault_interval_ns: int
    safety_ns: int


def draw_plan(seed: int) -> SwarmPlan:
    """Draw the plan of ``seed``, deterministically."""
    plan, random = _alone(seed), Random(f"{seed}/overlapping")
    if not plan.sites[0].options.lock_step and random.random() <= 0.3:
        # In three runs of ten, each site makes its own number of steps before it adopts a version.
        sites = [replace(site, overlap_steps=random.randrange(site.options.inner_steps)) for site in plan.sites]
        plan = replace(plan, sites=tuple(sites))
    if not plan.outer.conserving:  # A site that takes the final version discards what the codec rounded off.
        random = Random(f"{seed}/final")
        plan = replace(plan, sites=tuple([replace(site, final=random.random() < 0.5) for site in plan.sites]))
    plan = _ruled(_leasing(plan, Random(f"{seed}/units")), Random(f"{seed}/rules"))
    random = Random(f"{seed}/replication")
    return _with_a_standby(plan, random) if random.random() < 0.3 else plan


def _leasing(plan: SwarmPlan, random: Random) -> SwarmPlan:
    """In half of the runs the sites train on data units that the syncer leases; in some they run out of units."""
    if random.random() < 0.5:
        return plan
    unit, ahead = random.choice((1, 2, 3, 5)), random.choice((1, 4, 16, 64))
    options = replace(plan.outer.options, unit_sequences=unit, lease_ns=random.choice((1, 4, 15)) * SECOND_NS)
    sites = [
        replace(
            site, options=replace(site.options, unit_sequences=unit, sequence_tokens=site.tokens, units_ahead=ahead)
        )
        for site in plan.sites
    ]
    return replace(plan, outer=replace(plan.outer, options=options), sites=tuple(sites))


def _ruled(plan: SwarmPlan, random: Random) -> SwarmPlan:
    """Give some runs rounds by a count of updates, merges by update, staleness weights, grace by share, dynamic steps
    and eager adoption."""
    options = replace(plan.outer.options, staleness_power=random.choice((0.0, 0.0, 0.5)))
    if options.quorum == options.quorum_min == 1 and not plan.outer.conserving and random.random() < 0.4:
        options = replace(options, round_updates=random.randint(1, 4))
    if not plan.outer.conserving:
        options = replace(options, share_weighted=Random(f"{plan.seed}/share").random() < 0.5)
    if not plan.outer.conserving and not options.share_weighted and Random(f"{plan.seed}/terms").random() < 0.5:
        options = replace(options, merge_by="update")
    options = replace(options, grace_period_percent=Random(f"{plan.seed}/grace").choice((0, 0, 50, 100)))
    dynamic, first = random.random() < 0.2, plan.sites[0].options
    eager = not plan.outer.conserving and not first.lock_step and random.random() < 0.25
    adopt = "eager" if eager else first.adopt
    sites = [replace(each, options=replace(each.options, dynamic_steps=dynamic, adopt=adopt)) for each in plan.sites]
    return replace(plan, outer=replace(plan.outer, options=options), sites=tuple(sites))


def _with_a_standby(plan: SwarmPlan, random: Random) -> SwarmPlan:
    between, to_lease = _weather(random), _weather(random)
    replication = ReplicationPlan(
        between,
        to_lease,
        # A lease shorter than a few round trips would be lost all the time.
        ttl_ns=max(random.choice((1500, 3000)) * MILLISECOND_NS, 12 * (to_lease.latency_ns + to_lease.jitter_ns)),
        timeout_ns=random.choice((1500, 3000)) * MILLISECOND_NS,
        mode=Random(f"{plan.seed}/mode").choice(("sync", "sync", "sync", "async")),
    )
    kept = tuple(kind for kind in plan.faults if kind not in OF_ONE_MACHINE)
    return replace(
        plan,
        outer=replace(plan.outer, replication=replication),
        faults=kept + tuple(kind for kind in PAIR if random.random() < 0.6),
    )


def _alone(seed: int) -> SwarmPlan:
    random = Random(f"{seed}/plan")
    conserving = random.random() < 0.25
    num_sites, num_fragments = random.randint(1, 5), random.randint(1, 4)
    in_flight_max = random.randint(1, 3)
    lock_step = not conserving and random.random() < 0.08
    outer = OuterPlan(
        _options(random, num_sites, num_fragments, in_flight_max, conserving=conserving, lock_step=lock_step),
        OuterRule(10, 0, random.choice((1, 64)))
        if conserving
        else OuterRule(random.choice((10, 7, 4)), random.choice((0, 5, 9)), random.choice((1, 64, 500))),
        0 if conserving else random.choice((0, 5, 100, 700)) * MILLISECOND_NS,
        0 if conserving else random.choice((0, 0, 0, 50)),
        random.randint(10, 80),
        HealthOptions(
            policy=random.choice((*ADMISSION_POLICIES, "hold")),
            policies={"b": random.choice(ADMISSION_POLICIES)} if random.random() < 0.3 else {},
            history=random.choice((4, 8)),
            history_min=2,
            hold_ns=random.choice((500, 3000, 8000)) * MILLISECOND_NS,
        ),
        conserving=conserving,
    )
    learner = LearnerOptions(
        num_fragments=num_fragments,
        inner_steps=num_fragments + random.randint(0, 8),
        adopt="rebase" if conserving else random.choice(("rebase", "overwrite", "blend")),
        updates_in_flight_max=in_flight_max,
        discards_max=random.randint(2, 5),
        lock_step=lock_step,
    )
    # Every other site has several ranks.
    sites = tuple(replace(_site(random, learner, outer.options), ranks=index % 2 == 1) for index in range(num_sites))
    kinds = GENTLE if conserving else GENTLE + HARSH
    late = random.random() < 0.5
    return SwarmPlan(
        seed,
        outer,
        sites,
        tuple(_weather(random) for _ in sites),
        tuple(random.randrange(12 * SECOND_NS) if late and index else 0 for index, _ in enumerate(sites)),
        tuple(kind for kind in kinds if random.random() < 0.6),
        random.randint(400, 4000) * MILLISECOND_NS,
        random.randint(10, 25) * SECOND_NS,
    )


def _options(
    random: Random, num_sites: int, num_fragments: int, in_flight_max: int, *, conserving: bool, lock_step: bool
) -> OuterOptions:
    waits_for_all = lock_step or random.random() < 0.3
    quorum: int | str = "all" if waits_for_all else random.choice((1, 1, random.randint(1, num_sites)))
    quorum_min = random.randint(1, num_sites if waits_for_all else int(quorum)) if random.random() < 0.3 else 1
    ends = random.random()
    return OuterOptions(
        num_fragments=num_fragments,
        quorum=1 if conserving else quorum,
        quorum_min=1 if conserving else quorum_min,
        grace="fixed" if conserving else random.choice(GRACE_KINDS),
        grace_ns=0 if conserving else random.choice((0, 50, 500, 1500)) * MILLISECOND_NS,
        grace_share_percent=random.choice((50, 80, 99)),
        overlap_steps=random.randint(0, 6),
        weights=random.choice(WEIGHT_RULES),
        staleness_max=(staleness_max := random.randint(0, 6)),
        updates_in_flight_max=in_flight_max,
        site_timeout_ns=random.randint(2000, 4000) * MILLISECOND_NS,
        final_wait_ns=random.randint(2000, 6000) * MILLISECOND_NS,
        token_budget=random.randint(500, 20_000) if ends < 0.25 else 0,
        run_ns=random.randint(8, 40) * SECOND_NS if 0.25 <= ends < 0.4 else 0,
        fates_kept_max=in_flight_max * (staleness_max + 2) + random.choice((0, 0, 4, 60)),
        sites_max=num_sites,
    )


def _site(random: Random, learner: LearnerOptions, outer: OuterOptions) -> SitePlan:
    return SitePlan(
        options=learner,
        step_ns=random.randint(90, 500) * MILLISECOND_NS,
        step_jitter=random.choice((0.0, 0.1, 1.0)),
        tokens=random.randint(1, 100),
        transfer_ns=random.choice((0, 30, 300, 1500)) * MILLISECOND_NS,
        encode_ns=random.choice((0, 5, 150, 600)) * MILLISECOND_NS,
        quantum=random.choice((1, 64, 512)),
        alpha_tenths=random.randint(1, 9),
        checkpoint_steps=random.randint(2, 20),
        checkpoint_ns=random.choice((0, 50, 900)) * MILLISECOND_NS,
        report_ns=outer.site_timeout_ns // 3,
    )


def _weather(random: Random) -> Weather:
    return Weather(
        random.choice((1, 20, 80, 150)) * MILLISECOND_NS,
        random.choice((0, 10, 200)) * MILLISECOND_NS,
        random.choice((0.0, 0.0, 0.05, 0.2)),
        random.choice((0.0, 0.0, 0.02, 0.1)),
    )


PAIR = (
    "primary_gone",
    "primary_frozen",
    "pair_partition",
    "lease_partition",
    "standby_crash",
    "standby_gone",
    "standby_frozen",
    "detach",
    "deserted",
)
"""Faults of runs with a standby."""


def inject_pair_fault(syncers: Syncers, random: Random, kind: str) -> bool:
    """Inject fault ``kind``, one of ``PAIR``; return whether that was possible."""
    leading = syncers.seat_of_outer()
    standby = next((seat for seat in syncers.seats if seat is not leading), None)
    outer, between, heap = syncers.outer, syncers.between, syncers.heap
    if standby is None or outer is None or between is None:
        return False
    match kind:
        case "primary_gone":
            # The leading machine goes, perhaps with its folder; it may stay down until all faults are healed.
            if random.random() < 0.5:
                if not syncers.may_be_lost(leading):
                    return False
                syncers.lose(leading)
            else:
                syncers.kill(leading, power=random.random() < 0.5)
            leading.up = False
            if random.random() < 0.5:
                heap.after(_down_ns(random), lambda: syncers.bring_up(leading))
        case "primary_frozen":
            _freeze_primary(syncers, random)
        case "pair_partition" | "lease_partition":
            link = between
            if kind == "lease_partition":
                seat = random.choice((standby, leading))
                assert seat.line is not None
                link = seat.line.link
            link.cut(*random.choice(((Direction.UP,), (Direction.DOWN,), tuple(Direction))))
            heap.after(_down_ns(random), link.heal)
        case "standby_crash":
            standby.restart_ns = _down_ns(random)
            point, power = random.choice((None, *CrashPoint)), random.random() < 0.5
            if point is None:
                syncers.kill(standby, power=power)
            else:
                syncers.doom(standby, point, power=power)
        case "standby_gone":
            if not syncers.may_be_lost(standby):
                return False
            standby.restart_ns = _down_ns(random)
            syncers.lose(standby)
        case "standby_frozen":
            process = standby.process
            if not isinstance(process, StandbyProcess):
                return False
            process.freeze(_down_ns(random))
        case "detach":
            return _detach(syncers)
        case "deserted":
            _desert(syncers, random, outer, between)
    return True


def _down_ns(random: Random) -> int:
    return random.choice((400, 2000, 6000, 12000)) * MILLISECOND_NS


def _freeze_primary(syncers: Syncers, random: Random) -> None:
    """Freeze the leading process for half to two and a half times its lease."""
    process, lease = syncers.outer, syncers.lease
    assert process is not None
    assert lease is not None
    process.freeze(int(lease.ttl_ns * (0.5 + 2 * random.random())))


def _detach(syncers: Syncers) -> bool:
    """Detach the standby while it does not follow, as an operator whose run stands still."""
    outer = syncers.outer
    if outer is None or outer.replicator is None or outer.replicator.follows():
        return False
    outer.deliver(outer.detach)
    return True


def _desert(syncers: Syncers, random: Random, outer: OuterProcess, between: Link) -> None:
    """Cut primary and standby apart, detach, then freeze the primary, which has published what the standby lacks."""
    plan, heap = syncers.plan.replication, syncers.heap
    assert plan is not None
    between.cut(*Direction)

    def fall_silent() -> None:
        if syncers.outer is outer:
            _freeze_primary(syncers, random)
        heap.after(2 * plan.ttl_ns, between.heal)

    heap.after(plan.timeout_ns + SECOND_NS, lambda: _detach(syncers))
    heap.after(plan.timeout_ns + 4 * SECOND_NS, fall_silent)
