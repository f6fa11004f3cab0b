"""A site's and a syncer's log: lines for people, and the events in the run's folder."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Protocol, TextIO

from diloco.config.placing import has_several, syncer_dir, syncer_name
from diloco.config.run_dir import run_dir_of
from diloco.observe.eventlog import EventLog, LineWriter
from diloco.observe.text import size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import ExitStack

    from diloco.config.schema import RunConfig
    from diloco.observe.eventlog import Event


QUIET = frozenset(
    {"step", "meter", "sealed", "pushed", "fetched", "adopted", "fate", "checkpoint", "memory_checkpoint"}
)


class Lines(Protocol):
    """A sink for lines: a ``LineWriter`` or a text file."""

    def write(self, line: str, /) -> object:
        """Write ``line``."""


class SiteLines:
    """Takes every event of a site and writes a line about each important one to each of ``out``."""

    def __init__(self, who: str, every_steps: int, out: Sequence[Lines]) -> None:
        self._who, self._every, self._out = who, every_steps, out
        self._versions: dict[int, int] = {}
        self._meter: Mapping[str, object] = {}

    def __call__(self, event: Event) -> None:
        """Handle one event; called from the log's thread."""
        what = str(event["what"])
        if what == "adopted":
            self._versions[_int(event, "fragment")] = _int(event, "version")
        elif what == "joined" and isinstance(versions := event.get("versions"), list | tuple):
            fragments = event.get("fragments")  # Present where the syncer is one of several.
            known = fragments if isinstance(fragments, list) else range(len(versions))
            self._versions |= {int(place): int(version) for place, version in zip(known, versions, strict=False)}
        elif what == "meter":
            self._meter = event
        if what == "step" and _int(event, "step") % self._every == 0:
            self._say(self._step(event))
        elif what == "fate" and event.get("reason"):
            self._say(f"refused: fragment {event.get('fragment')} update {event.get('sequence')}: {event['reason']}")
        elif what not in QUIET:
            facts = _in_words({key: value for key, value in event.items() if key not in ("at", "who", "what")})
            self._say(f"{what}: {facts}" if facts else what)

    def _step(self, event: Event) -> str:
        # The event log writes null for NaN and infinity.
        loss, norm = _float(event, "loss", math.nan), _float(event, "grad_norm", math.nan)
        versions = ",".join(str(version) for _, version in sorted(self._versions.items())) or "-"
        ours = f" v: {versions}  stale: {_int(self._meter, 'staleness')}"
        moved = f"up: {size(_float(self._meter, 'bytes_up'))}  down: {size(_float(self._meter, 'bytes_down'))}"
        used = f"mfu: {_float(event, 'mfu'):.2%}  " if "mfu" in event else ""
        return (
            f"step: {_int(event, 'step'):6d}  loss: {loss:8.5f}  grad_norm: {norm:7.4f}  "
            f"tps: {_float(event, 'tokens_per_s'):,.0f}  {used}lr: {_float(event, 'lr'):.5f} |{ours}  {moved}"
        )

    def _say(self, text: str) -> None:
        for out in self._out:
            out.write(f"[{self._who}] {text}\n")


def _in_words(value: object) -> str:
    """Return a value of an event as people write it: the parts of a mapping or a list with commas between."""
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


def identity_lines(out: Lines) -> Callable[[Event], None]:
    """Return a follower that writes to ``out`` changes of the access rules, and closed connections."""

    def write(event: Event) -> None:
        if event["what"] == "note" and event.get("note") == "identity":
            out.write(f"who may come in: {event.get('why')}\n")
        elif event["what"] == "note" and event.get("note") == "crowded":
            out.write(f"crowded: {event.get('why')}\n")

    return write


def _int(event: Mapping[str, object], name: str) -> int:
    return int(_float(event, name))


def _float(event: Mapping[str, object], name: str, otherwise: float = 0.0) -> float:
    value = event.get(name)
    return float(value) if isinstance(value, int | float) else otherwise


# --- The event logs of a syncer --------------------------------------------------------------------------------------


def syncer_log(config: RunConfig, stack: ExitStack) -> EventLog:
    """Return the log of the syncer's own events; ``stack`` closes it.

    Its own folder is a run folder like that of a run with one syncer, where fragments are numbered as in its journal.
    The whole run's log numbers them as in the whole model.
    """
    name = syncer_name(config.cluster.syncer.index)
    whole = EventLog(run_dir_of(config).events, name) if has_several(config) else None
    if whole is not None:
        stack.callback(whole.close)  # After the other log, which writes to it.
    log = EventLog(syncer_dir(config).events, name, also=identity_lines(lines_to(sys.stderr, name)))
    stack.callback(log.close)
    if whole is not None:
        log.follow(_in_whole(config, whole))
    return log


def _in_whole(config: RunConfig, whole: EventLog) -> Callable[[Event], None]:
    from diloco.config import build
    from diloco.learner.several_syncers import in_whole

    held, index = build.held_of(config), config.cluster.syncer.index

    def take(event: Event) -> None:
        fields = {key: value for key, value in event.items() if key != "what"}
        whole.emit(str(event["what"]), in_whole(fields, held) | {"of_syncer": index})

    return take
