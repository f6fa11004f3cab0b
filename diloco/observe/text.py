"""Texts for people: a sentence for each event, a syncer's status, the state of the data's units, formatted numbers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from diloco.sync.link import megabits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diloco.observe.eventlog import Event


CAUSED: Mapping[str, str] = {
    "kill": "is killed (SIGKILL)",
    "stop": "is frozen (SIGSTOP)",
    "partition": "is cut: nothing crosses it",
    "half_open": "is half open: one direction is silent",
    "reset": "has its connections reset",
    "set": "changes",
    "start": "starts now",
    "leave": "is asked to leave (SIGTERM)",
}
ENDED: Mapping[str, str] = {
    "kill": "restarted",
    "stop": "thawed (SIGCONT)",
    "partition": "connected",
    "half_open": "connected",
    "set": "as before",
}
SENTENCES: Mapping[str, str] = {
    "site_joined": "{site} joined: {why}",
    "site_silent": "{site} is silent: {why}",
    "site_back": "{site} is back: {why}",
    "site_left": "{site} left: {why}",
    "site_evicted": "{site} was evicted: {why}",
    "connected": "{site} connected to the syncer",
    "disconnected": "{site} lost the syncer and trains on: {why}",
    "refused": "an update of {site} was refused: {why}",
    "lost": "the syncer's data in {folder} are gone; the sites train on without it",
    "skipped": "scenario: {fault} {target} skipped: {why}",
    **dict.fromkeys(("settings_changed", "round_shrunk", "last_round", "outrun", "update_discarded"), "{what}: {why}"),
}
"""Of the events that are always shown alike."""


def sentence(event: Event) -> str | None:
    """Return the event as a sentence; None for events that are too frequent to show."""
    what, who, site = str(event.get("what", "")), event.get("who"), str(event.get("site") or event.get("who"))
    fault, target = str(event.get("fault", "")), str(event.get("target", ""))
    why = str(event.get("why") or event.get("reason") or "")
    known = event.get("versions")
    versions = " ".join(map(str, known)) if isinstance(known, list) else "-"
    if what in SENTENCES:
        words = {"site": site, "why": why, "fault": fault, "target": target, "folder": event.get("folder")}
        return SENTENCES[what].format(what=what.replace("_", " "), **words)
    match what:
        case "resumed" if "step" not in event:
            return f"the run resumed: {why}"  # The syncer's event; a site's own has a step.
        case "resumed":
            return f"{site} resumed from step {whole(event, 'step')}; {whole(event, 'tokens_lost'):,} tokens lost"
        case "site_done":
            return f"{site} is done: {why or 'the run ended'}"
        case "note" if event.get("note"):
            return f"{event['note']}: {why}"
        case "standstill":
            return f"no version of fragment {whole(event, 'fragment')} for {whole(event, 'seconds')} s: {why}"
        case "restored":
            said = event.get("said")
            source = f": {said[0]}" if isinstance(said, list) and said else ""
            return f"the run is restored, lineage {whole(event, 'lineage')} begins with versions {versions}{source}"
        case "syncer_started":
            again = f", {whole(event, 'recovered')} journal records replayed" if event.get("recovered") else ""
            return f"syncer started: epoch {whole(event, 'epoch')}{again}"
        case "canary" if event.get("same"):
            return None  # The usual result.
        case "canary" if event.get("same") is None:
            return f"{who}: its canary could not be run: {event.get('why')}"
        case "canary":
            return f"{who} CORRUPTS DATA: the same {whole(event, 'steps')} steps did not end in the same bits"
        case "final":
            return f"final versions {versions} ({event.get('ending')})"
        case "evaluating":
            return f"waiting for the final version's loss, for at most {whole(event, 'seconds_max')} s"
        case "eval":
            bits, loss = number(event, "val_bits_per_byte"), number(event, "val_loss")
            if bits is not None:
                return f"validation {bits:.3f} bits/byte at versions {versions}"
            return None if loss is None else f"validation {loss:.3f} nats/token"
        case "fault":
            seconds = number(event, "seconds")
            lasting = "" if seconds is None else f", for {seconds:g} s"
            return f"FAULT {target} {CAUSED.get(fault, fault)}{lasting}"
        case "healed":
            return f"RECOVERED {target}: {ENDED.get(fault, 'as before')}"
        case "process" if event.get("state") == "ended" and event.get("unasked"):
            return f"{event.get('name')} ended unexpectedly with exit code {event.get('code')}: {why}"
        case "run" if why:
            return f"run {event.get('state')}: {why}"
    return None


def number(event: Mapping[str, object], name: str) -> float | None:
    """Return a field as a float; None where it is missing, null or not a number."""
    value = event.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def whole(event: Mapping[str, object], name: str) -> int:
    """Return a field as an integer; 0 where it is missing."""
    return int(number(event, name) or 0)


# --- Where the units of the data are, as text ------------------------------------------------------------------------

COLUMNS: Mapping[str, str] = {
    "merged": "merged",
    "partly": "partly merged",
    "in_hand": "in hand",
    "given_back": "given back",
    "reissued": "re-issued",
    "repeated": "repeated",
}
"""The printed word for each count of the units by their state."""


def units_shortly(units: Mapping[str, Any]) -> str:
    """Return a short text for a live view: always the same columns."""
    return ", ".join(f"{units.get(name, 0):,} {name}" for name in ("leased", "merged", "partly", "repeated"))


def units_text(units: Mapping[str, Any]) -> str:
    """Return one line: units leased and processed, and then each column that is not 0; merged is always in it."""
    told = [f"{units[name]:,} {word}" for name, word in COLUMNS.items() if units[name] or name == "merged"]
    each = f"units of {units['sequences']} sequences"
    return f"{each}: {units['leased']:,} leased, {units['processed']:,} processed, {', '.join(told)}"


# --- A syncer's status, as text --------------------------------------------------------------------------------------


def standby_line(status: Mapping[str, Any]) -> str:
    """Return one line about a standby."""
    versions = ",".join(map(str, status["versions"])) or "none yet"
    follows = "follows" if status["following"] else f"DOES NOT FOLLOW (heard {status['heard_seconds_ago']:.0f} s ago)"
    failed = f"  FAILED: {status['failed']}" if status["failed"] else ""
    trouble = f"  {status['trouble']}" if status.get("trouble") and not failed else ""
    complaints = "".join(f"  {text}" for text in status.get("identity_complaints", []))
    return (
        f"standby {status['name']} {follows} {status['primary']}  versions {versions}  epoch {status['epoch']}  "
        f"{status['turns_behind']} turns to carry out{trouble}{complaints}{failed}"
        + "".join(f"\n{line}" for line in status.get("others", []))
    )


def heading(status: Mapping[str, Any]) -> str:
    """Return one line about the run and its syncer, and one about each other process that was asked."""
    facts = "  ".join([*run_facts(status), *syncer_facts(status), *troubles(status)])
    return "\n".join([facts, *status.get("others", [])])


def run_facts(status: Mapping[str, Any]) -> list[str]:
    """Return how far the run is."""
    versions = ",".join(str(fragment["version"]) for fragment in status["fragments"])
    ending = f" ({status['ending']})" if status["ending"] else ""
    waiting = sum(len(fragment["arrived"]) for fragment in status["fragments"])
    return [
        f"run {status['run_id']}",
        f"{status['phase']}{ending}",
        f"{status['progress']:.0%} of the run",
        f"versions {versions}",
        f"{status['run_tokens']:,} tokens merged",
        f"{waiting} arrived for the open rounds",
    ]


def syncer_facts(status: Mapping[str, Any]) -> list[str]:
    """Return the state of the syncer's process, as far as it reports it: earlier releases report less."""
    told = [f"epoch {status['epoch']}", f"up {status['up_seconds']:.0f} s"]
    if "kernels" in status:
        told.append(f"kernels {status['kernels']}")
    if (lineage := status.get("lineage", 1)) > 1:  # The number is the time at which the run was restored.
        told.append(f"restored {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(lineage))} UTC")
    if (used := status.get("memory_bytes")) is not None:
        told.append(f"memory {size(used)}, of it at most {size(status['memory_bytes_max'])} for the run")
    if (free := status.get("disk_free_bytes")) is not None:
        told.append(f"disk {size(free)} free")
    if journal := status.get("journal"):
        told.append(f"journal {size(journal['bytes'])} in segment {journal['segment']}")
    if above := status.get("upstream"):
        based = ",".join(map(str, above["base_versions"]))
        told.append(f"site {above['site']} of the run above, based on its versions {based}")
    if (backup := status.get("backup")) is not None:
        none = f"none for {backup['without_s']:.0f} s" if "without_s" in backup else "none yet"
        age = none if backup["age_s"] is None else f"{backup['age_s']:.0f} s old"
        told.append(f"backup {age}" + (f", FAILING: {backup['failing']}" if backup["failing"] else ""))
    if lease := status.get("lease"):
        told.append(
            f"lease {lease['place']} "
            + (f"renewed {lease['renewed_seconds_ago']:.0f} s ago" if lease["valid"] else "IS NOT VALID")
            + (f", heir {lease['heir']}" if lease["heir"] else "")
            + (f", TROUBLE: {lease['trouble']}" if lease["trouble"] else "")
        )
    standby = status.get("replication") or {}
    if standby.get("mode", "off") == "off":
        return told
    following = standby["following"]
    if standby["detached"]:
        until = f"until standby {standby['standby']} has caught up" if following else "without a standby"
        told.append(f"ON ONE DISK {until}" + ("" if following else " (start one: diloco standby follow)"))
    elif following:
        told.append(f"standby {standby['standby']} follows")
    else:
        advice = "" if status.get("behind") else " (start it, or: diloco standby detach)"  # A second run otherwise.
        told.append(f"NO STANDBY for {standby['away_seconds']:.0f} s{advice}")
    return told


