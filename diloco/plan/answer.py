"""The answer of ``diloco plan`` as plain values: bytes, links, timing, memory, money, goodput, and how they grow."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from diloco.config.schema import RunConfig
from diloco.outer.optimizer import OUTER_KINDS
from diloco.plan import estimate
from diloco.plan.studies import expected
from diloco.syncer.options import state_bytes_max

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.plan.estimate import Found, Question

PARAMETERS = (10e9, 100e9, 1e12, 10e12, 100e12)
SITES = (2, 5, 10, 20, 50)
DAY_S = 86_400.0


def answer(question: Question) -> dict[str, Any]:
    """Return the whole answer; ``ValueError`` for an unknown codec or outer optimizer.

    A figure with a formula and a simulation is in ``name`` (simulated) and ``name_formula``.
    """
    size, star = estimate.sizes(question), estimate.star_of(question)
    loads = estimate.loads(question.sites, question.shards, size.up, size.down)
    wan = estimate.wan_bytes(question, size)
    goodputs = expected(question)
    (asked,) = (each for each in goodputs if each.syncer == question.syncer)
    return {
        "asked": asdict(question),
        "step_s": question.inner_step_s,
        "round_s": star.period_s,
        "bits_per_parameter_up": 8 * size.up / sum(question.numels),
        "bits_per_parameter_down": 8 * size.down / sum(question.numels),
        "bytes_per_site_per_round_up": size.up,
        "bytes_per_site_per_round_down": size.down,
        "bytes_busiest_link_per_round_up": round(max(load.up for load in loads)),
        "bytes_busiest_link_per_round_down": round(max(load.down for load in loads)),
        "bytes_wan_per_round": wan,
        **_both("gbps_for_utilisation", estimate.gbps_needed(question, question.utilisation)),
        **_both("utilisation_on_links", estimate.utilisation_found(question)),
        **_both("inner_steps_needed", estimate.inner_steps_needed(question)),
        "gbps": _gbps(question),
        "advice": _advice(estimate.advised(question)),
        **memory(question),
        "merge_s": star.merge_s,
        "merge_share_of_round": estimate.merging_share(question),
        "dollars_per_round": wan / 1e9 * question.dollars_per_gb,
        "dollars_per_day": wan / 1e9 * question.dollars_per_gb * DAY_S / star.period_s,
        "goodput": asked.goodput_formula if asked.goodput is None else asked.goodput,
        "goodput_formula": asked.goodput_formula,
        "goodputs": [asdict(each) for each in goodputs],
        "scaling": [asdict(each) for each in estimate.scaled(question, PARAMETERS, SITES)],
    }


def memory(question: Question) -> dict[str, Any]:
    """Return the syncer's bytes, also of each part, and how many processes it takes on machines of ``host_gb``; None: a
    fragment alone is too large for one."""
    if question.outer_kind not in OUTER_KINDS:
        raise ValueError(f"outer_kind is {question.outer_kind!r}: one of {', '.join(OUTER_KINDS)}")
    parts = max(1, question.shards)
    held = [question.numels[part::parts] for part in range(parts)]
    each = [_bytes(question, numels) for numels in held]
    return {
        "syncer_bytes": sum(each),
        "syncer_parts": parts,
        "syncer_bytes_per_part": max(each),
        "syncers_needed": _syncers(question, held),
    }


def _bytes(question: Question, numels: Sequence[int]) -> int:
    return state_bytes_max(numels, question.outer_kind, question.codec_down, question.downlinks_kept)


def _syncers(question: Question, held: Sequence[Sequence[int]]) -> int | None:
    """Return how many processes hold all parts, each as many fragments as fit; None: a fragment alone does not fit."""
    room = question.host_gb * 1e9
    if _bytes(question, [max(question.numels)]) > room:
        return None
    count = 0
    for numels in held:
        fits = max(many for many in range(1, len(numels) + 1) if _bytes(question, numels[:many]) <= room)
        count += -(-len(numels) // fits)
    return count


def _gbps(question: Question) -> list[dict[str, Any]]:
    """Return Gbit/s each way at the busiest site, for shares of the time spent training: with the timing in question,
    and with an all-reduce of gradients after every step instead."""
    shares = sorted({*estimate.SHARES, question.utilisation})
    ways = {"as asked": estimate.gbps_needed, "data parallel": estimate.data_parallel_gbps}
    return [
        {"way": way, "share": share, **_both("gbps", find(question, share))}
        for way, find in ways.items()
        for share in shares
    ]


def _advice(advice: Question | None) -> dict[str, Any] | None:
    """Return the settings of a run, by their configuration keys."""
    if advice is None:
        return None
    waits, syncers = advice.overlap_steps == 0, memory(advice)["syncers_needed"]
    usual = RunConfig()
    kept, most = advice.downlinks_kept, advice.sites
    return {
        **({"outer": "diloco"} if waits else {"outer": "decoupled", "outer.adopt": "rebase"}),
        **({"outer.kind": advice.outer_kind} if advice.outer_kind != "nesterov" else {}),
        **({"outer.momentum": 0.0} if advice.outer_kind == "sgd" else {}),
        **({"outer.sites_max": most} if most > usual.outer.sites_max else {}),
        **({"cluster.syncer.downlinks_kept": kept} if kept != usual.cluster.syncer.downlinks_kept else {}),
        "outer.inner_steps": advice.inner_steps,
        "outer.num_fragments": advice.fragments,
        **({"outer.num_syncers": syncers} if syncers is not None and syncers > 1 else {}),
        **({"outer.lock_step": True} if waits else {"site.overlap_steps": advice.overlap_steps}),
        "codec.up": advice.codec_up,
        "codec.down": advice.codec_down,
    }


def _both(name: str, found: Found) -> dict[str, float | None]:
    return {name: found.simulated, f"{name}_formula": found.formula}
