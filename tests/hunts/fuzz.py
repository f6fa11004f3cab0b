"""``make fuzz N=100000``: call every method of a real syncer with bad input, with valid, invalid and no credentials.

After each batch, a view of the syncer's state must show that refused messages changed nothing.  Calls of a known class
must be answered as the table of ``statuses`` says; randomly mutated ones may get any definite answer, and must have
changed what that answer says.  No payload of an unauthorized caller reaches a codec.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from statistics import median
from typing import Any

import grpc

from diloco.sync.events import Outcome
from diloco.wire.convert import pack_join
from tests.hunts import statuses
from tests.hunts.asking import ADMIN, FOR_STRANGERS, SYNC, Access, Call, World, due, pushed
from tests.hunts.attacks import spoiled_at_random, strict
from tests.hunts.reporting import Counts, Hunt, Namespace, hunting
from tests.hunts.target import Died, Fortress, Target, View, guarded, running

SITES = ("alder", "birch", "cedar", "damson", "hazel", "willow")
"""No name becomes another one by a few flipped bits."""
EACH = 150
"""Calls of a worker in a batch."""
VARIANTS = {"tokens": 0.5, "tls": 0.25, "mtls": 0.25}
GROWTH_MAX = 0.05
WARM_CALLS = 15_000
"""Calls of the warm-up, in which much memory is touched for the first time (thread pools, arenas, snapshots); in a
shorter run, the first half.  ``warm_after_calls`` reports it, and memory growth is measured over the rest."""
GROWTH_CALLS_MIN = 20_000
QUIET_S = 20.0
PUSHES = 4
SAID_MAX = 200
"""The most lines that the syncer may log in a batch: for good updates and snapshots, and none for a refusal."""


@dataclass
class Findings:
    """The results of all batches."""

    answers: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)
    changes: int = 0
    decoded_of_strangers: int = 0

    @property
    def calls(self) -> int:
        return self.answers.total()


class Worker:
    """One attacker: its site's credentials, all others that it can get, and its knowledge of the run."""

    def __init__(self, site: str, other: str, fortress: Fortress, address: str, shown: dict[str, Any]) -> None:
        self.world = World(site, other, fortress.layout(), fortress.agreement())
        self.access = Access(address, shown)

    def settle(self, chance: random.Random, pushes: int = 0) -> None:
        """Join as a newer process than an earlier one, make ``pushes`` good pushes, and learn the run's state."""
        world = self.world
        if not world.incarnation:
            self._join(pack_join(world.join(process="0ddba110ddba11")))
        self.stand()
        for _ in range(pushes):
            header, payload = world.update(chance)
            answer, details = self.access.make(Call("", f"{SYNC}Push", pushed(header, payload), world.site))
            if answer == Outcome.ACCEPTED.value:
                world.last[header.fragment] = header, payload
            elif not answer.startswith("retry"):
                raise AssertionError(f"a good update was answered {answer}: {details}")
            self.stand()

    def stand(self) -> None:
        """Join again to learn the run's state; as a new process where a mutated Join has replaced ours."""
        world = self.world
        try:
            world.enter(self._join)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.ALREADY_EXISTS:
                raise
            world.process = f"{int(world.process, 16) + 1:016x}"
            world.enter(self._join)

    def _join(self, ask: bytes) -> bytes:
        until_s, site = time.monotonic() + QUIET_S, self.world.site
        call: Any = self.access.channel(site).unary_unary(f"{SYNC}Join")
        while True:
            try:
                return bytes(call(ask, metadata=self.access.metadata(site), timeout=QUIET_S))
            except grpc.RpcError as error:
                if time.monotonic() > until_s or error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                time.sleep(0.1)

    def attack(self, calls: Iterator[Call], count: int) -> Findings:
        """Make ``count`` of the calls."""
        found = Findings()
        for call in islice((each for each in calls if self.access.can_show(each.who)), count):
            answer, details = self.access.make(call)
            what = f"{call.row} at {call.path} by {call.who}"
            wrong = statuses.complaint(what, due(call, self.access), answer, details)
            found.answers[answer] += 1
            if wrong is not None:
                found.complaints.append(wrong)
        return found