def troubles(status: Mapping[str, Any]) -> list[str]:
    """Return what an operator must see at once, as far as the syncer reports it."""
    told = [f"BEHIND: {status['behind']}"] if status.get("behind") else []
    told += status.get("identity_complaints", [])
    told += [f"TAKES NO UPDATES: {', '.join(status['not_ready'])}"] if status.get("not_ready") else []
    if still := status.get("standstill"):
        told.append(f"NO VERSION of fragment {still['fragment']} for {still['seconds']:.0f} s: {still['why']}")
    for name, site in status["sites"].items():
        found = {"updates": site.get("updates_corrupt", 0), "bases": site.get("bases_differed", 0)}
        if what := " and ".join(f"{count} {kind}" for kind, count in found.items() if count):
            told.append(f"{name} CORRUPTS DATA ({what})")
        for held in site.get("held", []):
            which = f"{name} {held['fragment']} {held['sequence']}"
            told.append(f"HELD for {held['seconds']:.0f} s: {which}: {held['why']} (diloco admit, diloco refuse)")
    return told


def site_cells(status: Mapping[str, Any], name: str) -> dict[str, str]:
    """Return the cells of a site's row by their columns; "-" for what it has not reported."""
    site, seconds = status["sites"][name], status["up_seconds"]
    loss, heard, stall = (site.get(field) for field in ("loss", "heard_seconds_ago", "stall_share"))
    link, trip, about_link = site.get("link") or {}, "-", list[str]()
    if link.get("rtt_ns"):  # Rates as far as the site has measured them; codec and overlap, where chosen.
        trip = f"{link['rtt_ns'] / 1e6:.0f} ms"
        rates = [megabits(link[key]) if link[key] else "?" for key in ("up_bytes_per_s", "down_bytes_per_s")]
        about_link = [trip, "/".join(rates)] + ([link["up_codec"]] if link["why"] else [])
        about_link += [f"overlap {link['overlap_steps']}"] if link.get("overlap_steps") else []
    figures = {
        **{"step": "step", "tokens/s": "tokens_per_s", "processed": "tokens_processed", "merged": "tokens_merged"},
        **{"in flight": "tokens_in_flight", "stale": "staleness"},
    }
    cells = {column: "-" if site.get(field) is None else f"{site[field]:,.0f}" for column, field in figures.items()}
    for way in ("up", "down"):
        mean, rate = site[f"payload_bytes_{way}"] / (seconds or 1), link.get(f"{way}_bytes_per_s")
        used = f"{mean * 8 / 1e6:.3g} of {rate * 8 / 1e6:.3g}" if rate else "-"
        cells |= {way: size(site.get(f"bytes_{way}") or site[f"payload_bytes_{way}"]), f"Mbit/s {way}": used}
    return cells | {
        "site": name,
        "state": site["status"],
        "loss": f"{loss:.4f}" if isinstance(loss, float) else "-",
        "stall": f"{stall:.2%}" if isinstance(stall, float) else "-",
        "codec": link.get("up_codec") or "-",
        "round trip": trip,
        "link": " ".join(about_link) or "-",
        "heard": f"{heard:.1f} s ago" if heard is not None else "never",
    }


