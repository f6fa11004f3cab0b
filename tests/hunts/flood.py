"""``make flood``: one site floods a syncer at full speed; how much longer are another site's rounds?

A real syncer and the flooding site run in their own processes, an honest site in this one, in one run.  Quiet and
flooded periods alternate, so that other load on this machine affects both.  The honest site waits for each version
(``lock_step``), so that any delay at the syncer is part of its round.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc

from benchmarks.record import percentile
from diloco.wire.convert import pack_member
from diloco.wire.messages import PROCESS_DIGITS, MemberAsk
from tests.forked import forkserver
from tests.hunts.asking import ADMIN, SYNC, World, good, pushed
from tests.hunts.reporting import Counts, Hunt, Namespace, hunting
from tests.loopback.cluster import Process, SiteThread, free_port
from tests.loopback.toy import RUN, Toy

SITE = "flood"
WAIT_S = 10.0
TOKENS = {"honest": "token-of-the-honest-site", SITE: "token-of-the-flooding-site"}
BOUND_S = 120.0
STEP_S = 0.03
INNER_STEPS = 10
ROUNDS_MIN = 10
RISE_MAX = 0.20
GRANTS = {"default": "deny", "sites": {"honest": {}, SITE: {"pushes_per_s": 2, "bytes_per_s": 4e6}}}
SETTLE_S = 1.0


class Flood:
    """The calls of one thread over one connection, for its own site and with a valid token.

    The product's client would back off when told to; this one calls again as soon as it has an answer.
    """

    def __init__(self, toy: Toy, channel: grpc.Channel) -> None:
        self.world = World(SITE, "", toy.layout(), toy.agreement(), incarnation=1, watermarks=[0], versions=[0])
        self.metadata = (("authorization", f"Bearer {TOKENS[SITE]}"),)
        self.channel = channel
        self.payload = bytes(4 * self.world.layout.fragments[0].numel)
        self.joined = False
        self.good = {path.rpartition("/")[2]: raw for path, (_, raw) in good(self.world, random.Random(1)).items()}

    def ask(self, method: str, *messages: bytes) -> Iterator[bytes]:
        call = self.channel.stream_stream(f"{ADMIN if method == 'Status' else SYNC}{method}")
        answer: Iterator[bytes] = call(iter(messages), timeout=WAIT_S, metadata=self.metadata)
        return answer

    def joins(self) -> None:
        """Join; our other threads hold the same site."""
        self.world.enter(lambda raw: next(self.ask("Join", raw)))

    def starts(self) -> None:
        """Join as a new process each time, which takes over: it names no folder."""
        self.world.process = secrets.token_hex(PROCESS_DIGITS // 2)
        self.joins()

    def member(self) -> None:
        """Join as a new process if another of our threads has taken the site since."""
        if not self.joined:
            self.starts()
            self.joined = True

    def reports(self) -> None:
        next(self.ask("Report", self.good["Report"]))

    def pulls(self) -> None:
        for _ in self.ask("Pull", self.good["Pull"]):
            pass

    def watches(self) -> None:
        self.member()
        call = self.ask("Watch", pack_member(MemberAsk(RUN, SITE, self.world.incarnation)))
        next(call)
        call.cancel()  # type: ignore[attr-defined]

    def status(self) -> None:
        next(self.ask("Status", b""))

    def noise(self) -> None:
        next(self.ask("Push", b"\xff" * 200))

    def updates(self, **changes: object) -> None:
        """Push a valid update, or one with these changes."""
        self.member()
        for _ in self.ask("Push", *pushed(*self.world.update(random.Random(1), payload=self.payload, **changes))):
            pass

    def damaged(self) -> None:
        """Push a complete update whose digest does not match."""
        self.updates(digest=secrets.token_hex(32))

    def attack(self, kind: str, until_s: float) -> Counter[str]:
        """Make calls of this kind, at least one even where other load lets it begin late; return the answers."""
        counts: Counter[str] = Counter()
        while not counts or time.monotonic() < until_s:
            try:
                getattr(self, kind)()
                counts[f"{kind}_ok"] += 1
            except grpc.RpcError as error:
                counts[f"{kind}_{error.code().name.lower()}"] += 1
                self.joined = self.joined and error.code() is not grpc.StatusCode.FAILED_PRECONDITION
            except StopIteration:
                counts[f"{kind}_nothing"] += 1
        return counts


KINDS = {
    **dict.fromkeys(("joins", "starts", "reports", "pulls", "watches", "updates"), "ok"),
    "status": "permission_denied",
    "noise": "invalid_argument",
    "damaged": "data_loss",
}
"""The kinds of calls, and the answer that each gets where the syncer is not too busy to look at it."""


def flooded(toy: Toy, address: str, kinds: tuple[str, ...], until_s: float, asked: Namespace) -> Counter[str]:
    """Make these calls in a process of its own, until ``until_s`` on the monotonic clock; return the answers."""
    os.nice(19)  # The hunt measures the syncer's work, not competition for the CPU.
    private = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.insecure_channel(address, private) for _ in range(asked.connections)]
    turn = itertools.cycle(channels)
    with ThreadPoolExecutor(len(kinds) * asked.threads) as pool:
        jobs = [
            pool.submit(Flood(toy, next(turn)).attack, kind, until_s) for kind in kinds for _ in range(asked.threads)
        ]
    for channel in channels:
        channel.close()
    # This raises the error of a flood that broke down: the hunt must not continue with less.
    return sum((job.result() for job in jobs), Counter())


class Run:
    """The syncer and the flood, each in its own process, and the honest site."""

    def __init__(self, folder: Path, seed: int, alive: ExitStack) -> None:
        tokens, permissions = folder / "tokens.json", folder / "permissions.json"
        tokens.write_text(json.dumps({"sites": TOKENS}))
        tokens.chmod(0o600)
        permissions.write_text(json.dumps(GRANTS))
        outer = {"grace": "fixed", "grace_ns": 0, "quorum": 1}
        self.toy = Toy(
            folder=str(folder),
            seed=seed,
            inner_steps=INNER_STEPS,
            lock_step=True,
            outer=outer,
            shapes=(("w", (976, 256)),),
            snapshot_every=64,
            port=free_port(),
            tokens=str(tokens),
            permissions=str(permissions),
            token=TOKENS["honest"],
            client={"stall_s": 20.0, "control_timeout_s": 10.0},
        )
        self.syncer = alive.enter_context(Process("syncer", self.toy))
        self.address = str(self.syncer.log.wait_for("listening", 1, BOUND_S)[0]["address"])
        self.flooder = alive.enter_context(ProcessPoolExecutor(1, forkserver()))
        self.flooder.submit(os.getpid).result(BOUND_S)  # It is there before a period is measured.
        self.boundaries: list[float] = []
        """The times at which the honest site adopted a version, and so began a round."""
        self.site = alive.enter_context(SiteThread(self.toy, "honest", self.address, self._heard, step_s=STEP_S))
        self.site.log.wait_for("adopted", 1, BOUND_S)

    def _heard(self, what: str, fields: dict[str, object]) -> None:
        if what == "adopted":
            self.boundaries.append(time.monotonic())

    def spell(self, asked: Namespace, kinds: tuple[str, ...]) -> tuple[list[float], float, Counter[str]]:
        """Run one period, with these calls; return its complete rounds, the syncer's share of one core, and the
        answers."""
        until_s, counts = time.monotonic() + asked.seconds, Counter[str]()
        if kinds:
            job = self.flooder.submit(flooded, self.toy, self.address, kinds, until_s, asked)
        time.sleep(SETTLE_S)
        cpu_s, first = cpu_of(self.syncer.pid), len(self.boundaries)
        time.sleep(until_s - time.monotonic())
        share = (cpu_of(self.syncer.pid) - cpu_s) / (asked.seconds - SETTLE_S)
        instants = self.boundaries[first:]
        if kinds:
            counts = job.result(BOUND_S)
        assert self.syncer.wait(0) is None, self.syncer.errors
        return [later - earlier for earlier, later in itertools.pairwise(instants)], share, counts


def cpu_of(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measured(run: Run, hunt: Hunt, kinds: tuple[str, ...], asked: Namespace) -> dict[str, object]:
    rounds: dict[str, list[float]] = {"quiet": [], "flooded": []}
    shares: dict[str, list[float]] = {"quiet": [], "flooded": []}
    calls: Counter[str] = Counter()
    for period in ["quiet", "flooded"] * asked.turns:
        took, share, answers = run.spell(asked, kinds if period == "flooded" else ())
        rounds[period] += took
        shares[period].append(share)
        calls.update(answers)
    quiet, flooded = rounds.values()
    name = "+".join(kinds) if len(kinds) < len(KINDS) else "all"
    row: dict[str, object] = {"kinds": name, "rounds_quiet": len(quiet), "rounds_flooded": len(flooded)}
    row["flood_calls_per_s"] = round(calls.total() / asked.seconds / asked.turns, 1)
    row |= {f"syncer_cpu_{kind}": round(sum(each) / len(each), 3) for kind, each in shares.items()}
    row["calls"] = dict(sorted(calls.items()))
    again = ",".join(kinds)
    if min(len(quiet), len(flooded)) < ROUNDS_MIN:
        hunt.violated(f"{name}: {len(quiet)} quiet and {len(flooded)} flooded rounds are too few", kinds=again)
        return row
    for percent in (50, 95):
        before, after = percentile(quiet, percent), percentile(flooded, percent)
        row |= {f"p{percent}_quiet_s": round(before, 4), f"p{percent}_flooded_s": round(after, 4)}
        row[f"p{percent}_ratio"] = round(after / before, 3)
    rise = float(str(row["p50_ratio"])) - 1.0
    if rise > RISE_MAX:
        hunt.violated(f"{name}: the median round is {rise:.0%} longer", kinds=again)
    return row


@hunting(
    seconds=(10.0, "length of a period"),
    turns=(2, "quiet and flooded periods of each measurement"),
    kinds=("all", f"all (at once), each (one after the other) or some of {', '.join(KINDS)}"),
    threads=(2, "flooding threads of each kind"),
    connections=(4, "connections that they share"),
)
def main(hunt: Hunt, asked: Namespace) -> Counts:
    wanted = {"all": [tuple(KINDS)], "each": [(kind,) for kind in KINDS]}.get(
        asked.kinds, [tuple(asked.kinds.split(","))]
    )
    rows = []
    with ExitStack() as alive:
        run = Run(hunt.folder, asked.seed, alive)
        for kinds in wanted:
            rows.append(measured(run, hunt, kinds, asked))
            print(json.dumps(rows[-1]), flush=True)
    return {"rows": rows} if len(rows) > 1 else rows[0]
