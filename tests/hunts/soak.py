"""``make soak MINUTES=30``: eight sites and a syncer on this machine, real processes and sockets, constant faults.

Every site has its own emulated link.  Faults are drawn from the seed, about one in twenty seconds, in the mix that
large runs report: mostly a site that is killed or freezes, then links, then the syncer.  The syncer has no faults in
the second half, and two sites are never killed, so that their memory can be watched.  At the end, the whole run is
audited from its journal.
"""

from __future__ import annotations

import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from diloco.runs.scenario import Schedule, Step
from diloco.wan.link import LinkOptions
from diloco.wan.process import RelayProcess
from tests.hunts.crowd import memory_of
from tests.hunts.lives import ended
from tests.hunts.reporting import Counts, Hunt, Namespace, hunting
from tests.loopback.audit import audit
from tests.loopback.cluster import Log, Process, free_port
from tests.loopback.toy import Toy

SITES = "abcdefgh"
SPARED = "gh"
"""Sites that are never killed, so that their processes run long enough to show a leak."""
MIX = {
    "kill": 40,
    "stop": 15,
    "partition": 10,
    "one_way": 10,
    "reset": 10,
    "syncer_kill": 10,
    "syncer_stop": 5,
}
FAULT_EVERY_S = 20.0
BOUND_S = 90.0
STUCK_S = 30.0
"""With most sites healthy, some fragment gets a new version within this time."""
WARM_S = 60.0
GROWTH_MAX = 0.05
GROWTH_KIB_MIN = 4096
"""Growth below this is noise: an allocator's arena, a thread's stack."""


@dataclass
class Life:
    """Samples of one process's resident memory, as (time, KiB)."""

    began_s: float
    samples: list[tuple[float, int]] = field(default_factory=list)

    def growth(self) -> tuple[float, int] | None:
        """Return the growth from the first third after the warm-up to the last: as a share and in KiB; None if the
        process ran too briefly."""
        warm = [kib for at_s, kib in self.samples if at_s - self.began_s > WARM_S]
        third = len(warm) // 3
        if third < 10:
            return None
        first, last = statistics.median(warm[:third]), statistics.median(warm[-third:])
        return (last - first) / first, int(last - first)


