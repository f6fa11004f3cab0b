"""``make liars N=10000``: sites that follow the protocol but lie about their updates.

Runs honest sites on the outer machine: uneven steps and batches, absences, processes that restart with other batches.
One or two of them lie, in one field or two, at the extremes and just inside the bounds, once or for many rounds.  A lie
is compared with the true update in the same state at the same instant: each moves the model by its site's weight times
the step's share.

A violation is an accepted lie that moves the model more than ``MOVED_MAX`` times as far as the truth, hides a norm,
ends the run or lengthens a grace; and an honest update that is refused for its declared figures.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.admission import fastest_step_ns
from diloco.sync.events import Outcome, Reason
from diloco.sync.options import SECOND_NS, HealthOptions, OuterOptions
from diloco.sync.rounds import raw_weight
from diloco.sync.state import Phase
from diloco.sync.syncer import OuterSync
from tests.hunts.reporting import Counts, Hunt, Namespace, hunting

MOVED_MAX = 1.5
NORM_MAX = 10.0 * 8
"""The largest norm over the usual one of the true steps: admission's ratio 10, times 8 for falsely believed steps."""
ROUNDS = 60
BUDGET_PERIODS = 10_000
RATIOS = (1e-12, 1e-6, 0.01, 0.5, 1.9, 3.0, 7.9, 15.9, 16.1, 63.0, 1e3, 1e6, 1e12)
FIELDS = ("steps", "tokens", "step_ns", "cursor", "norm")


@dataclass
class Site:
    """The true figures of a site."""

    name: str
    step_ns: int
    step_tokens: int
    sequence: int = 0
    incarnation: int = 1
    sealed_ns: int = 0
    lies: dict[str, float] = field(default_factory=dict)


