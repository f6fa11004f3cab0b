"""How much memory does a syncer take for a billion parameters, and how long does a round of all fragments take?

A real syncer process, and stand-in sites that run the real client over real gRPC: each makes its updates fragment by
fragment from a seed, a block of values at a time, encodes them, pushes them, waits for the version and pulls its
down-link.  No site holds a model.  The plain functions compute the first values of every fragment from version 0 on,
and the pulled values are compared with them.

The peak is the kernel's VmHWM, from the start of the process, version 0 and its snapshot included.  The bound is 1.25
times the state (fp32 parameters, momentum, published values) plus 1 GiB.  Everything shares one machine, so the times
include the load of the sites.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.record import finish, parser_of, percentile, record
from benchmarks.rounds import OPTIMIZER, OUTER, answer, started
from diloco.codec.base import Hasher, bytes_of, digest_of
from diloco.codec.registry import make_codec
from diloco.codec.site_pass import publish
from diloco.outer.fragments import Layout, plan_layout
from diloco.outer.merge import merge_mean
from diloco.outer.optimizer import NOTHING, OuterRule, outer_step
from diloco.runs.process import limit_arenas
from diloco.sync.events import Outcome
from diloco.sync.options import PROTOCOL, Agreement, OuterOptions
from diloco.syncer.options import RunPlan, SyncerOptions
from diloco.syncer.server import Syncer
from diloco.wire.client import SyncClient
from diloco.wire.messages import JoinAsk, PullAsk, PushHeader
from diloco.wire.options import ClientOptions, SecurityOptions, ServerOptions
from diloco.wire.pulling import PullSink

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from torch import Tensor

RUN = "billion"
BLOCK = 1 << 20
"""Values that a site generates at a time."""
FOLLOWED = 4096
"""The first values of every fragment, which are checked; whole blocks of every codec here."""
BOUND_S = 1800.0
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Work:
    """The settings that all processes of one case share."""

    numel: int
    fragments: int
    sites: int
    rounds: int
    codec: str
    seed: int

    def layout(self) -> Layout:
        """Return a layout of two equal parameters in each fragment."""
        size = self.numel // (2 * self.fragments)
        return plan_layout(tuple((f"w{index:03d}", (size,)) for index in range(2 * self.fragments)), self.fragments)

    def block(self, what: str, fragment: int, start: int, count: int, scale: float) -> Tensor:
        """Return ``count`` values from ``start`` on, drawn from the seed."""
        seed = int.from_bytes(digest_of(f"{self.seed} {what} {fragment} {start}".encode(), "0" * 64)[:12].encode())
        return torch.randn(count, generator=torch.Generator().manual_seed(seed % (1 << 62))).mul_(scale)

    def version_zero(self, fragment: int, numel: int) -> Tensor:
        """Return the fragment's version 0."""
        values = torch.empty(numel)
        for start in range(0, numel, BLOCK):
            count = min(BLOCK, numel - start)
            values[start : start + count] = self.block("zero", fragment, start, count, 0.02)
        return values

    def plan(self) -> RunPlan:
        """Return the run's plan: a round closes when every site's update has arrived."""
        layout = self.layout()
        outer = OuterOptions(
            num_fragments=self.fragments, quorum=self.sites, quorum_min=self.sites, sites_max=self.sites
        )
        agreement = Agreement(PROTOCOL, RUN, 1, layout.fingerprint, {})
        return RunPlan(agreement, layout, "shared", outer, OuterRule(OUTER))