def strangers(calls: Iterator[Call], chance: random.Random) -> Iterator[Call]:
    """Yield the same calls by unauthorized callers: the syncer refuses them as such, or gRPC does before it."""
    early = frozenset({"UNIMPLEMENTED", "RESOURCE_EXHAUSTED", "UNAUTHENTICATED"})
    for call in calls:
        if call.path in FOR_STRANGERS:
            continue
        call.row, call.allowed = f"{statuses.NOT_KNOWN} ({call.row})", early
        call.who = chance.choice(("nobody", "unknown", "two tokens", "odd token", "nameless", "foreign name"))
        yield call


def impostors(calls: Iterator[Call], other: str) -> Iterator[Call]:
    """Yield the same calls by a site other than the one they name: none may be answered OK.

    Exceptions are calls that name the caller's own site, and an observer's probe, which names no site.
    """
    allowed = statuses.ANY - {"OK", "accepted", "duplicate"} - {answer for answer in statuses.ANY if "/" in answer}
    for call in calls:
        if call.row == statuses.NOT_ALLOWED or not call.path.startswith((SYNC, ADMIN)):
            continue
        call.who, call.allowed = other, allowed | ({"OK"} if call.method == "Probe" else set())
        yield call


class Siege:
    """All batches against one variant of the syncer."""

    def __init__(self, target: Target, fortress: Fortress, shown: dict[str, Any], sites: list[str], seed: int) -> None:
        self.target = target
        self.findings = Findings()
        self.seed = seed
        pairs = zip(sites, sites[1:] + sites[:1], strict=True)
        self.workers = [Worker(site, other, fortress, target.address, shown) for site, other in pairs]
        self._settle([random.Random(f"{seed} settle {number}") for number in range(len(sites))], PUSHES)

    def _settle(self, chances: list[random.Random], pushes: int) -> None:
        for worker, chance in zip(self.workers, chances, strict=True):
            worker.settle(chance, pushes)
        self.quiet()
        for worker in self.workers:
            worker.stand()

    def batch(self, number: int, each: int) -> None:
        """Run one batch by all workers, and compare the syncer's state before and after it."""
        kind = ("strict", "strangers", "strict", "impostors", "spoiled")[number % 5]
        before = self.quiet()
        chances = [random.Random(f"{self.seed} {number} {place}") for place in range(len(self.workers))]
        calls = [self._calls(kind, worker, chance) for worker, chance in zip(self.workers, chances, strict=True)]
        with ThreadPoolExecutor(len(self.workers)) as pool:
            found = list(pool.map(Worker.attack, self.workers, calls, [each] * len(calls)))
        for one in found:
            self.findings.answers += one.answers
            self.findings.complaints += one.complaints
        accepted = sum(one.answers[Outcome.ACCEPTED.value] for one in found)
        self._judge(kind, before, self.quiet(before if kind != "spoiled" else None), accepted)
        if kind == "spoiled":
            self._settle(chances, 1)

    def _calls(self, kind: str, worker: Worker, chance: random.Random) -> Iterator[Call]:
        if kind == "strict":
            return strict(worker.world, chance)
        if kind == "spoiled":
            return spoiled_at_random(worker.world, chance)
        calls = (strict, spoiled_at_random)[chance.randrange(2)](worker.world, chance)
        return strangers(calls, chance) if kind == "strangers" else impostors(calls, worker.world.other)

    def _judge(self, kind: str, before: View, after: View, accepted: int) -> None:
        complain = self.findings.complaints.append
        if after.state != before.state:
            self.findings.changes += 1
            if kind != "spoiled":
                complain(f"{kind}: the run changed, although every message was refused")
            elif after.watermarks - before.watermarks != accepted:
                complain(
                    f"{kind}: {accepted} updates were accepted, but {after.watermarks - before.watermarks} are there"
                )
        elif accepted:
            complain(f"{kind}: {accepted} updates were accepted, but the run has not changed")
        if kind in ("strangers", "impostors"):
            reached = after.decoded - before.decoded
            received = after.counters.get("payload_bytes_in", 0) - before.counters.get("payload_bytes_in", 0)
            self.findings.decoded_of_strangers += reached
            if reached or received:
                complain(f"{kind}: {received} bytes were received and {reached} payloads decoded")
        if after.counters.get("internal", 0) != before.counters.get("internal", 0):
            complain(f"{kind}: the syncer had an internal error")
        if after.said - before.said > SAID_MAX:
            complain(f"{kind}: {after.said - before.said} lines were logged")
        if after.forged:
            complain(f"{kind}: a forged line was logged: {after.forged[0]!r}")
        if after.partial > len(self.workers) * len(self.workers[0].world.versions):
            complain(f"{kind}: {after.partial} updates are half received")

    def quiet(self, wanted: View | None = None) -> View:
        """Return a view once nothing changes any more or, with ``wanted``, once it equals that; at most ``QUIET_S``."""
        until_s = time.monotonic() + QUIET_S
        last = self.target.look()
        while time.monotonic() < until_s:
            if wanted is not None and last.state == wanted.state:
                return last
            time.sleep(0.05)
            now = self.target.look()
            if wanted is None and now.state == last.state:
                return now
            last = now
        return last

    def close(self) -> None:
        for worker in self.workers:
            worker.access.close()