class World:
    """One run."""

    def __init__(self, seed: int) -> None:
        draw = self.draw = random.Random(seed)
        self.inner_steps = draw.choice((5, 10, 30, 100))
        names = "abcdef"[: draw.randint(3, 6)]
        spread, batches = draw.choice((1, 4)), draw.choice((1, 4))
        self.sites = [
            Site(name, round(SECOND_NS * draw.uniform(1, spread)), 1000 * draw.randint(1, batches)) for name in names
        ]
        budget = BUDGET_PERIODS * self.inner_steps * sum(site.step_tokens for site in self.sites)
        options = OuterOptions(
            weights=draw.choice(("tokens2_per_step", "tokens", "uniform")),
            share_weighted=True,
            grace_period_percent=90,
            token_budget=budget,
            staleness_max=500,
            updates_in_flight_max=draw.choice((1, 2)),
            fates_kept_max=1024,
            unit_sequences=seed % 2,
        )
        self.machine = OuterSync(options)
        self.handle(ev.SyncerStarted(1, HealthOptions(), 0), 0)
        for site in self.sites:
            self.handle(ev.JoinRequested(1, site.name, "p1"), 0)
        for site in draw.sample(self.sites, draw.choice((1, 1, 2))):
            site.lies = {name: draw.choice(RATIOS) for name in draw.sample(FIELDS, draw.choice((1, 2)))}
        self.lies_from, self.lies_for = draw.randint(0, ROUNDS // 2), draw.choice((1, 10, ROUNDS))

    def handle(self, event: ev.OuterEvent, now_ns: int) -> list[fx.OuterEffect]:
        """Give the machine the event after all earlier deadlines, and complete every requested outer step at once."""
        while (due_ns := self.machine.next_deadline_ns()) is not None and due_ns < now_ns:
            self._stepped(self.machine.handle(ev.DeadlinePassed(), due_ns), due_ns)
        return self._stepped(self.machine.handle(event, now_ns), now_ns)

    def _stepped(self, effects: list[fx.OuterEffect], now_ns: int) -> list[fx.OuterEffect]:
        for step in [effect for effect in effects if isinstance(effect, fx.StartOuterStep)]:
            effects += self._stepped(
                self.machine.handle(ev.OuterStepDone(step.fragment, step.version, "v", "d"), now_ns), now_ns
            )
        return effects

    def update(self, site: Site, now_ns: int) -> ev.UpdateArrived:
        """Return the true update: the steps since the site's last one, and a norm that grows with their square root."""
        steps = max(1, (now_ns - site.sealed_ns) // site.step_ns)
        return ev.UpdateArrived(
            1, site.name, site.incarnation, 0, site.sequence + 1, self.machine.state.fragments[0].version,
            steps * site.step_tokens, steps, site.step_ns, steps, f"{site.name}{now_ns}", "spool/x", "fp32",
            finite=True, final=False, norm=sqrt(steps) * self.draw.uniform(0.7, 1.4), cosine=None,
        )  # fmt: skip


def lied(event: ev.UpdateArrived, lies: dict[str, float]) -> ev.UpdateArrived:
    """Return the event with its fields multiplied by the ratios of ``lies``, up to the wire's bounds."""
    said: dict[str, Any] = {name: getattr(event, name) * ratio for name, ratio in lies.items()}
    bound = {"steps": 1 << 40, "tokens": 1 << 40, "step_ns": 1 << 62, "cursor": 1 << 62}
    said = {name: value if name == "norm" else min(bound[name], max(1, round(value))) for name, value in said.items()}
    return replace(event, **said, digest=event.digest + "lie")


def moved(machine: OuterSync, event: ev.UpdateArrived, now_ns: int) -> tuple[float, fx.AnswerPush, Phase, int]:
    """Return the effects of ``event`` on a copy of the machine: its weight times its step's share, the answer, the
    run's phase, and how long the round waits."""
    copy = OuterSync.restore(machine.options, machine.snapshot())
    effects = copy.handle(event, now_ns)
    answer = next(effect for effect in effects if isinstance(effect, fx.AnswerPush))
    until_ns = now_ns
    while not any(isinstance(effect, fx.StartOuterStep) for effect in effects):
        due_ns = copy.next_deadline_ns()
        if due_ns is None or copy.state.fragments[0].merging_since_ns is not None:
            break
        until_ns = due_ns
        effects = copy.handle(ev.DeadlinePassed(), due_ns)
    parts = [
        step.share * part.weight
        for step in effects
        if isinstance(step, fx.StartOuterStep)
        for part in step.contributions
        if part.site == event.site
    ]
    return sum(parts), answer, copy.state.phase, until_ns - now_ns


def play(seed: int, hunt: Hunt, counts: Counter[str]) -> tuple[float, float]:
    """Make one run; return the largest ratio by which a lie moved the model further than the truth, and the largest
    final weight of a site over its true weight."""
    world, worst = World(seed), 0.0
    draw, period_ns = world.draw, {site.name: world.inner_steps * site.step_ns for site in world.sites}
    due = {site.name: round(period_ns[site.name] * draw.random()) + site.step_ns for site in world.sites}
    for _ in range(ROUNDS * len(world.sites)):
        site = min(world.sites, key=lambda each: due[each.name])
        now_ns = due[site.name]
        if draw.random() < 0.01:  # Restart with other batches.
            site.incarnation += 1
            site.step_tokens = max(100, round(site.step_tokens * draw.uniform(0.8, 1.2)))
            world.handle(ev.JoinRequested(1, site.name, f"p{site.incarnation}"), now_ns)
        true = world.update(site, now_ns)
        event, lies = true, bool(site.lies) and 0 <= site.sequence - world.lies_from < world.lies_for
        if lies:
            event = lied(true, site.lies)
            far, answer, phase, wait_ns = moved(world.machine, event, now_ns)
            near, _, true_phase, true_wait_ns = moved(world.machine, true, now_ns)
            counts["lies"] += 1
            if answer.outcome is Outcome.ACCEPTED:
                counts["lies accepted"] += 1
                ratio = far / near if near else 1.0
                worst = max(worst, ratio)
                replay = {"seed": seed, "n": 1}
                if ratio > MOVED_MAX:
                    hunt.violated(f"{site.lies} moved the model {ratio:.2f} times as far as the truth", **replay)
                if phase is not true_phase:
                    hunt.violated(f"{site.lies} made the run {phase.value}", **replay)
                if wait_ns > true_wait_ns + max(period_ns.values()) + SECOND_NS:
                    hunt.violated(f"{site.lies} made a round wait {wait_ns / SECOND_NS:.0f} s", **replay)
                if site.sequence >= 4 and event.norm > NORM_MAX * sqrt(true.steps) * 1.4:
                    hunt.violated(f"{site.lies} hid a norm of {event.norm:.3g}", **replay)
        effects = world.handle(event, now_ns)
        answer = next(effect for effect in effects if isinstance(effect, fx.AnswerPush))
        if answer.outcome is Outcome.ACCEPTED:
            site.sequence += 1
            site.sealed_ns = now_ns
        if not site.lies:
            counts["honest"] += 1
            if answer.reason in (Reason.IMPLAUSIBLE, Reason.OUTLIER):
                hunt.violated(f"an honest update was refused: {answer.reason}", seed=seed, n=1)
        away = round(draw.expovariate(1 / 20)) if draw.random() < 0.02 else 0
        due[site.name] = now_ns + round(period_ns[site.name] * (1 + away) * draw.uniform(0.98, 1.02))
    honest_ns = min(site.step_ns for site in world.sites)
    told_ns = fastest_step_ns(world.machine.state)
    if told_ns < honest_ns // 8:
        hunt.violated(
            f"the sites are told of a step of {told_ns} ns, but the fastest takes {honest_ns}", seed=seed, n=1
        )
    if world.machine.state.phase is not Phase.RUNNING:
        hunt.violated("the run has ended", seed=seed, n=1)
    return worst, max(_weight(world, site) for site in world.sites)


def _weight(world: World, site: Site) -> float:
    line, rule = world.machine.state.sites[site.name].lines[0], world.machine.options.weights
    true = raw_weight(rule, world.inner_steps * site.step_tokens, world.inner_steps)
    return raw_weight(rule, line.usual_tokens, line.usual_steps) / true if line.usual_tokens else 0.0


@hunting(n=(1000, "number of lies"))
def main(hunt: Hunt, asked: Namespace) -> Counts:
    counts: Counter[str] = Counter()
    moved_most, weight_most, seed = 0.0, 0.0, asked.seed
    while counts["lies"] < asked.n and len(hunt.violations) < 20:
        worst, weight = play(seed, hunt, counts)
        moved_most, weight_most, seed = max(moved_most, worst), max(weight_most, weight), seed + 1
    most = {"moved_at_most": round(moved_most, 3), "weight_at_most": round(weight_most, 1)}
    return {**counts, "runs": seed - asked.seed, **most}
