"""``summary.json``: the result of a run, as an interface that scripts can rely on.

``SCHEMA`` is the interface, ``complaints`` checks any object against it, ``summarize`` makes one from a ``RunHistory``
and the syncer's last status.  Pure but for ``write_summary``.

How two of the figures are computed.  ``wire.bytes_fp32_equivalent`` is four bytes for each value of each accepted
update and each fetched version, without joins, so compare it with ``bytes_up + bytes_down - bytes_joins``: joins carry
whole fragments in fp32, whatever the codec, to a site that holds none or is too far behind.
``wire.bytes_data_parallel_equivalent`` is ``RunHistory.bytes_data_parallel``: inner steps of all sites x 2(N-1)/N x 4
bytes x parameters.

A site's ``products`` is the number format of its matrix products, "bf16" or "fp32"; "" where it reported none.

``units`` is where the units of the data are (``sync/data_units.py``); null where none are leased, and where the
syncer never answered.  leased = merged + partly + in_hand + given_back.
"""

from __future__ import annotations

import json
import math
import textwrap
from typing import TYPE_CHECKING, Any

from diloco.durable import write_file
from diloco.observe.text import clock, count, shortened, size, times_less, units_text, whole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from diloco.observe.history import RunHistory, SiteHistory


UNMOVED_SHARE = 0.8
"""A run without a new version for this share of its training time is not "ok"."""
LEDGER = ("merged", "refused", "in_flight", "unsent", "overwritten", "lost")

# A kind is a type's name, with "?" where null is allowed; "[kind]" is a list, "{kind}" a mapping with free names, and
# the name of another entry is that record.  Listed fields are required, and others are allowed.
SCHEMA: Mapping[str, Mapping[str, str]] = {
    "summary": {
        "status": "text",
        "config": "{any}",
        "seed": "whole",
        "versions": "[whole]",
        "global": "global",
        "sites": "{site}",
        "faults": "[fault]",
        "wire": "wire",
        "units": "units?",
        "wall_seconds": "number",
    },
    "global": {"val_loss_start": "number?", "val_loss": "number?", "val_bits_per_byte": "number?"},
    "site": {
        "inner_steps": "whole",
        "tokens_processed": "whole",
        **{f"tokens_{part}": "whole" for part in LEDGER},
        "updates_merged": "whole",
        "updates_merged_since_fault": "whole",
        "updates_refused": "{whole}",
        "bytes_up": "whole",
        "bytes_down": "whole",
        "train_seconds": "number",
        "tokens_per_second": "number",
        "products": "text",
        "stall_seconds": "number",
        "adopt_seconds": "number",
        "after_step_seconds_max": "number",
        "step_seconds": "step_seconds",
        "restarts": "whole",
    },
    "step_seconds": {"p50": "number", "p95": "number", "max": "number"},
    "units": dict.fromkeys(
        ("processed", "leased", "merged", "partly", "in_hand", "given_back", "reissued", "repeated", "sequences"),
        "whole",
    ),
    "fault": {"what": "text", "target": "text", "at_seconds": "number", "healed_seconds": "number?"},
    "wire": dict.fromkeys(
        ("bytes_up", "bytes_down", "bytes_joins", "bytes_fp32_equivalent", "bytes_data_parallel_equivalent"), "whole"
    ),
}

SINCE = frozenset({"summary.units", "site.tokens_per_second", "site.products"})
"""Fields added after the first release: a summary from before lacks them."""


def summarize(
    history: RunHistory,
    status: Mapping[str, Any] | None,
    config: Mapping[str, Any],
    wrong: Sequence[str] = (),
) -> dict[str, object]:
    """Return the summary of a run.

    ``status`` is the syncer's last Status (its counts of merged tokens and updates are final), None where it never
    answered: then published versions are counted.  ``config`` is the resolved configuration as plain values.  ``wrong``
    are errors that the history does not show; with those found here they become the summary's status.
    """
    said, sites = (status or {}).get("sites", {}), {}
    for name, site in sorted(history.sites.items()):
        heard = {"tokens_merged": history.tokens_merged(name)} | said.get(name, {})
        sites[name] = _site(site, heard, history)
    evals = history.evaluations
    found = [*wrong, *_what_is_wrong(history, sites)]
    return {
        "status": "; ".join(dict.fromkeys(found)) or "ok",
        "config": dict(config),
        "seed": int(config.get("run", {}).get("seed") or 0),
        "versions": list(history.versions),
        "global": {
            "val_loss_start": evals[0].val_loss if evals and not any(evals[0].versions) else None,
            "val_loss": evals[-1].val_loss if evals else None,
            "val_bits_per_byte": evals[-1].val_bits_per_byte if evals else None,
        },
        "sites": sites,
        "faults": [
            {
                "what": fault.what,
                "target": fault.target,
                "at_seconds": round(fault.at_s, 3),
                "healed_seconds": None if fault.healed_s is None else round(fault.healed_s, 3),
            }
            for fault in history.faults
        ],
        "wire": {
            "bytes_up": sum(site.bytes_up for site in history.sites.values()),
            "bytes_down": sum(site.bytes_down for site in history.sites.values()),
            "bytes_joins": history.bytes_joins,
            "bytes_fp32_equivalent": history.bytes_fp32,
            "bytes_data_parallel_equivalent": history.bytes_data_parallel(),
        },
        "units": (status or {}).get("units"),
        "wall_seconds": round(history.seconds, 3),
    }


