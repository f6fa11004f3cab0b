"""The outer step's arithmetic: read the payloads, merge, step, encode the down-link; and its events.

The step is a pure function of the contributions, the fragment's values and the options, so that a replay of the journal
gives the same bits (DESIGN invariant 11). It works on ranges of the fragment, on as many threads as are given, and each
range reads its part of every payload from the disk. Memory holds the new version (its tensors and its down-link), for
each thread a few ranges, and of each site's payload what the present ranges need.

A region. ``taken`` makes a region's version from a version of the syncer above, without any update.

Events. The ``*_facts`` return the contents of the syncer's events: plain values for ``events.jsonl`` and the view.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

from diloco.codec.base import NonFiniteError, digest, digest_of
from diloco.codec.merging import State, outer_pass
from diloco.codec.registry import LOSSLESS, make_codec
from diloco.codec.site_pass import publish
from diloco.outer.optimizer import AVERAGE
from diloco.outer.pseudo_gradient import blend, is_finite
from diloco.sync.effects import StartOuterStep, TakeVersion
from diloco.sync.state import Phase
from diloco.syncer.snapshots import FragmentValues

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from diloco.codec.base import Buffers, Codec
    from diloco.codec.merging import Payload
    from diloco.outer.optimizer import OuterRule
    from diloco.sync.effects import UpdateRef
    from diloco.sync.state import OuterState
    from diloco.sync.syncer import OuterSync
    from diloco.syncer.spool import Mapped, Spool


@dataclass(frozen=True, slots=True)
class OuterResult:
    """The candidate for a new version: its ``values`` and the encoded ``downlink`` from the version before.

    ``norm`` is that of the merged pseudo-gradient, ``seconds`` the total time. Its stages: ``read_s``: verify the
    payloads on the disk against the acknowledged digests, and unpack them. ``fused_s``: the one pass that decodes,
    merges, steps and encodes, and computes the digest of what is published. ``digest_s``: the down-link's digest.
    """

    values: FragmentValues
    downlink: bytes | memoryview
    downlink_digest: str
    norm: float
    seconds: float
    read_s: float = 0.0
    fused_s: float = 0.0
    digest_s: float = 0.0


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
    """Carry out ``command`` on ``values``; return None, without any change, when the result is not finite.

    The digests of the result are in the form of ``like``. No bit depends on the number of ``threads``.
    """
    assert command.version == values.version + 1, (command.version, values.version)
    if isinstance(command, TakeVersion):
        return taken(command, values, spool, down_codec, like)
    times = [time.perf_counter()]
    theta, is_averaged = values.theta, command.fragment in rule.averaged
    if is_averaged:  # The updates are negated values.  What this round lacks of a full one stays of the version before.
        rule, down_codec, theta = AVERAGE, LOSSLESS, theta * (1 - command.share)
    staleness = [values.version - part.base_version for part in command.contributions]
    merging = rule.merging(command.fragment, staleness)
    with ExitStack() as stack:
        parallel: Callable[..., Iterable[Any]] = map
        if threads > 1:
            pool = ThreadPoolExecutor(threads, "fold")
            stack.callback(pool.shutdown, cancel_futures=True)  # After a failed task the others are cancelled.
            parallel = pool.map
        contributions, payloads = _opened(command, spool, values.theta.numel(), parallel, latest_only=is_averaged)
        times.append(time.perf_counter())

        def spread(work: Callable[[Any], Any], ranges: Iterable[Any]) -> Iterable[Any]:
            def some(bounds: Any) -> Any:
                done = work(bounds)
                for payload in payloads:
                    payload.let_go()
                return done

            return parallel(some, ranges)

        try:
            stepped = outer_pass(
                contributions,
                State(theta, values.published, values.optimizer),
                rule.optimizer,
                make_codec(down_codec),
                spread,
                buffers=buffers,
                like=like,
                merging=merging,
                share=command.share,
            )
        except NonFiniteError:
            return None  # Θ is not finite, or Θ and Θ̂ are too far apart for fp32.
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
        *(later - sooner for sooner, later in pairwise(times)),
    )


def _opened(
    command: StartOuterStep, spool: Spool, numel: int, parallel: Callable[..., Iterable[Any]], *, latest_only: bool
) -> tuple[list[tuple[float, list[Payload]]], list[Mapped]]:
    """Return the contributions for ``outer_pass``, each update verified against its acknowledged digest.

    With ``latest_only`` a site's last update replaces those before it.
    """
    sites = [(part.weight, part.updates[-1:] if latest_only else part.updates) for part in command.contributions]

    def verified(update: UpdateRef) -> tuple[Codec, Mapped]:
        return spool.opened(update.payload, update.digest, make_codec(update.encoding), numel)

    opened: list[tuple[Codec, Mapped]] = list(parallel(verified, [each for _, updates in sites for each in updates]))
    payloads: Iterator[Payload] = ((codec, mapped.payload) for codec, mapped in opened)
    contributions = [(weight, list(islice(payloads, len(updates)))) for weight, updates in sites]
    return contributions, [mapped for _, mapped in opened]


def taken(command: TakeVersion, values: FragmentValues, spool: Spool, down_codec: str, like: str) -> OuterResult | None:
    """Return a region's version and its down-link; None when the values would not be finite.

    ``theta <- (1 - share) theta + share above`` (HALoS, arXiv 2506.04531), by ``outer.pseudo_gradient.blend``. The
    outer optimizer's state stays as it is. Like an outer step it is a pure function of its arguments, to the bit.
    """
    began, numel = time.perf_counter(), values.theta.numel()
    codec, mapped = spool.opened(command.payload, command.digest, make_codec(LOSSLESS), numel)
    theta = blend(values.theta, codec.decode(mapped.payload, numel), 1 - command.share)
    down = make_codec(down_codec)
    try:
        payload, published = publish(theta, values.published, down)
    except NonFiniteError:
        return None
    if down.lossless:
        published = theta
    if not is_finite(published):
        return None
    made = replace(
        values,
        version=command.version,
        theta=theta,
        published=published,
        digest=digest(published, like),
        reference=theta,
    )
    return OuterResult(made, payload, digest_of(payload, like), 0.0, time.perf_counter() - began)


def start_facts(machine: OuterSync) -> dict[str, object]:
    """Return the start event's contents, with the ``ending`` of a run that is over."""
    state = machine.state
    versions = [fragment.version for fragment in state.fragments]
    over = {"ending": state.ending.value} if state.phase is Phase.ENDED and state.ending is not None else {}
    # Summed over all fragments, as in ``merged_into``: consumers of the events count on from this.
    merged = {name: sum(line.tokens_merged for line in site.lines) for name, site in sorted(state.sites.items())}
    return {"epoch": state.epoch, "versions": versions, "tokens_merged": merged, **over}


