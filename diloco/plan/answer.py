"""The answer of ``diloco plan``: as plain values, and as text."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from diloco.config.schema import RunConfig
from diloco.observe.plot import Axis, Line, Points, line_chart, standalone
from diloco.observe.text import count, size
from diloco.outer.optimizer import OUTER_KINDS
from diloco.plan import estimate
from diloco.plan.estimate import scaled
from diloco.plan.studies import expected
from diloco.syncer.options import state_bytes_max

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

    from diloco.plan.estimate import Found, Question


PARAMETERS = (10e9, 100e9, 1e12, 10e12, 100e12)
SITES = (2, 5, 10, 20, 50)
DAY_S = 86_400.0


def answer(question: Question) -> dict[str, Any]:
    """Return the whole answer; raise ``ValueError`` for an unknown codec or outer optimizer.

    A figure with a formula and a simulation is in ``name`` (simulated) and ``name_formula``.
    """
    size, star = estimate.sizes(question), estimate.star_of(question)
    loads = estimate.loads(question.sites, question.shards, size.up, size.down)
    # Over all links between sites; a site's own part of the syncer costs none.
    wan = (question.sites - (question.shards > 0)) * (size.up + size.down)
    goodputs, shares = expected(question), sorted({*estimate.SHARES, question.utilisation})
    ways = {"as asked": estimate.gbps_needed, "data parallel": estimate.data_parallel_gbps}
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
        # Each way at the busiest site: as asked, and with an all-reduce of gradients after every step instead.
        "gbps": [
            {"way": way, "share": share, **_both("gbps", find(question, share))}
            for way, find in ways.items()
            for share in shares
        ],
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
    """Return the syncer's memory in bytes, in all and per part, and the number of processes needed on machines of
    ``host_gb``; None: one fragment alone is too large."""
    if question.outer_kind not in OUTER_KINDS:
        raise ValueError(f"outer_kind is {question.outer_kind!r}: one of {', '.join(OUTER_KINDS)}")
    parts, room = max(1, question.shards), question.host_gb * 1e9
    held = [question.numels[part::parts] for part in range(parts)]
    each = [_bytes(question, numels) for numels in held]
    needed = None
    if _bytes(question, [max(question.numels)]) <= room:
        needed = 0
        for numels in held:  # Each process holds as many fragments of a part as fit.
            fits = max(many for many in range(1, len(numels) + 1) if _bytes(question, numels[:many]) <= room)
            needed += -(-len(numels) // fits)
    return {
        "syncer_bytes": sum(each),
        "syncer_parts": parts,
        "syncer_bytes_per_part": max(each),
        "syncers_needed": needed,
    }


def _bytes(question: Question, numels: Sequence[int]) -> int:
    return state_bytes_max(numels, question.outer_kind, question.codec_down, question.downlinks_kept)


def _advice(advice: Question | None) -> dict[str, Any] | None:
    """Return the settings of a run, by their configuration keys."""
    if advice is None:
        return None
    syncers = memory(advice)["syncers_needed"]
    usual = RunConfig()
    kept, most = advice.downlinks_kept, advice.sites
    return {
        **({"outer": "diloco"} if advice.waits else {"outer": "decoupled", "outer.adopt": "rebase"}),
        **({"outer.kind": advice.outer_kind} if advice.outer_kind != "nesterov" else {}),
        **({"outer.momentum": 0.0} if advice.outer_kind == "sgd" else {}),
        **({"outer.sites_max": most} if most > usual.outer.sites_max else {}),
        **({"cluster.syncer.downlinks_kept": kept} if kept != usual.cluster.syncer.downlinks_kept else {}),
        "outer.inner_steps": advice.inner_steps,
        "outer.num_fragments": advice.fragments,
        **({"outer.num_syncers": syncers} if syncers is not None and syncers > 1 else {}),
        **({"outer.lock_step": True} if advice.waits else {"site.overlap_steps": advice.overlap_steps}),
        "codec.up": advice.codec_up,
        "codec.down": advice.codec_down,
    }


def _both(name: str, found: Found) -> dict[str, float | None]:
    return {name: found.simulated, f"{name}_formula": found.formula}


# --- The answer of ``diloco plan`` as text ---------------------------------------------------------------------------

PLAIN_WIDTH = 120
SHOWN_SITES = (2, 10, 50)
PICTURE_SITES = tuple(range(1, 41))
WAYS = (
    ("site", "s0", "one site"),
    ("sharded", "s2", "a site with a part of the syncer"),
    ("central", "s1", "one syncer"),
)
LINEAR = (
    "Bytes grow linearly with the parameters on every link, and with the sites only on the link of a single syncer.\n"
    "A site's link carries the same for any number of sites, less than twice that where each has a part of the syncer."
)


def show(told: Mapping[str, Any]) -> None:
    """Print the whole answer."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    measured = [
        f"measured   {link['up_gbps']:g} Gbit/s up, {link['down_gbps']:g} down, {link['rtt_ms']:g} ms ({link['file']})"
        for link in told.get("measured", ())
    ]
    tables = (links(told), goodputs(told), scaling(told))
    for shown in (first_line(told), *measured, *round_lines(told), *tables, LINEAR, advice_line(told)):
        console.print(shown, soft_wrap=isinstance(shown, str), highlight=False)