def _what_is_wrong(history: RunHistory, sites: Mapping[str, Mapping[str, Any]]) -> list[str]:
    found = []
    if history.ending == "drained":
        found.append("drained: the same command resumes it")
    elif history.whole_at:
        found.append(f"only this machine's part; the whole run is at its syncer, {history.whole_at}")
    elif history.ending is None:
        found.append("the run has not reached its end")
    elif history.by_hand and not history.evaluations:
        pass  # It was not evaluated; the report says how to.
    elif not history.evaluations or history.evaluations[-1].versions != history.versions:
        found.append("the final version was not evaluated")
    if history.trained_s and history.unmoved_s >= UNMOVED_SHARE * history.trained_s:
        why = max(history.standstills, key=lambda each: (each.end_s or history.seconds) - each.start_s).why
        found.append(f"no version was made for {history.unmoved_s:.0f} of {history.trained_s:.0f} s of training: {why}")
    for name, site in sites.items():
        parts = sum(site[f"tokens_{part}"] for part in LEDGER)
        if site["tokens_processed"] != parts:
            found.append(f"the tokens of {name} do not balance: {site['tokens_processed']} processed, {parts} found")
    return found


def _site(site: SiteHistory, heard: Mapping[str, Any], history: RunHistory) -> dict[str, object]:
    ledger = unfinished(site, heard, history) if site.left_with is None else settled(site.left_with, heard)
    train_s = site.meter("train_s")
    # Heartbeats count a site's tokens over all its processes, and its time in the present one.
    speed = site.tokens_per_s if site.reported else ledger["processed"] / (train_s or math.inf)
    return {
        "inner_steps": int(site.meter("inner_steps")),
        "tokens_processed": ledger["processed"],
        **{f"tokens_{part}": ledger[part] for part in LEDGER},
        "updates_merged": int(heard.get("updates_merged", site.merges)),
        "updates_merged_since_fault": site.merges_since_fault,
        "updates_refused": dict(heard.get("updates_refused", site.refused)),
        "bytes_up": site.bytes_up,
        "bytes_down": site.bytes_down,
        "train_seconds": round(train_s, 3),
        "tokens_per_second": round(speed, 1),
        "products": site.products,
        "stall_seconds": round(site.meter("stall_s"), 4),
        "adopt_seconds": round(site.meter("adopt_s"), 4),
        "after_step_seconds_max": round(site.meter_max("after_step_s_max"), 5),
        # Over several processes of a site: the mean of their percentiles, weighted by their steps.
        "step_seconds": {
            "p50": round(site.meter_by_steps("step_s_p50"), 5),
            "p95": round(site.meter_by_steps("step_s_p95"), 5),
            "max": round(site.meter_max("step_s_max"), 5),
        },
        "restarts": site.restarts,
    }


def settled(done: Mapping[str, int], heard: Mapping[str, object]) -> dict[str, int]:
    """Return the ledger that a site left with, plus what the syncer merged of its updates after that."""
    ledger = {name: int(done.get(name, 0)) for name in ("processed", *LEDGER)}
    late = min(max(whole(heard, "tokens_merged") - ledger["merged"], 0), ledger["in_flight"])
    ledger["merged"] += late
    ledger["in_flight"] -= late
    return ledger