class Soak:
    """Runs the processes, injects the faults and watches, in one thread."""

    def __init__(self, hunt: Hunt, seconds: float, seed: int, alive: ExitStack) -> None:
        self.hunt, self.seconds, self.alive = hunt, seconds, alive
        self.dice = random.Random(f"soak/{seed}")
        outer = {
            "num_fragments": 2,
            "grace_ns": 300_000_000,
            "run_ns": int(seconds * 1e9),
            "site_timeout_ns": 4 * 10**9,
        }
        keepalive = {"keepalive_time_ms": 2000, "keepalive_timeout_ms": 2000}
        self.toy = Toy(
            folder=str(hunt.folder),
            seed=seed,
            codec="int8",
            inner_steps=10,
            outer=outer,
            snapshot_every=32,
            port=free_port(),
            client={"stall_s": 4.0, "control_timeout_s": 3.0, **keepalive},
            server=keepalive,
        )
        self.relay = alive.enter_context(RelayProcess())
        target = f"127.0.0.1:{self.toy.port}"
        self.links = {
            site: self.relay.add(site, LinkOptions(rtt_ms=self.dice.choice((5.0, 40.0, 150.0)), mbps=20.0), target)
            for site in SITES
        }
        self.step_s = {site: self.dice.uniform(0.1, 0.3) for site in SITES}
        self.processes: dict[str, Process] = {}
        self.logs: dict[str, list[Log]] = {}
        self.lives: dict[str, Life] = {}
        self.faults: Counter[str] = Counter()
        self.began_s = time.monotonic()
        self.moved_s = self.began_s
        self.versions = 0

    # --- processes ---------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        if name == "syncer":
            process = Process("syncer", self.toy)
        else:
            mine = {"address": self.links[name], "step_s": self.step_s[name], "checkpoint_every": 25}
            process = Process("site", self.toy, None, site=name, **mine)
        self.alive.callback(process.__exit__)
        self.processes[name] = process
        self.logs.setdefault(name, []).append(process.log)
        self.lives[name] = Life(time.monotonic())

    def runs(self, name: str) -> bool:
        return self.processes[name].wait(0) is None

    def elapsed(self) -> float:
        return time.monotonic() - self.began_s

    # --- faults ------------------------------------------------------------------------------------------------

    def drawn(self) -> Iterator[Step]:
        """Draw the faults, the last of which ends in time for the run to end in order."""
        at_s = 5.0
        while at_s <= self.seconds - 30.0:
            kind = self.dice.choices(list(MIX), weights=list(MIX.values()))[0]
            if kind.startswith("syncer") and at_s > self.seconds / 2:
                kind = "stop"
            for_s = self.dice.choice((0.5, 2.0, 6.0, 15.0))
            name = self.dice.choice([site for site in SITES if kind != "kill" or site not in SPARED])
            if kind.startswith("syncer"):
                name, for_s = "syncer", min(for_s, 6.0)
            direction = self.dice.choice(("up", "down")) if kind == "one_way" else "both"
            yield Step(do=kind, target=name, at_s=at_s, for_s=for_s, direction=direction)
            at_s += self.dice.expovariate(1 / FAULT_EVERY_S)

    def carry_out(self, step: Step, heals: bool) -> None:
        name, lives = step.target, self.runs(step.target)
        self.faults[step.do] += lives and not heals
        match step.do.removeprefix("syncer_"):
            case "kill" if heals and not lives:
                self.start(name)
            case "kill" if lives and not heals:
                self.processes[name].kill()
            case "stop" if lives:
                self.processes[name].send(signal.SIGCONT if heals else signal.SIGSTOP)
            case "reset" if not heals:
                self.relay.reset(name)
            case "partition" | "one_way":
                self.relay.heal(name) if heals else self.relay.partition(name, step.direction)

    # --- watching ----------------------------------------------------------------------------------------------

    def watch(self) -> None:
        now_s = time.monotonic()
        for name, process in self.processes.items():
            if process.wait(0) is None:
                with suppress(FileNotFoundError, ProcessLookupError):  # It has just ended.
                    self.lives[name].samples.append((now_s, memory_of(process.pid).get("VmRSS", 0) >> 10))
            elif process.wait(0) not in (0, -9):
                self.hunt.violated(f"{name} ended with {process.wait(0)}: {process.errors}")
                self.start(name)
        versions = sum(len(log.of("published")) for log in self.logs["syncer"])
        if versions > self.versions:
            self.versions, self.moved_s = versions, now_s
        elif now_s - self.moved_s > STUCK_S + 15.0:  # The longest fault lasts 15 s.
            self.hunt.violated(f"no new version for {now_s - self.moved_s:.0f} s")
            self.moved_s = now_s

    def run(self) -> None:
        self.start("syncer")
        self.processes["syncer"].log.wait_for("listening", 1, BOUND_S)
        for site in SITES:
            self.start(site)
        schedule, watched_s = Schedule(list(self.drawn())), 0.0
        while not self.over() and self.elapsed() < self.seconds + BOUND_S:
            for play in schedule.due(self.elapsed(), 0.0):
                self.carry_out(play.step, play.heals)
            if self.elapsed() - watched_s >= 1.0:
                watched_s = self.elapsed()
                self.watch()
            time.sleep(0.05)

    def over(self) -> bool:
        return self.elapsed() > self.seconds and not any(self.runs(name) for name in self.processes)

    # --- the end -----------------------------------------------------------------------------------------------

    def check(self) -> dict[str, object]:
        late = [name for name in self.processes if self.runs(name)]
        if late:
            self.hunt.violated(f"still running {BOUND_S:.0f} s after the end: {', '.join(late)}")
            return {}
        for name, process in self.processes.items():
            if process.wait(0) != 0:
                self.hunt.violated(f"{name} ended with {process.wait(0)}: {process.errors}")
        finished = {name: ended(self.logs[name][-1]) for name in SITES}
        try:
            told = audit(self.toy, self.logs["syncer"], {name: self.logs[name] for name in SITES}, finished)
        except AssertionError as error:
            self.hunt.violated(f"audit: {error}")
            return {}
        growth: dict[str, float] = {}
        for name in ("syncer", *SPARED):
            found = self.lives[name].growth()
            if found is None:
                continue
            growth[name] = round(found[0], 4)
            if found[0] > GROWTH_MAX and found[1] > GROWTH_KIB_MIN:
                self.hunt.violated(f"{name} grew by {found[1]} KiB, {found[0]:.1%}")
        ledgers = Counter[str]()
        for done in finished.values():
            ledgers.update(done.ledger)
        return {
            "updates": len(told.fates),
            "merged": sum(fate.merged for fate in told.fates.values()),
            "versions": len(told.published),
            "tokens": dict(ledgers),
            "memory_growth": growth,
            "syncer_lives": len(self.logs["syncer"]),
            "site_lives": sum(len(self.logs[name]) for name in SITES),
        }


@hunting(minutes=(1.0, "length of the run"))
def main(hunt: Hunt, asked: Namespace) -> Counts:
    with ExitStack() as alive:
        soak = Soak(hunt, asked.minutes * 60, asked.seed, alive)
        soak.run()
        return {**soak.check(), "faults": dict(sorted(soak.faults.items()))}