def outer_step_facts(
    command: StartOuterStep | TakeVersion, result: OuterResult, stages: Mapping[str, object]
) -> dict[str, object]:
    """Return a version's sites with their weights and staleness, its share of a full step, and its costs.

    For a site with several contributions: their total weight, and the staleness of the oldest.
    """
    weights: dict[str, float] = {}
    staleness: dict[str, int] = {}
    for part in command.contributions:
        weights[part.site] = weights.get(part.site, 0.0) + part.weight
        staleness[part.site] = max(staleness.get(part.site, 0), command.version - 1 - part.base_version)
    return {
        "fragment": command.fragment,
        "version": command.version,
        "sites": {site: round(weight, 6) for site, weight in weights.items()},
        "staleness": staleness,
        **({"share": round(command.share, 6)} if isinstance(command, StartOuterStep) else {}),
        "norm": result.norm,
        "seconds": round(result.seconds, 6),
        **stages,
    }


def merged_into(state: OuterState, fragment: int, version: int) -> dict[str, tuple[int, int]]:
    """Return each site's tokens and updates that a recent version holds and the one before it did not."""
    fates = {name: site.lines[fragment].fates for name, site in sorted(state.sites.items())}
    tokens = {name: [f.tokens for f in each if f.merged and f.version == version] for name, each in fates.items()}
    return {name: (sum(each), len(each)) for name, each in tokens.items() if each}
