"""The summary printed at the end of ``diloco up`` and by ``diloco report``, at most ``WIDTH`` columns wide."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from diloco.launch.figures import clock, count, size, times_less
from diloco.launch.unit_text import units_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Any

    from diloco.launch.history import RunHistory

WIDTH = 80
SITE_NAME_CHARS = 10
FAULTS_MAX = 12
STANDSTILLS_MAX = 3


def closing_lines(summary: Mapping[str, Any], history: RunHistory, run_dir: Path) -> list[str]:
    """Return the lines of the closing table: the loss reached, the sites' tokens, the faults, and the wire bytes."""
    status = f"{run_dir.name}: {summary['status']}, after {clock(summary['wall_seconds'])}"
    return [
        *textwrap.wrap(status, WIDTH, subsequent_indent="  "),
        *_reached(summary, history),
        "",
        *_sites(summary),
        *_speed(summary),
        *_standstills(history),
        "",
        *_faults(summary),
        *_wire(summary),
        *_units(summary),
        f"files   {run_dir}/",
        "        summary.json report.html events.jsonl config.yaml logs/ sites/ syncer/",
    ]


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
    steps = sum(summary["versions"])
    lines.append(f"merged  {count(merged)} of {count(processed)} tokens in {steps} outer steps")
    return lines


def _sites(summary: Mapping[str, Any]) -> list[str]:
    lines = ["site         steps  tokens  merged    lost   other  updates  restarts   stall"]
    for name, site in summary["sites"].items():
        other = sum(site[f"tokens_{part}"] for part in ("refused", "in_flight", "unsent", "overwritten"))
        tokens = "".join(f"{count(value):>8}" for value in (site["tokens_processed"], site["tokens_merged"]))
        rest = f"{count(site['tokens_lost']):>8}{count(other):>8}"
        share = site["stall_seconds"] / site["train_seconds"] if site["train_seconds"] else 0.0
        updates = f"{site['updates_merged']:>9}{site['restarts']:>10}{share:>8.2%}"
        lines.append(f"{_short(name):<{SITE_NAME_CHARS}}{site['inner_steps']:>8,}{tokens}{rest}{updates}")
    return lines if summary["sites"] else []


def _speed(summary: Mapping[str, Any]) -> list[str]:
    """Return the lines about each site's tokens per second."""
    sites = {_short(name): site for name, site in summary["sites"].items() if site.get("tokens_per_second")}
    formats = {site["products"] or "?" for site in sites.values()}
    told = [
        f"{name} {count(site['tokens_per_second'])}" + (f" ({site['products'] or '?'})" if len(formats) > 1 else "")
        for name, site in sites.items()
    ]
    alike = f", products in {formats.pop()}" if len(formats) == 1 else ""
    lines = textwrap.wrap(f"tokens/s: {', '.join(told)}{alike}", WIDTH - 8) if told else []
    return [f"{'speed' if number == 0 else '':<8}{line}" for number, line in enumerate(lines)]


def _standstills(history: RunHistory) -> list[str]:
    """Return the lines about times when no version was made although updates waited, and which sites had sent none."""
    lines = []
    for still in history.standstills[:STANDSTILLS_MAX]:
        lasted = clock((still.end_s or history.seconds) - still.start_s)
        text = f"no version of fragment {still.fragment} for {lasted} from {clock(still.start_s)} on: {still.why}"
        lines += textwrap.wrap(text, WIDTH - 8)
    if len(history.standstills) > STANDSTILLS_MAX:
        lines.append(f"and {len(history.standstills) - STANDSTILLS_MAX} more")
    return [f"{'rounds' if number == 0 else '':<8}{line}" for number, line in enumerate(lines)]


def _faults(summary: Mapping[str, Any]) -> list[str]:
    faults = summary["faults"]
    lines = []
    for fault in faults[:FAULTS_MAX]:
        healed = fault["healed_seconds"]
        lasted = "" if healed is None else f" for {healed - fault['at_seconds']:.1f} s"
        lines.append(f"{fault['what']} {fault['target']} at {clock(fault['at_seconds'])}{lasted}")
    if len(faults) > FAULTS_MAX:
        lines.append(f"and {len(faults) - FAULTS_MAX} more")
    since = {_short(name): site["updates_merged_since_fault"] for name, site in summary["sites"].items()}
    if faults and since:
        told = ", ".join(f"{name}={number}" for name, number in since.items())
        lines += textwrap.wrap(f"updates merged since each site's last fault: {told}", WIDTH - 8)
    return [f"{'faults' if number == 0 else '':<8}{line}"[:WIDTH] for number, line in enumerate(lines)]


def _wire(summary: Mapping[str, Any]) -> list[str]:
    wire = summary["wire"]
    up, down, joins = wire["bytes_up"], wire["bytes_down"], wire["bytes_joins"]
    fp32 = times_less(up + down - joins, wire["bytes_fp32_equivalent"])
    parallel = times_less(up + down, wire["bytes_data_parallel_equivalent"])
    return [
        f"wire    {size(up)} up, {size(down)} down, of which {size(joins)} for joins",
        f"        {fp32} fp32 codecs (joins apart), {parallel} data parallel",
    ]


def _units(summary: Mapping[str, Any]) -> list[str]:
    """Return the lines about the state of the data's units, if any were leased."""
    units = summary.get("units")
    lines = textwrap.wrap(units_text(units), WIDTH - 8) if units else []
    return [f"{'data' if number == 0 else '':<8}{line}" for number, line in enumerate(lines)]


def _short(name: str) -> str:
    return name if len(name) <= SITE_NAME_CHARS else name[: SITE_NAME_CHARS - 1] + "…"