def unfinished(site: SiteHistory, heard: Mapping[str, object], history: RunHistory) -> dict[str, int]:
    """Return the ledger of a site that reported none at its end.

    Tokens of unknown fate are lost; or in flight, where only the syncer, whose events are elsewhere, knows it.
    """
    merged = whole(heard, "tokens_merged")
    refused = site.tokens_discarded // history.num_fragments
    told = max(whole(heard, "tokens_processed"), whole(site.reported, "tokens_processed"))
    processed = max(int(site.meter("tokens")), told, merged + refused)
    rest = processed - merged - refused
    elsewhere = site.reported or (heard if whole(heard, "undecided") else {})
    ledger = dict.fromkeys(("processed", *LEDGER), 0) | {"processed": processed, "merged": merged, "refused": refused}
    for name in ("lost", "overwritten", "in_flight", "unsent") if site.reported else ("in_flight",):
        ledger[name] = min(rest, whole(elsewhere, f"tokens_{name}"))
        rest -= ledger[name]
    # The rest was refused where the site was heard to its end; otherwise its fate is unknown, or still to come.
    goes_on = history.by_hand and history.ending is None
    unknown = "in_flight" if history.whole_at or goes_on else "lost"
    ledger["refused" if site.reported and site.left else unknown] += rest
    return ledger


def complaints(value: object, kind: str = "summary", where: str = "summary") -> list[str]:
    """Return what is wrong with ``value`` as a ``kind`` of ``SCHEMA``; an empty list when it fits."""
    if kind.endswith("?"):
        return [] if value is None else complaints(value, kind[:-1], where)
    if kind.startswith("["):
        if not isinstance(value, list):
            return [f"{where} is no list"]
        return [text for index, item in enumerate(value) for text in complaints(item, kind[1:-1], f"{where}[{index}]")]
    if kind.startswith("{"):
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            return [f"{where} is no mapping"]
        return [text for name, item in value.items() for text in complaints(item, kind[1:-1], f"{where}.{name}")]
    if kind in SCHEMA:
        if not isinstance(value, dict):
            return [f"{where} is no record"]
        wanted = [name for name in SCHEMA[kind] if name not in value and f"{kind}.{name}" not in SINCE]
        missing = [f"{where}.{name} is missing" for name in wanted]
        known = [(name, inner) for name, inner in SCHEMA[kind].items() if name in value]
        return missing + [text for name, inner in known for text in complaints(value[name], inner, f"{where}.{name}")]
    fits = {
        "any": True,
        "text": isinstance(value, str),
        "whole": type(value) is int and value >= 0,
        "number": type(value) is int or (isinstance(value, float) and math.isfinite(value)),
    }[kind]
    return [] if fits else [f"{where} is {value!r}: not {kind}"]


def write_summary(path: Path, summary: Mapping[str, object]) -> None:
    """Check the summary, and write it whole or not at all."""
    wrong = complaints(summary)
    assert not wrong, f"summary.json breaks its own schema: {wrong}"
    write_file(path, (json.dumps(summary, indent=1, allow_nan=False) + "\n").encode())


# --- The summary printed at the end of ``diloco up`` and by ``diloco report``, at most ``WIDTH`` columns wide --------

WIDTH = 80
FAULTS_MAX = 12
FILES = ("summary.json", "report.html", "events.jsonl", "config.yaml", "logs/", "sites/", "syncer/")
STANDSTILLS_MAX = 3


def closing_lines(summary: Mapping[str, Any], history: RunHistory, run_dir: Path) -> list[str]:
    """Return the lines of the closing table: the loss reached, the sites' tokens, the faults, and the wire bytes."""
    status = f"{run_dir.name}: {summary['status']}, after {clock(summary['wall_seconds'])}"
    return [
        *textwrap.wrap(status, WIDTH, subsequent_indent="  "),
        *_reached(summary, history),
        "",
        *_sites(summary),
        *_block("speed", _speed(summary)),
        *_block("rounds", _standstills(history)),
        "",
        *_block("faults", _faults(summary)),
        *_block("wire", _wire(summary, history)),
        *_block("data", _wrapped(units_text(summary["units"])) if summary.get("units") else []),
        *_block("files", [f"{run_dir}/", " ".join(name for name in FILES if (run_dir / name).exists())]),
    ]


def _block(head: str, lines: Sequence[str]) -> list[str]:
    """Return the lines, with ``head`` in the margin of the first."""
    return [f"{'' if number else head:<8}{line}" for number, line in enumerate(lines)]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH - 8)


