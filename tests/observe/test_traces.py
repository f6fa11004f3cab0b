"""Traces: one for each round over all processes, at a collector that decodes OTLP, and never in training's way."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from diloco.config.compose import compose
from diloco.observe.console import send_traces
from diloco.observe.eventlog import EventLog, read_events
from diloco.observe.traces import END_S, Traces
from tests.runs.processes import place_in, wait_for

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
OF_SITE = ("seal", "encode", "queue", "push", "receive", "pull", "adopt")
OF_SYNCER = ("merge", "publish", "round")


@contextmanager
def collector() -> Iterator[tuple[str, list[tuple[str, Span]]]]:
    """A collector's address, and the spans that it gets, each with its process."""
    taken = list[tuple[str, Span]]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
            for of_process in request.resource_spans:
                told = {each.key: each.value.string_value for each in of_process.resource.attributes}
                assert told["service.name"] == told["service.instance.id"]
                spans = [span for scope in of_process.scope_spans for span in scope.spans]
                taken.extend((told["service.name"], span) for span in spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", taken
        server.shutdown()


def named(span: Span) -> dict[str, Any]:
    return {each.key.removeprefix("diloco."): each.value for each in span.attributes}


@pytest.mark.slow
def test_a_collector_gets_all_nine_spans_of_a_round_of_two_sites_in_one_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collector() as (url, taken), place_in(tmp_path) as place:
        monkeypatch.setenv(ENDPOINT, url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        settings = ["run.tokens=20000", "outer.quorum=2"]
        syncer, address = place.syncer("pair", *settings)
        sites = [place.site("pair", address, name, *settings) for name in ("site-a", "site-b")]
        assert [verb.end() for verb in (*sites, syncer)] == [0, 0, 0], syncer.text() + sites[0].text()
        assert not [event for event in place.events("pair") if event.get("note") == "traces"]
    by_trace: dict[bytes, list[tuple[str, Span]]] = {}
    for who, span in taken:
        by_trace.setdefault(span.trace_id, []).append((who, span))
    wanted = Counter(OF_SYNCER) + Counter(2 * OF_SITE)
    whole = [spans for spans in by_trace.values() if Counter(span.name for _, span in spans) == wanted]
    assert whole, {trace.hex(): sorted(span.name for _, span in spans) for trace, spans in by_trace.items()}
    for spans in whole:
        (top,) = (span for _, span in spans if span.name == "round")
        version = named(top)["version"].int_value
        assert {named(span)["version"].int_value for _, span in spans} == {version}
        pushes = {who: span for who, span in spans if span.name == "push"}
        assert set(pushes) == {"site-a", "site-b"}
        for who, span in spans:
            assert who == "syncer" if span.name in ("receive", *OF_SYNCER) else who in pushes
            if span.name == "receive":
                push = pushes[named(span)["site"].string_value]
                assert span.parent_span_id == push.span_id
                assert push.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
                assert span.end_time_unix_nano <= push.end_time_unix_nano
            elif span.name != "round":
                assert span.parent_span_id == top.span_id
        for site in pushes:
            one = {span.name: span for who, span in spans if who == site}
            for sooner, later in pairwise(OF_SITE[:4]):
                assert one[sooner].end_time_unix_nano <= one[later].start_time_unix_nano
            assert top.end_time_unix_nano <= one["adopt"].start_time_unix_nano <= one["adopt"].end_time_unix_nano


# --- What one process sends ------------------------------------------------------------------------------------------

SEALED = {"what": "sealed", "at": 11.0, "fragment": 1, "sequence": 4, "seal_s": 0.25, "wait_s": 0.5, "encode_s": 2.0}
PUSHED = {"what": "pushed", "at": 15.0, "fragment": 1, "sequence": 4, "seconds": 3.0, "outcome": "accepted", "bytes": 9}
MERGED = {"what": "merged", "at": 14.5, "fragment": 1, "sequence": 4, "version": 7, "lineage": 1}
SPANS = {"seal": (8.25, 8.5), "encode": (9.0, 11.0), "queue": (11.0, 12.0), "push": (12.0, 15.0)}


def spans_of(*events: dict[str, Any], run: str = "otter", who: str = "site-a") -> list[ReadableSpan]:
    exporter = InMemorySpanExporter()
    traces = Traces(run, who, exporter)
    for event in events:
        traces.take({"who": who, **event})
    traces.close()
    return list(exporter.get_finished_spans())


def times(spans: list[ReadableSpan]) -> dict[str, tuple[float, float]]:
    return {span.name: (span.start_time / 1e9, span.end_time / 1e9) for span in spans}


@pytest.mark.parametrize(
    "events",
    [
        [SEALED, PUSHED, MERGED],
        [SEALED, MERGED, PUSHED],  # Each comes by a connection of its own.
        [SEALED, {**PUSHED, "at": 11.5, "outcome": "retry"}, PUSHED, MERGED],
        [{**SEALED, "at": 5.0}, {**PUSHED, "at": 6.0, "outcome": "refused"}, SEALED, PUSHED, MERGED],
        [SEALED, PUSHED, MERGED, MERGED],  # Told again, after the connection was lost.
    ],
)
def test_an_update_has_its_spans_once_its_version_is_known(events: list[dict[str, Any]]) -> None:
    assert times(spans_of(*events)) == SPANS
    assert not spans_of(*(event for event in events if event is not MERGED))


def test_each_run_lineage_fragment_and_version_has_a_trace_of_its_own() -> None:
    others = [{**MERGED, **other} for other in ({"version": 8}, {"lineage": 2})]
    found = [spans_of(SEALED, PUSHED, MERGED, run=run) for run in ("otter", "badger", "otter")]
    found += [spans_of(SEALED, PUSHED, other) for other in others]
    elsewhere = [{**event, "fragment": 2} for event in (SEALED, PUSHED, MERGED)]
    above = [{**each, "what": "upstream", "event": each["what"], "run": "whole"} for each in (SEALED, PUSHED, MERGED)]
    found += [spans_of(*elsewhere), spans_of(*above, who="syncer"), spans_of(SEALED, PUSHED, MERGED, run="whole")]
    traces = [{span.context.trace_id for span in spans} for spans in found]
    assert [len(each) for each in traces] == [1] * len(found)
    assert traces[0] == traces[2]
    assert traces[-2] == traces[-1], "a region is a site of the run above"
    assert len(set.union(*traces)) == len(found) - 2


def test_every_process_samples_the_same_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    kept = []
    for who in ("site-a", "site-b"):
        rounds = [{**event, "sequence": each} for each in range(40) for event in (SEALED, PUSHED)]
        spans = spans_of(*rounds, *({**MERGED, "sequence": each, "version": each} for each in range(40)), who=who)
        kept.append({span.attributes["diloco.version"] for span in spans})
        assert len(spans) == 4 * len(kept[0])
    assert kept[0] == kept[1]
    assert 5 < len(kept[0]) < 35


# --- What is in the way of it ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "Connection refused"),
        ({ENDPOINT: "127.0.0.1"}, "Invalid URL '127.0.0.1/v1/traces': No scheme supplied"),
        ({"MISSING": "1"}, "no traces are sent: pip install 'diloco[otel]'"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "PROTOCOL is 'grpc', and only http"),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "-1"}, "max_queue_size must be a positive integer"),
    ],
)
def test_a_collector_that_takes_nothing_is_one_note_and_stops_nothing(
    environment: dict[str, str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    told = {ENDPOINT: "http://127.0.0.1:1", "OTEL_BSP_SCHEDULE_DELAY": "50", **environment}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    if "MISSING" in environment:
        monkeypatch.setitem(sys.modules, EXPORTER, None)
    monkeypatch.setattr(logging.getLogger("opentelemetry"), "propagate", False)  # Handlers that another test has left.
    with ExitStack() as stack:
        log = EventLog(tmp_path / "events.jsonl", "site-a")
        send_traces(log, compose(["run.name=otter"]), stack)
        stack.callback(log.close)
        for event in (SEALED, PUSHED, MERGED):
            log.emit(event["what"], event)
        wait_for(lambda: [each for each in read_events(log.path) if each["what"] == "note"], "a note of it")
        ends = time.monotonic()
    assert time.monotonic() - ends < 2 * END_S + 5.0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("Otel")], "it would print later"
    (note,) = [each for each in read_events(log.path) if each["what"] == "note"]
    assert note["note"] == "traces"
    assert str(note["why"]).startswith(f"{ENDPOINT}: ")
    assert words in str(note["why"])
    assert capfd.readouterr() == ("", ""), "the SDK would print its warnings, with tracebacks"
    assert not logging.getLogger("opentelemetry").handlers


@pytest.mark.parametrize("variable", ["", "OTEL_SDK_DISABLED=true", "OTEL_TRACES_EXPORTER=none"])
def test_nothing_is_made_unless_the_environment_asks_for_it(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, EXPORTER, None)
    if variable:
        monkeypatch.setenv(*variable.split("="))
        monkeypatch.setenv(ENDPOINT, "http://a:1")
    with ExitStack() as stack:
        log = EventLog(tmp_path / "events.jsonl", "site-a")
        send_traces(log, compose(["run.name=otter"]), stack)
        log.close()
    assert list(read_events(log.path)) == []