class Expected:
    """Computes the first values of every fragment with the plain functions."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._codec = make_codec(work.codec)
        zero = [work.block("zero", fragment, 0, BLOCK, 0.02)[:FOLLOWED] for fragment in range(work.fragments)]
        self._theta, self._published = list(zero), list(zero)
        self._states = [NOTHING] * work.fragments

    def follow(self, fragment: int, version: int, payload: memoryview, numel: int) -> bool:
        """Return whether the down-link of ``version`` is right; call it once for each version, in order."""
        work, codec = self._work, self._codec
        updates = [
            codec.decode(
                codec.encode(work.block(f"site-{site} {version}", fragment, 0, BLOCK, 1e-3)[:FOLLOWED]), FOLLOWED
            )
            for site in range(work.sites)
        ]
        merged = merge_mean([(1.0, [update]) for update in updates])
        theta, self._states[fragment] = outer_step(self._theta[fragment], merged, self._states[fragment], OUTER)
        _, published = publish(theta, self._published[fragment], codec)
        told = torch.empty(FOLLOWED)
        codec.plain.decode_into(payload, numel, told)
        found = told if codec.lossless else told.add_(self._published[fragment])
        self._theta[fragment], self._published[fragment] = theta, published
        return torch.equal(found, published)

    def holds(self, fragment: int, whole: memoryview) -> bool:
        """Return whether the published values of a fragment begin with the right values."""
        return whole[: 4 * FOLLOWED] == bytes_of(self._published[fragment])


def run_syncer(work: Work, folder: str, pipe: Connection) -> None:
    """Run the syncer in its own process, until it is told to stop."""
    limit_arenas()
    torch.set_num_threads(1)
    events: list[dict[str, Any]] = []

    def emit(what: str, fields: dict[str, object]) -> None:
        if what in ("syncer_started", "outer_step", "published", "failed"):
            events.append({"what": what, "at_s": time.monotonic(), **fields})

    plan = work.plan()
    options = SyncerOptions(
        folder=folder, up_codecs=[work.codec], down_codec=work.codec, snapshot_every=1 << 30, retain_steps=0
    )
    network = ServerOptions(run_id=RUN, sites_max=work.sites)
    began_s = time.monotonic()
    syncer = Syncer(
        options,
        plan,
        lambda: [work.version_zero(each.index, each.numel) for each in plan.layout.fragments],
        network,
        SecurityOptions(),
        emit,
    )
    pipe.send({"address": syncer.start(), "start_s": time.monotonic() - began_s, "at_start": memory(os.getpid())})
    pipe.recv()
    pipe.send({"events": events, "memory": memory(os.getpid()), "failed": repr(syncer.failed)})
    os._exit(0)  # A stop would write one more snapshot.


def memory(pid: int) -> dict[str, int]:
    """Return the memory in bytes, by the kernel's names: the present and the peak."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text("utf-8").splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[0] in ("VmRSS:", "VmHWM:")}


def update_of(work: Work, site: int, version: int, fragment: int, numel: int) -> tuple[memoryview, str]:
    """Return a payload and the digest of its values, of which only one block at a time is in memory."""
    codec, values_digest = make_codec(work.codec).plain, Hasher()
    assert BLOCK % codec.block == 0, f"{work.codec} cannot be cut every {BLOCK} values"
    payload = torch.empty(codec.payload_bytes_max(numel), dtype=torch.uint8)
    for start in range(0, numel, BLOCK):
        values = work.block(f"site-{site} {version}", fragment, start, min(BLOCK, numel - start), 1e-3)
        codec.encode_into((values,), payload, values, start=start, numel=numel)
        values_digest.update(bytes_of(values))
    return bytes_of(payload), values_digest.text()


def run_site(work: Work, site: int, address: str, pipe: Connection) -> None:
    """Run a site in its own process: every round of every fragment."""
    torch.set_num_threads(1)
    name, layout = f"site-{site}", work.layout()
    expected, rounds, right = Expected(work), [], 0
    with SyncClient(address, name, RUN, options=ClientOptions(answer_s=BOUND_S, stall_s=120.0)) as client:
        ask = JoinAsk(PROTOCOL, RUN, 0, name, f"{site:08d}", layout.fingerprint, b"", {})
        incarnation = client.join(ask).incarnation
        for version in range(1, work.rounds + 1):
            began_s = time.monotonic()
            for each in layout.fragments:
                payload, values_digest = update_of(work, site, version, each.index, each.numel)
                here = (RUN, name, incarnation, each.index, version, version - 1, 1000, 10, 1_000_000, 10 * version)
                size = len(payload)
                header = PushHeader(
                    *here, False, work.codec, size, each.numel, digest_of(payload), values_digest=values_digest
                )
                result = client.push(header, payload)
                assert result.outcome is Outcome.ACCEPTED, result
            for each in layout.fragments:
                pulled = pull(client, name, each.index, version)
                right += expected.follow(each.index, version, pulled, each.numel)
            rounds.append((began_s, time.monotonic()))
        last = PullAsk(RUN, name, site % work.fragments, -1)  # Each site checks another fragment as a whole.
        if not expected.holds(last.fragment, client.pull(last, PullSink()).parts[0]):
            raise ValueError(f"fragment {last.fragment} is published with wrong values")
    pipe.send({"rounds": rounds, "right": right, "memory": memory(os.getpid())})