def besiege(hunt: Hunt, asked: Namespace, variant: str, count: int) -> tuple[Findings, list[int]]:
    """Make ``count`` calls to a syncer of this ``variant``; return the findings, and its memory after each warm batch.

    A batch's number, from ``asked.first`` on, seeds it.
    """
    sites = list(SITES)
    fortress, shown = guarded(variant, hunt.folder / variant, sites)
    with running(fortress) as target:
        siege = Siege(target, fortress, shown, sites, asked.seed)
        warm, number = warm_after(count), asked.first
        memory: list[int] = []
        while siege.findings.calls < count:
            left = -(-(count - siege.findings.calls) // len(sites))
            known, again = len(siege.findings.complaints), {"variant": variant, "first": number, "n": len(sites) * EACH}
            try:
                siege.batch(number, min(EACH, left))
            except Died as died:
                hunt.violated(str(died), **again)
                break
            for complaint in siege.findings.complaints[known:][:5]:
                hunt.violated(complaint, **again)
            if siege.findings.calls >= warm:
                memory.append(target.look().rss_bytes)
            number += 1
        else:
            target.stop()
        siege.close()
    return siege.findings, memory


def warm_after(count: int) -> int:
    """Return the number of calls of the warm-up, for a run of ``count``."""
    return min(WARM_CALLS, count // 2)


def growth_of(memory: list[int]) -> float:
    """Return the growth from the median of the first quarter to that of the last: one value may fall on a snapshot."""
    if not memory:
        return 0.0
    quarter = max(1, len(memory) // 4)
    return median(memory[-quarter:]) / median(memory[:quarter]) - 1


@hunting(
    n=(5000, "calls"),
    variant=("", "only this one, rather than a share of each", VARIANTS),
    first=(0, "number of the first batch"),
)
def main(hunt: Hunt, asked: Namespace) -> Counts:
    shares = {asked.variant: 1.0} if asked.variant else VARIANTS
    answers: Counter[str] = Counter()
    totals = Counter(calls=0, unknown_or_internal=0, batches_that_changed_the_run=0, decoded_of_strangers=0)
    measured: dict[str, object] = {}
    for variant, share in shares.items():
        count = int(asked.n * share)
        found, memory = besiege(hunt, asked, variant, count)
        answers += found.answers
        totals.update(
            calls=found.calls,
            unknown_or_internal=sum(found.answers[each] for each in statuses.NEVER),
            batches_that_changed_the_run=found.changes,
            decoded_of_strangers=found.decoded_of_strangers,
        )
        growth = growth_of(memory)
        measured[variant] = {
            "rss_growth_percent": round(100 * growth, 2),
            "rss_mib": [round(each / 2**20, 1) for each in memory[:: max(1, len(memory) // 8)]],
            "warm_after_calls": warm_after(count),
        }
        if growth > GROWTH_MAX and found.calls >= GROWTH_CALLS_MIN:
            hunt.violated(f"memory grew by {100 * growth:.1f} %", variant=variant, n=found.calls)
    return {**totals, "answers": dict(sorted(answers.items())), **measured}
