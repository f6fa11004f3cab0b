"""Texts for people: a sentence for each event, the state of the data's units, and formatted numbers."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

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
_STANDING: Mapping[str, str] = {
    "site_silent": "is silent",
    "site_back": "is back",
    "site_left": "left",
    "site_evicted": "was evicted",
}


def sentence(event: Event) -> str | None:
    """Return the event as a sentence; None for events that are too frequent to show."""
    what = str(event.get("what", ""))
    site = str(event.get("site") or event.get("who"))
    why = str(event.get("why") or event.get("reason") or "")
    match what:
        case "site_joined":
            return f"{site} joined: {why}"
        case "site_silent" | "site_back" | "site_left" | "site_evicted":
            return f"{site} {_STANDING[what]}: {why}"
        case "connected":
            return f"{site} connected to the syncer"
        case "disconnected":
            return f"{site} lost the syncer and trains on: {why}"
        case "resumed" if "step" not in event:
            return f"the run resumed: {why}"  # The syncer's event; a site's own has a step.
        case "resumed":
            lost = whole(event, "tokens_lost")
            return f"{site} resumed from step {whole(event, 'step')}; {lost:,} tokens lost"
        case "site_done":
            return f"{site} is done: {why or 'the run ended'}"
        case "refused":
            return f"an update of {site} was refused: {why}"
        case "note" if event.get("note"):
            return f"{event['note']}: {why}"
        case "standstill":
            return f"no version of fragment {whole(event, 'fragment')} for {whole(event, 'seconds')} s: {why}"
        case "settings_changed" | "round_shrunk" | "last_round" | "outrun" | "update_discarded":
            return f"{what.replace('_', ' ')}: {why}"
    return _of_the_whole(what, event, why)


def _of_the_whole(what: str, event: Event, why: str) -> str | None:
    target = str(event.get("target", ""))
    fault = str(event.get("fault", ""))
    known = event.get("versions")
    versions = " ".join(map(str, known)) if isinstance(known, list) else "-"
    match what:
        case "lost":
            return f"the syncer's data in {event.get('folder')} are gone; the sites train on without it"
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
            return f"{event.get('who')}: its canary could not be run: {event.get('why')}"
        case "canary":
            steps = whole(event, "steps")
            return f"{event.get('who')} CORRUPTS DATA: the same {steps} steps did not end in the same bits"
        case "final":
            return f"final versions {versions} ({event.get('ending')})"
        case "evaluating":
            return f"waiting for the final version's loss, for at most {whole(event, 'seconds_max')} s"
        case "eval":
            bits, loss = event.get("val_bits_per_byte"), event.get("val_loss")
            if isinstance(bits, int | float):
                return f"validation {bits:.3f} bits/byte at versions {versions}"
            return f"validation {loss:.3f} nats/token" if isinstance(loss, int | float) else None
        case "fault":
            seconds = event.get("seconds")
            lasting = f", for {seconds:g} s" if isinstance(seconds, int | float) else ""
            return f"FAULT {target} {CAUSED.get(fault, fault)}{lasting}"
        case "healed":
            return f"RECOVERED {target}: {ENDED.get(fault, 'as before')}"
        case "skipped":
            return f"scenario: {fault} {target} skipped: {why}"
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

COLUMNS = ("merged", "partly", "in_hand", "given_back", "reissued", "repeated")
WORDS = MappingProxyType(
    {"partly": "partly merged", "in_hand": "in hand", "given_back": "given back", "reissued": "re-issued"}
)
"""The printed words for columns whose names are not plain words."""


def units_shortly(units: Mapping[str, Any]) -> str:
    """Return a short text for a live view: always the same columns."""
    return ", ".join(f"{units.get(name, 0):,} {name}" for name in ("leased", "merged", "partly", "repeated"))


def units_text(units: Mapping[str, Any]) -> str:
    """Return one line: units leased and processed, and then each column that is not 0; merged is always in it."""
    told = [f"{units[name]:,} {WORDS.get(name, name)}" for name in COLUMNS if units[name] or name == "merged"]
    each = f"units of {units['sequences']} sequences"
    return f"{each}: {units['leased']:,} leased, {units['processed']:,} processed, {', '.join(told)}"


# --- Format numbers for people ---------------------------------------------------------------------------------------


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