def first_line(told: Mapping[str, Any]) -> str:
    """Return the result in one line."""
    asked, needed = told["asked"], told["gbps_for_utilisation"]
    up, down = min(asked["up_gbps"]), min(asked["down_gbps"] or asked["up_gbps"])
    need = "no link is fast enough" if needed is None else f"a site needs {_gbps_text(needed)} Gbit/s each way"
    return (
        f"{values(asked['parameters'])} parameters at {asked['sites']} sites: to train "
        f"{_percent(asked['utilisation'])} of the time {need}; {up:g} up and {down:g} down allow "
        f"{_percent(told['utilisation_on_links'])}"
    )


def round_lines(told: Mapping[str, Any]) -> list[str]:
    """Return lines on bytes, timing, memory and money."""
    asked, needed, syncers = told["asked"], told["inner_steps_needed"], told["syncers_needed"]
    up, down = (size(told[f"bytes_per_site_per_round_{way}"]) for way in ("up", "down"))
    busy_up, busy_down = (size(told[f"bytes_busiest_link_per_round_{way}"]) for way in ("up", "down"))
    bits = f"{told['bits_per_parameter_up']:.4g} and {told['bits_per_parameter_down']:.4g} bits a parameter"
    most = ", at most" if "+" in asked["codec_up"] + asked["codec_down"] else ""
    host = size(1e9 * asked["host_gb"])
    fits = f"a fragment alone does not fit into {host}" if syncers is None else f"{syncers} of {host} hold it"
    formula = "none" if told["inner_steps_needed_formula"] is None else f"{told['inner_steps_needed_formula']:,}"
    none = "no number of them is enough"
    steps = none if needed is None else f"these links need {needed:,} ({formula} by the formula)"
    return [
        f"a site     sends {up} and takes {down} a round ({bits}{most})",
        f"links      {busy_up} up and {busy_down} down at the busiest; {size(told['bytes_wan_per_round'])} over all, "
        f"${told['dollars_per_round']:,.2f} a round, ${told['dollars_per_day']:,.2f} a day",
        f"a round    {asked['inner_steps']} inner steps of {told['step_s']:.3g} s; {steps}",
        f"syncer     {size(told['syncer_bytes'])} of memory in {told['syncer_parts']} parts; {fits}; "
        f"merges take {_percent(told['merge_share_of_round'])} of its time",
    ]


def links(told: Mapping[str, Any]) -> Table:
    """Return the Gbit/s for shares of the time."""
    shares = sorted({each["share"] for each in told["gbps"]})
    table = _table("Gbit/s each way", *(_percent(share) for share in shares))
    for way in ("as asked", "data parallel"):
        cells = {each["share"]: each for each in told["gbps"] if each["way"] == way}
        for kind, name in (("formula", "gbps_formula"), ("simulated", "gbps")):
            table.add_row(f"{way}, {kind}", *(_gbps_text(cells[share][name]) for share in shares))
    return table


def goodputs(told: Mapping[str, Any]) -> Table:
    """Return the share of the time that is left where chips fail, and the share of updates that come in time."""
    table = _table("goodput", "formula", "simulated", "updates merged, formula", "simulated")
    for each in told["goodputs"]:
        found = "-" if each["goodput"] is None else _percent(each["goodput"])
        merged = [_percent(each[name]) if each["syncer"] else "-" for name in ("merged_formula", "merged")]
        table.add_row(each["layout"], _percent(each["goodput_formula"]), found, *merged)
    return table


def scaling(told: Mapping[str, Any]) -> Table:
    """Return the bytes through one link, by parameters and sites."""
    shown = [each for each in told["scaling"] if each["sites"] in SHOWN_SITES]
    one, part = (f"one syncer, {SHOWN_SITES[0]} sites", f"a part at each of {SHOWN_SITES[0]}")
    more = [str(sites) for sites in SHOWN_SITES[1:]]
    table = _table("bytes a round", "a site", one, *more, part, *more)
    for parameters in sorted({each["parameters"] for each in shown}):
        row = {each["sites"]: each for each in shown if each["parameters"] == parameters}
        central, sharded = ([size(row[sites][way]) for sites in SHOWN_SITES] for way in ("central", "sharded"))
        table.add_row(values(parameters), size(row[SHOWN_SITES[0]]["site"]), *central, *sharded)
    return table


def advice_line(told: Mapping[str, Any]) -> str:
    """Return the settings to type for a run."""
    asked, advice = told["asked"], told["advice"]
    share = _percent(asked["utilisation"])
    if advice is None:
        return f"{share} on these links: no settings that learn well are enough; use faster links or a smaller model"
    typed = (f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in advice.items())
    return f"{share} on these links: {' '.join(typed)}"


def picture(question: Question) -> str:
    """Return an SVG file: a round's bytes in a link's busier direction by sites, for this model and 1 % of its size."""
    lines = []
    for parameters in (question.parameters, max(question.parameters / 100, question.fragments)):
        found = scaled(question, (parameters,), PICTURE_SITES)
        for way, style, words in WAYS:
            points: Points = [(each.sites, getattr(each, way)) for each in found if getattr(each, way)]
            lines.append(Line(f"{values(parameters)}: {words}", style, points))
    chart = line_chart(
        lines,
        Axis("sites", lambda sites: f"{sites:g}"),
        Axis("bytes of a round through one link", size, log=True),
        named=True,
    )
    return standalone(chart)


def values(parameters: float) -> str:
    """Return the count in the usual notation: 175B."""
    return count(parameters).replace("G", "B")


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    return table


def _gbps_text(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"


def _percent(share: float) -> str:
    """Return a percentage with three digits, and never 100 where something is missing."""
    text = f"{100 * share:.3g}"
    return f"{text} %" if float(text) < 100 or share >= 1 - 1e-9 else f"{100 * share:.2f} %"