def pull(client: SyncClient, site: str, fragment: int, version: int) -> memoryview:
    """Pull the down-link to ``version`` as soon as it exists."""
    until_s = time.monotonic() + BOUND_S
    while time.monotonic() < until_s:
        pulled = client.pull(PullAsk(RUN, site, fragment, version - 1), PullSink())
        if pulled.parts:
            assert pulled.header.version == version, pulled.header
            return pulled.parts[0]
        time.sleep(0.05)
    raise TimeoutError(f"no version {version} of fragment {fragment} in {BOUND_S} s")


def measure(work: Work, folder: Path) -> dict[str, Any]:
    """Run one case and return its row."""
    told: list[dict[str, Any]] = []
    with ExitStack() as stack:
        syncer = started(stack, run_syncer, work, str(folder))
        begun = answer(syncer, BOUND_S)
        for site in [started(stack, run_site, work, site, begun["address"]) for site in range(work.sites)]:
            with suppress(EOFError, TimeoutError):
                told.append(answer(site, BOUND_S))
        syncer.send("stop")
        ended = answer(syncer, BOUND_S)
    if len(told) != work.sites:
        raise ValueError(f"{len(told)} of {work.sites} sites finished: {ended['failed']}")
    return row(work, begun, ended, told)


def row(work: Work, begun: dict[str, Any], ended: dict[str, Any], told: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row; raise ``ValueError`` where the sites received wrong values."""
    wanted = work.rounds * work.fragments
    if any(site["right"] != wanted for site in told):
        raise ValueError(f"of {wanted} down-links {[site['right'] for site in told]} were right")
    steps = [event for event in ended["events"] if event["what"] == "outer_step"]
    made = [event for event in ended["events"] if event["what"] == "published"]
    numel = work.layout().numel
    copies = 2 + (not make_codec(work.codec).lossless)
    state = 4 * copies * numel
    bound = int(1.25 * 4 * 3 * numel) + GIB
    rounds = [
        max(site["rounds"][n][1] for site in told) - min(site["rounds"][n][0] for site in told)
        for n in range(work.rounds)
    ]
    stages = {
        f"{name}_p50": percentile([event[name] for event in events], 50)
        for events, names in ((steps, ("receive_s", "read_s", "fused_s", "digest_s")), (made, ("publish_s",)))
        for name in names
    }
    peak = ended["memory"]["VmHWM"]
    stated = next(event["memory_bytes_max"] for event in ended["events"] if event["what"] == "syncer_started")
    return {
        "numel": numel,
        "fragments": work.fragments,
        "sites": work.sites,
        "rounds": work.rounds,
        "codec": work.codec,
        "peak_rss_bytes": peak,
        "bound_bytes": bound,
        "peak_over_bound": peak / bound,
        "peak_over_state": peak / state,
        "state_bytes": state,
        "stated_bytes_max": stated,
        "rss_at_start_bytes": begun["at_start"]["VmRSS"],
        "peak_at_start_bytes": begun["at_start"]["VmHWM"],
        "site_peak_rss_bytes": max(site["memory"]["VmHWM"] for site in told),
        "start_s": begun["start_s"],
        "round_s_p50": percentile(rounds, 50),
        "round_s_p95": percentile(rounds, 95),
        **stages,
        "outer_step_s_p50": percentile([event["seconds"] for event in steps], 50),
        "downlinks_checked": wanted * work.sites,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--numel", type=int, default=1_000_000_000)
    parser.add_argument("--fragments", type=int, default=16)
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--codec", default="int4:32", help="codec of both directions")
    parser.add_argument("--folder", help="the syncer's data folder: it needs 4 + 8 bytes for each value")
    options = parser.parse_args()
    numel = 4_000_000 if options.quick else options.numel
    work = Work(
        numel=numel,
        fragments=options.fragments,
        sites=options.sites,
        rounds=options.rounds,
        codec=options.codec,
        seed=options.seed,
    )
    with tempfile.TemporaryDirectory(prefix="billion-", dir=options.folder) as folder:
        found = measure(work, Path(folder) / "syncer")
    print(json.dumps(found), flush=True)
    config = {"optimizer": OPTIMIZER, "block": BLOCK, "followed": FOLLOWED}
    result = record("billion", config, [found], options.seed, repeats=options.rounds)
    finish(
        {**result, **{name: found[name] for name in ("peak_rss_bytes", "bound_bytes", "peak_over_bound")}},
        save=options.save,
    )


if __name__ == "__main__":
    main()