ROUND_COLUMNS = ("fragment", "next version", "arrived", "awaited", "open for", "grace left")


def round_cells(status: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the cells of each open round by ``ROUND_COLUMNS``; an earlier release's syncer reports none."""
    rows = []
    for index, fragment in enumerate(status["fragments"]):
        if "awaited" not in fragment or (fragment.get("open_seconds") is None and not fragment.get("merging")):
            continue
        left, opened = fragment.get("grace_seconds_left"), fragment.get("open_seconds")
        grace = "no quorum yet" if left is None else f"{left:.1f} s"
        cells = (
            str(index),
            str(fragment["version"] + 1),
            ", ".join(fragment["arrived"]) or "-",
            ", ".join(fragment["awaited"]) or "-",
            "-" if opened is None else f"{opened:.1f} s",
            "merging" if fragment["merging"] else grace,
        )
        rows.append(dict(zip(ROUND_COLUMNS, cells, strict=True)))
    return rows


def details(status: Mapping[str, Any]) -> str:
    """Return a line on where the data's units are, one on each open round, and one on each latest round's costs.

    "" where no units are leased, or the syncer reports none, and no fragment has a round or has had one.
    """
    units = status.get("units")
    lines = [units_text(units)] if units else []
    lines += [f"open: {', '.join(map(' '.join, cells.items()))}" for cells in round_cells(status)]
    lines += [
        f"round {fragment['version']} of fragment {index}: "
        + ", ".join(f"{name.removesuffix('_s')} {1000 * seconds:,.1f} ms" for name, seconds in costs.items())
        for index, fragment in enumerate(status["fragments"])
        if (costs := fragment.get("costs"))
    ]
    return "".join(f"{line}\n" for line in lines)


# --- Format names and numbers for people -----------------------------------------------------------------------------


def shortened(text: str, chars: int) -> str:
    """Return ``text``, at most ``chars`` long: with "…" where its end is left out."""
    return text if len(text) <= chars else text[: chars - 1] + "…"


def count(value: float) -> str:
    """Format a count in at most five characters: 999, 12.3k, 1.05M, 27.0G."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        # Rounding must not give 1000k.
        if abs(value) >= size * 0.9995:
            scaled = value / size
            return f"{scaled:.{max(0, 2 - (abs(scaled) >= 9.995) - (abs(scaled) >= 99.95))}f}{letter}"
    return f"{value:.0f}"


def size(num_bytes: float) -> str:
    """Format bytes in powers of ten, as networks count: 240 kB, 10.4 MB."""
    text = count(num_bytes)
    return f"{text[:-1]} {text[-1]}B" if text[-1].isalpha() else f"{text} B"


def clock(seconds: float) -> str:
    """Format a duration as m:ss or h:mm:ss."""
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def times_less(ours: float, theirs: float) -> str:
    """Format the ratio of ``ours`` to ``theirs``: "1/64 of"; "-" where one of them is unknown."""
    if ours <= 0 or theirs <= 0:
        return "-"
    ratio = theirs / ours
    return f"1/{ratio:.0f} of" if ratio >= 9.5 else f"1/{ratio:.1f} of" if ratio > 1 else f"{1 / ratio:.1f} times"