def _reached(summary: Mapping[str, Any], history: RunHistory) -> list[str]:
    reached = summary["global"]
    bits, start, loss = reached["val_bits_per_byte"], reached["val_loss_start"], reached["val_loss"]
    lines = []
    if bits is not None:
        others = ", ".join(f"{name} {value:.2f}" for name, value in sorted(history.references.items()))
        beside = f" ({others})" if others else ""
        lines.append(f"loss    {bits:.3f} bits/byte of validation text{beside}")
    if loss is not None:
        began = f"{start:.3f} -> " if start is not None else ""
        lines.append(f"        {began}{loss:.3f} nats/token")
    sites = summary["sites"].values()
    merged, processed = (sum(site[f"tokens_{part}"] for site in sites) for part in ("merged", "processed"))
    if sites or not history.whole_at:  # A standby counts no tokens.
        lines.append(f"merged  {count(merged)} of {count(processed)} tokens in {sum(summary['versions'])} outer steps")
    return lines


def _sites(summary: Mapping[str, Any]) -> list[str]:
    lines = ["site         steps  tokens  merged    lost   other  updates  restarts   stall"]
    for name, site in summary["sites"].items():
        other = sum(site[f"tokens_{part}"] for part in ("refused", "in_flight", "unsent", "overwritten"))
        tokens = "".join(f"{count(value):>8}" for value in (site["tokens_processed"], site["tokens_merged"]))
        rest = f"{count(site['tokens_lost']):>8}{count(other):>8}"
        share = site["stall_seconds"] / site["train_seconds"] if site["train_seconds"] else 0.0
        updates = f"{site['updates_merged']:>9}{site['restarts']:>10}{share:>8.2%}"
        lines.append(f"{shortened(name, 10):<10}{site['inner_steps']:>8,}{tokens}{rest}{updates}")
    return lines if summary["sites"] else []


def _speed(summary: Mapping[str, Any]) -> list[str]:
    """Return the lines about each site's tokens per second."""
    sites = {name: site for name, site in summary["sites"].items() if site.get("tokens_per_second")}
    formats = {site["products"] or "?" for site in sites.values()}
    told = [
        f"{name} {count(site['tokens_per_second'])}" + (f" ({site['products'] or '?'})" if len(formats) > 1 else "")
        for name, site in sites.items()
    ]
    alike = f", products in {next(iter(formats))}" if len(formats) == 1 and formats != {"?"} else ""
    return _wrapped(f"tokens/s: {', '.join(told)}{alike}") if told else []


def _standstills(history: RunHistory) -> list[str]:
    """Return the lines about times when no version was made although updates waited, and which sites had sent none."""
    lines = []
    for still in history.standstills[:STANDSTILLS_MAX]:
        lasted = clock((still.end_s or history.seconds) - still.start_s)
        begin = clock(still.start_s)
        lines += _wrapped(f"no version of fragment {still.fragment} for {lasted} from {begin} on: {still.why}")
    if len(history.standstills) > STANDSTILLS_MAX:
        lines.append(f"and {len(history.standstills) - STANDSTILLS_MAX} more")
    return lines


def _faults(summary: Mapping[str, Any]) -> list[str]:
    faults = summary["faults"]
    lines = []
    for fault in faults[:FAULTS_MAX]:
        healed = fault["healed_seconds"]
        lasted = "" if healed is None else f" for {healed - fault['at_seconds']:.1f} s"
        lines.append(f"{fault['what']} {fault['target']} at {clock(fault['at_seconds'])}{lasted}")
    if len(faults) > FAULTS_MAX:
        lines.append(f"and {len(faults) - FAULTS_MAX} more")
    told = ", ".join(f"{name}={site['updates_merged_since_fault']}" for name, site in summary["sites"].items())
    if faults and told:
        lines += _wrapped(f"updates merged since each site's last fault: {told}")
    return [line[: WIDTH - 8] for line in lines]


def _wire(summary: Mapping[str, Any], history: RunHistory) -> list[str]:
    wire = summary["wire"]
    up, down, joins = wire["bytes_up"], wire["bytes_down"], wire["bytes_joins"]
    codec = summary["config"].get("codec")
    encoded = [f"encoded as {codec['up']} up, {codec['down']} down"] if codec else []
    moved = f"{size(up)} up, {size(down)} down"
    parallel = f"{times_less(up + down, wire['bytes_data_parallel_equivalent'])} data parallel"
    if any(site.reported for site in history.sites.values()):  # Heartbeats do not report the bytes of joins.
        return [f"{moved}, {parallel}", *encoded]
    fp32 = times_less(up + down - joins, wire["bytes_fp32_equivalent"])
    return [f"{moved}, of which {size(joins)} for joins", f"{fp32} fp32 codecs (joins apart), {parallel}", *encoded]
