"""One sentence for each event that a reader should see: in the live view, in plain lines and in the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diloco.launch.eventlog import Event

CAUSED: Mapping[str, str] = {
    "kill": "is killed (SIGKILL)",
    "stop": "is frozen (SIGSTOP)",
    "partition": "is cut: nothing crosses it",
    "half_open": "is half open: one way is silent",
    "reset": "has its connections reset",
    "set": "changes",
    "start": "starts now",
    "leave": "is asked to leave (SIGTERM)",
}
ENDED: Mapping[str, str] = {
    "kill": "is started again",
    "stop": "is thawed (SIGCONT)",
    "partition": "is whole again",
    "half_open": "is whole again",
    "set": "is as it was",
}
_STANDING: Mapping[str, str] = {
    "site_silent": "is silent",
    "site_back": "is back",
    "site_left": "left",
    "site_evicted": "was put out",
}


def sentence(event: Event) -> str | None:
    """Return what happened as a sentence; None for events that happen all the time."""
    what = str(event.get("what", ""))
    site = str(event.get("site") or event.get("who"))
    why = str(event.get("why") or event.get("reason") or "")
    match what:
        case "site_joined":
            return f"{site} joined: {why}"
        case "site_silent" | "site_back" | "site_left" | "site_evicted":
            return f"{site} {_STANDING[what]}: {why}"
        case "connected":
            return f"{site} reaches the syncer"
        case "disconnected":
            return f"{site} lost the syncer and trains on: {why}"
        case "resumed" if "step" not in event:
            return f"the run goes on: {why}"  # The syncer's event; a site's own has a step.
        case "resumed":
            lost = _whole(event, "tokens_lost")
            return f"{site} goes on from step {_whole(event, 'step')}; {lost:,} tokens were lost"
        case "site_done":
            return f"{site} is done: {why or 'the run ended'}"
        case "refused":
            return f"an update of {site} was refused: {why}"
        case "note" if event.get("note"):
            return f"{event['note']}: {why}"
        case "standstill":
            return f"no version of fragment {_whole(event, 'fragment')} for {_whole(event, 'seconds')} s: {why}"
        case "settings_changed" | "round_shrunk" | "last_round" | "outrun" | "update_discarded":
            return f"{what.replace('_', ' ')}: {why}"
    return _of_the_whole(what, event, why)


def _of_the_whole(what: str, event: Event, why: str) -> str | None:
    target = str(event.get("target", ""))
    fault = str(event.get("fault", ""))
    match what:
        case "lost":
            return f"the syncer's data in {event.get('folder')} are gone; the sites train on without it"
        case "restored":
            said = event.get("said")
            source = f": {said[0]}" if isinstance(said, list) and said else ""
            lineage, versions = _whole(event, "lineage"), _listed(event.get("versions"))
            return f"the run is restored, lineage {lineage} begins with versions {versions}{source}"
        case "syncer_started":
            again = f", {_whole(event, 'recovered')} journal records replayed" if event.get("recovered") else ""
            return f"syncer started: epoch {_whole(event, 'epoch')}{again}"
        case "canary":
            return _canary(event)
        case "final":
            return f"final versions {_listed(event.get('versions'))} ({event.get('ending')})"
        case "eval":
            bits, loss = event.get("val_bits_per_byte"), event.get("val_loss")
            if isinstance(bits, int | float):
                return f"validation {bits:.3f} bits/byte at versions {_listed(event.get('versions'))}"
            return f"validation {loss:.3f} nats/token" if isinstance(loss, int | float) else None
        case "fault":
            seconds = event.get("seconds")
            lasting = f", for {seconds:g} s" if isinstance(seconds, int | float) else ""
            return f"FAULT {target} {CAUSED.get(fault, fault)}{lasting}"
        case "healed":
            return f"HEALED {target} {ENDED.get(fault, 'is well again')}"
        case "skipped":
            return f"scenario: {fault} {target} skipped: {why}"
        case "process" if event.get("state") == "ended" and event.get("unasked"):
            return f"{event.get('name')} ended unasked with exit code {event.get('code')}: {why}"
        case "run" if why:
            return f"run {event.get('state')}: {why}"
    return None


def _canary(event: Event) -> str | None:
    """Return None for a machine that repeats its steps, as nearly all do."""
    if event.get("same"):
        return None
    if event.get("same") is None:
        return f"{event.get('who')}: its canary could not be run: {event.get('why')}"
    return f"{event.get('who')} CORRUPTS DATA: the same {_whole(event, 'steps')} steps did not end in the same bits"


def _whole(event: Event, name: str) -> int:
    value = event.get(name)
    return int(value) if isinstance(value, int | float) else 0


def _listed(value: object) -> str:
    return " ".join(str(item) for item in value) if isinstance(value, list) else "-"
