"""A round as one trace of OpenTelemetry, from the events of the processes that take part in it.

Each process makes the spans of its own events, in the log's thread, and the SDK sends them in batches from a thread of
its own: nothing of it is in the way of a step.  ``console.send_traces`` begins it; the SDK is an extra.

A trace is a version of one fragment.  Its id, and those of its spans, follow from the run's name, the lineage, the
fragment and the version, so that every process knows them without a word from another.  An update's push cannot carry
them: which version takes an update is known only when it is merged.  So a site keeps what it measured of an update
until it hears which version that is.

    round                        of the syncer: from the first update's first byte until the version is published
        seal, encode, queue      of a site: the training thread's part, the codec and the outbox, the wait for its turn
        push                     of a site: until the syncer has answered
            receive              of the syncer: until the update is durable
        merge, publish           of the syncer: the outer step; the journal, the standby, and telling the sites
        pull, adopt              of a site
"""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags, set_span_in_context

from diloco.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from opentelemetry.sdk.trace.export import SpanExporter

    from diloco.observe.eventlog import EventLog

UPDATES_MAX = 1024
"""Updates kept until their version is known; then the oldest are dropped, which are mostly refused ones."""
END_S = 1.5
"""How long the collector may take for the rest when a process ends, and then a call to it to break off."""
FACTS = ("site", "sequence", "steps", "codec", "outcome", "bytes", "whole", "norm")
"""The fields of an event that its span has as attributes."""
KINDS: Mapping[str, SpanKind] = {"push": SpanKind.CLIENT, "receive": SpanKind.SERVER}
"""Of a call's two ends, by which a collector draws which process calls which."""


class Complaints(logging.Handler):
    """Notes in ``log`` each kind of warning of the SDK once; the SDK repeats it for each batch that is not taken."""

    def __init__(self, log: EventLog, endpoint: str) -> None:
        """``endpoint`` is the variable with the collector's address."""
        super().__init__(logging.WARNING)
        self._log, self._endpoint, self._told = log, endpoint, set[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """Take a warning; called by ``logging``."""
        if record.msg not in self._told:
            self._told.add(record.msg)
            # What the SDK's parser of variables logs has the collector's token in it.
            why = record.msg if record.name.startswith("opentelemetry.util") else record.getMessage()
            self._log.emit("note", {"note": "traces", "why": f"{self._endpoint}: {why}"})


@dataclass
class Ids(IdGenerator):
    """The ids of the next span, for the SDK."""

    trace: int = 0
    span: int = 0

    def generate_trace_id(self) -> int:
        """Return the trace's id."""
        return self.trace

    def generate_span_id(self) -> int:
        """Return the span's id."""
        return self.span


def derived_id(length: int, words: Sequence[object]) -> int:
    """Return an id of ``length`` bytes, the same for the same words in every process."""
    return int.from_bytes(sha256(json.dumps(words).encode()).digest()[:length])


class Traces:
    """Takes the events of the process ``who``, and hands their spans to ``exporter``."""

    def __init__(self, run: str, who: str, exporter: SpanExporter) -> None:
        of_process = {"service.name": who, "service.instance.id": who, "service.namespace": "diloco"}
        resource = Resource.create({**of_process, "service.version": __version__})
        resource = resource.merge(OTELResourceDetector().detect())  # What the environment says comes first.
        self._run, self._who, self._ids, self._exporter = run, who, Ids(), exporter
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("diloco", __version__)
        self._updates: dict[tuple[str, int, int], dict[str, dict[str, Any]]] = {}
        """Of each update that is not known to be merged, the events so far by their names."""
        self._lineages: dict[tuple[str, int], int] = {}
        self._steps: dict[int, dict[str, Any]] = {}

    def take(self, event: dict[str, Any]) -> None:
        """Take the next event, from the log's thread."""
        what = event["event" if event["what"] == "upstream" else "what"]  # A region is a site of the run above.
        at, run, fragment = event["at"], event.get("run", self._run), event.get("fragment", 0)
        match what:
            case "sealed" | "pushed" | "merged" if event.get("outcome") != "retry":
                update = (run, fragment, event["sequence"])
                # A refused update's number is used again.  The answer to a push may come after the word of its version.
                before = self._updates.pop(update, {}) if what != "sealed" else {}
                known = self._updates[update] = {**before, what: event}
                if len(self._updates) > UPDATES_MAX:
                    del self._updates[next(iter(self._updates))]
                if not {"sealed", "pushed", "merged"} <= known.keys():
                    return
                del self._updates[update]
                sealed, pushed, version = known["sealed"], known["pushed"], known["merged"]
                version = {"lineage": version["lineage"], "version": version["version"]}
                encode_at, push_at = sealed["at"] - sealed["encode_s"], pushed["at"] - pushed["seconds"]
                sealed_at = encode_at - sealed["wait_s"]
                self._span("seal", sealed | version, sealed_at - sealed["seal_s"], sealed_at)
                self._span("encode", sealed | version, encode_at, sealed["at"])
                self._span("queue", sealed | version, sealed["at"], push_at)
                self._span("push", pushed | version, push_at, pushed["at"])
            case "fetched":
                self._lineages[run, fragment] = event["lineage"]
                self._span("pull", event, at - event["seconds"], at)
            case "adopted" if lineage := self._lineages.get((run, fragment)):
                self._span("adopt", {**event, "lineage": lineage}, at - event["seconds"], at)
            case "outer_step":
                self._steps[fragment] = event
            case "published" if step := self._steps.pop(fragment, None):
                version = {key: event[key] for key in ("lineage", "fragment", "version")}
                begins = [step["at"] - step["seconds"]]
                self._span("merge", step | version, begins[0], step["at"])
                self._span("publish", event, at - event["publish_s"], at)
                for site, sequence, received_at, seconds in step["received"]:
                    begins.append(received_at - seconds)
                    self._span("receive", version | {"site": site, "sequence": sequence}, begins[-1], received_at)
                self._span("round", version, min(begins), at)

    def _span(self, name: str, facts: dict[str, Any], begin: float, end: float) -> None:
        """Hand over a span, from ``begin`` to ``end`` in Unix time, of the version that ``facts`` name."""
        facts = {"run": self._run, **facts}
        version = {key: facts[key] for key in ("run", "lineage", "fragment", "version")}
        of_version, update = [*version.values()], [facts.get("site", self._who), facts.get("sequence", 0)]
        trace, top = derived_id(16, of_version), derived_id(8, [*of_version, "round"])
        self._ids.trace, self._ids.span = trace, derived_id(8, [*of_version, name, *update]) if name != "round" else top
        above = derived_id(8, [*of_version, "push", *update]) if name == "receive" else top
        # All processes decide alike, by the id, which versions are sampled.
        decision = self._provider.sampler.should_sample(None, trace, "round").decision
        flags = TraceFlags(decision is Decision.RECORD_AND_SAMPLE)
        parent = NonRecordingSpan(SpanContext(trace, above, is_remote=True, trace_flags=flags))
        shown = version | {key: facts[key] for key in FACTS if key in facts}
        span = self._tracer.start_span(
            name,
            set_span_in_context(parent, Context()) if name != "round" else Context(),
            KINDS.get(name, SpanKind.INTERNAL),
            {f"diloco.{key}": value for key, value in shown.items()},
            start_time=int(begin * 1e9),
        )
        span.end(int(end * 1e9))

    def close(self) -> None:
        """Send the rest for at most ``END_S``, then break off what the collector does not take."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(END_S)
        if ending.is_alive():
            self._exporter.shutdown()
            ending.join(END_S)
