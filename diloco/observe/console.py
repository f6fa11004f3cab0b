"""A site's and a syncer's log: lines for people, the events in the run's folder, and their traces."""

from __future__ import annotations

import logging
import math
import os
import sys
from typing import TYPE_CHECKING, TextIO

from diloco.config.placing import has_several, syncer_dir, syncer_name
from diloco.config.run_dir import run_dir_of
from diloco.observe.eventlog import EventLog, LineWriter
from diloco.observe.history import versions_in
from diloco.observe.text import number, size, whole
from diloco.sync.events import DISCARDING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import ExitStack

    from diloco.config.schema import RunConfig
    from diloco.observe.eventlog import Event


QUIET = frozenset(
    {"step", "meter", "sealed", "pushed", "merged", "fetched", "adopted", "fate", "checkpoint", "memory_checkpoint"}
)


class SiteLines:
    """Takes every event of one site and writes a line about each important one to each of ``out``."""

    def __init__(self, every_steps: int, out: Sequence[LineWriter | TextIO]) -> None:
        self._every, self._out = every_steps, out
        self._versions: dict[int, int] = {}
        self._meter: Mapping[str, object] = {}

    def __call__(self, event: Event) -> None:
        """Handle one event; called from the log's thread."""
        what, text = str(event["what"]), ""
        if what == "adopted":
            self._versions[whole(event, "fragment")] = whole(event, "version")
        elif what == "joined":
            self._versions |= versions_in(event)
        elif what == "meter":
            self._meter = event
        if what == "step" and whole(event, "step") % self._every == 0:
            # The event log writes null for NaN and infinity.
            loss, norm = [math.nan if (value := number(event, at)) is None else value for at in ("loss", "grad_norm")]
            up, down = size(whole(self._meter, "bytes_up")), size(whole(self._meter, "bytes_down"))
            versions = ",".join([str(version) for _, version in sorted(self._versions.items())]) or "-"
            used = f"mfu: {number(event, 'mfu') or 0.0:.2%}  " if "mfu" in event else ""
            text = (
                f"step: {whole(event, 'step'):6d}  loss: {loss:8.5f}  grad_norm: {norm:7.4f}  "
                f"tps: {number(event, 'tokens_per_s') or 0.0:,.0f}  {used}lr: {number(event, 'lr') or 0.0:.5f} | "
                f"v: {versions}  stale: {whole(self._meter, 'staleness')}  up: {up}  down: {down}"
            )
        elif what in ("pushed", "fate") and event.get("reason") in DISCARDING:
            text = f"refused: fragment {event.get('fragment')} update {event.get('sequence')}: {event['reason']}"
        elif what not in QUIET:
            said = ("at", "who", "what", "why", "note")
            facts = _in_words({key: value for key, value in event.items() if key not in said})
            text = ": ".join(filter(None, (str(event.get("note", what)), facts, _in_words(event.get("why") or ""))))
        if text:
            for out in self._out:
                out.write(f"[{event['who']}] {text}\n")


def _in_words(value: object) -> str:
    """Return a value of an event as text: a mapping's parts separated by commas, a list's by slashes."""
    if isinstance(value, dict):
        inner = ((key, _in_words(part), isinstance(part, dict)) for key, part in value.items())
        return ", ".join(f"{key} ({text})" if nested else f"{key} {text}" for key, text, nested in inner)
    if isinstance(value, list | tuple):
        return "/".join(_in_words(part) for part in value) or "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def lines_to(out: TextIO, who: str) -> LineWriter:
    """Return a writer to a terminal or redirected file; it bypasses the buffer, which could keep half a line."""
    out.flush()
    return LineWriter(getattr(out.buffer, "raw", out.buffer).write, missing_lines(who))


def missing_lines(who: str) -> Callable[[int, str], str]:
    """Return a function that makes the line saying how many lines of ``who`` are missing there, and why."""
    return lambda count, why: f"[{who}] lines missing here: {count} ({why})\n"


def identity_lines(out: LineWriter | TextIO) -> Callable[[Event], None]:
    """Return a follower that writes to ``out`` changes of the access rules, closed connections, why no traces are sent,
    why a standby does not follow, and the warning that this syncer is an old one."""
    heads = {"identity": "access rules", "crowded": "crowded", "traces": "traces", "not_following": "does not follow"}
    heads |= dict.fromkeys(("backup_behind", "site_ahead"), "BEHIND")

    def write(event: Event) -> None:
        if event["what"] == "note" and (head := heads.get(str(event.get("note")))):
            out.write(f"{head}: {event.get('why')}\n")

    return write


def send_traces(log: EventLog, config: RunConfig, stack: ExitStack, notes: EventLog | None = None) -> None:
    """Send the spans of ``log``'s events to the collector that OpenTelemetry's environment variables name, if any.

    ``stack`` ends that, and must close ``log`` first.  A note in ``notes`` (default: ``log``) says what is in the way:
    it never ends a run.
    """
    said, notes = os.environ, notes or log
    names = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    name = next((each for each in names if said.get(each)), "")
    wanted = said.get("OTEL_SDK_DISABLED") != "true" and said.get("OTEL_TRACES_EXPORTER", "otlp") == "otlp"
    if not name or not wanted:
        return
    protocol = said.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or said.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    try:
        if protocol not in (None, "http/protobuf"):
            raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}, and only http/protobuf is supported")
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        from diloco.observe.traces import Complaints, Traces

        complaints, of_sdk = Complaints(notes, name), logging.getLogger("opentelemetry")
        of_sdk.addHandler(complaints)
        stack.callback(of_sdk.removeHandler, complaints)
        traces = Traces(config.run.name or "", log.who, OTLPSpanExporter())
        log.follow(traces.take)
        stack.callback(traces.close)
    except Exception as error:  # The SDK is not installed, refuses a variable, or was made for other packages.
        why = "pip install 'diloco[otel]'" if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        notes.emit("note", {"note": "traces", "why": f"{name}: no traces are sent: {why}"})


# --- The event logs of a syncer --------------------------------------------------------------------------------------


def syncer_log(config: RunConfig, stack: ExitStack) -> EventLog:
    """Return the log of the syncer's own events; ``stack`` closes it.

    Its own folder is a run folder like that of a run with one syncer, where fragments are numbered as in its journal.
    The whole run's log numbers them as in the whole model.
    """
    name = syncer_name(config.cluster.syncer.index)
    whole_run = EventLog(run_dir_of(config).events, name) if has_several(config) else None
    log = EventLog(syncer_dir(config).events, name, also=identity_lines(lines_to(sys.stderr, name)))
    send_traces(whole_run or log, config, stack, notes=log)
    if whole_run is not None:
        stack.callback(whole_run.close)  # After the other log, which writes to it.
        from diloco.config import build
        from diloco.learner.several_syncers import in_whole

        held, index = build.held_of(config), config.cluster.syncer.index

        def take(event: Event) -> None:
            fields = {key: value for key, value in event.items() if key != "what"}
            whole_run.emit(str(event["what"]), in_whole(fields, held) | {"of_syncer": index})

        log.follow(take)
    stack.callback(log.close)
    return log
