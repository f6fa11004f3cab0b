"""The outer step as numbers: read the payloads, merge, step, encode the down-link.

A pure function of the contributions, the fragment's values and the options, so that a replay of the journal gives the
same bits (DESIGN invariant 11).  It goes by ranges of the fragment, on as many threads as are given, and each range
takes its part of every payload from the disk: memory is the new version (its tensors and its down-link), for each
thread a few ranges, and of each site's payload what the ranges of that moment need.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TYPE_CHECKING

from diloco.codec.contract import NonFiniteError
from diloco.codec.digests import digest_of
from diloco.codec.fused import State, outer_pass
from diloco.codec.merging import Merging
from diloco.codec.registry import make_codec
from diloco.sync.effects import TakeVersion
from diloco.syncer.snapshots import FragmentValues
from diloco.syncer.taking import taken

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from diloco.codec.buffers import Buffers
    from diloco.codec.contract import Codec
    from diloco.codec.fused import Payload, Ranges, Spread
    from diloco.outer.rule import OuterRule
    from diloco.sync.effects import StartOuterStep, UpdateRef
    from diloco.syncer.payloads import Mapped
    from diloco.syncer.spool import Spool


@dataclass(frozen=True, slots=True)
class Downlink:
    """What takes those who hold the version before to ``version``; ``digest`` is that of the values they then hold."""

    version: int
    digest: str
    payload: bytes | memoryview


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that the stages of an outer step took.

    ``read_s`` is for finding the payloads on the disk to be what was acknowledged, and unpacking them, ``fused_s`` for
    the one pass that decodes, merges, steps and encodes, and beside it makes the digest of what is published,
    ``digest_s`` for that of the down-link.
    """

    read_s: float = 0.0
    fused_s: float = 0.0
    digest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class OuterResult:
    """The candidate for a new version: its ``values`` and the encoded ``downlink`` from the version before.

    ``norm`` is that of the merged pseudo-gradient, ``seconds`` the time it all took.
    """

    values: FragmentValues
    downlink: bytes | memoryview
    downlink_digest: str
    norm: float
    seconds: float
    costs: Costs = Costs()

    def link(self) -> Downlink:
        """The down-link without the values, which are large and are held elsewhere."""
        return Downlink(self.values.version, self.values.digest, self.downlink)


def run_outer_step(
    command: StartOuterStep | TakeVersion,
    values: FragmentValues,
    spool: Spool,
    rule: OuterRule,
    down_codec: str,
    like: str = "",
    threads: int = 1,
    buffers: Buffers | None = None,
) -> OuterResult | None:
    """Carry out ``command`` on ``values``; None when the result is not finite, and then nothing has happened.

    The digests of the result are in the form of ``like``.  No bit depends on the number of ``threads``.
    ``buffers`` has memory for the version.
    """
    assert command.version == values.version + 1, (command.version, values.version)
    if isinstance(command, TakeVersion):
        made = taken(command, values, spool, down_codec, like)
        return made and OuterResult(made[0], made[1], digest_of(made[1], like), 0.0, made[2])
    times = [time.perf_counter()]
    before = State(values.theta, values.published, values.optimizer)
    staleness = [values.version - part.base_version for part in command.contributions]
    merging = Merging.of(rule, command.fragment, staleness)
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(threads, "fold")) if threads > 1 else None
        contributions, payloads = _opened(command, spool, before.theta.numel(), pool)
        times.append(time.perf_counter())
        spread, down = _spread(payloads, pool, stack), make_codec(down_codec)
        try:
            stepped = outer_pass(
                contributions,
                before,
                rule.optimizer,
                down,
                spread,
                buffers=buffers,
                like=like,
                merging=merging,
                share=command.share,
            )
        except NonFiniteError:
            return None  # Of Θ itself, or because Θ and Θ̂ are too far apart for fp32.
    times.append(time.perf_counter())
    new, downlink_digest = stepped.state, digest_of(stepped.payload, like)
    times.append(time.perf_counter())
    return OuterResult(
        FragmentValues(
            command.version, new.theta, new.published, new.optimizer, stepped.digest, reference=values.reference
        ),
        stepped.payload,
        downlink_digest,
        stepped.norm,
        times[-1] - times[0],
        Costs(*(later - sooner for sooner, later in pairwise(times))),
    )


def _opened(
    command: StartOuterStep, spool: Spool, numel: int, pool: ThreadPoolExecutor | None
) -> tuple[list[tuple[float, list[Payload]]], list[Mapped]]:
    """The contributions as ``outer_pass`` takes them, each update found to be what was acknowledged; several at once
    where there is a ``pool``."""

    def found(update: UpdateRef) -> tuple[Codec, Mapped]:
        return spool.opened(update.payload, update.digest, make_codec(update.encoding), numel)

    updates = [update for part in command.contributions for update in part.updates]
    here = list(map(found, updates) if pool is None else pool.map(found, updates))
    payloads: Iterator[Payload] = ((codec, mapped.payload) for codec, mapped in here)
    contributions = [(part.weight, list(islice(payloads, len(part.updates)))) for part in command.contributions]
    return contributions, [mapped for _, mapped in here]


def _spread(payloads: list[Mapped], pool: ThreadPoolExecutor | None, stack: ExitStack) -> Spread:
    """Ranges in turn, or by the threads of ``pool`` until ``stack`` ends; after some the payloads are let go of."""

    def spread(work: Callable[[Ranges], list[float]], ranges: Iterable[Ranges]) -> Iterable[list[float]]:
        def some(bounds: Ranges) -> list[float]:
            done = work(bounds)
            for payload in payloads:
                payload.let_go()
            return done

        if pool is None:
            return map(some, ranges)
        stack.callback(pool.shutdown, cancel_futures=True)  # The other ranges of one that is not finite are not made.
        return pool.map(some, ranges)

    return spread
