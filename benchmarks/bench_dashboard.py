"""What does the live page of a run cost: how long does a round take beside 500 viewers, and a long file of events?

The rounds are those of ``rounds``: a syncer and two sites on the loopback.  ``diloco dashboard`` asks the syncer, and a
process opens the viewers' streams and closes them again, in turns of some seconds of one run; each round counts for the
turn in which it lies.  Page, viewers, syncer and sites share this machine's cores, which they do not in a real run.

The events are those that a syncer of eight sites elsewhere records: a heartbeat of each site every five seconds, and a
round a minute, in files as the log makes them.
"""

from __future__ import annotations

import json
import resource
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers.task import Task
from benchmarks.record import finish, parser_of, percentile, record
from benchmarks.rounds import Case, free_port, measure_ours, started
from diloco.observe.dashboard import Dashboard
from diloco.observe.eventlog import FileLines
from diloco.syncer.status import recorded
from diloco.wire.messages import ReportInfo

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

SITES = [f"site-{number}" for number in range(8)]
SETTLE_S = 2.0
"""The part of each turn that does not count: connections are opened and the first page is made."""
REQUEST = b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def view(port: int, count: int, pipe: Connection) -> None:
    """Open ``count`` streams of the page and read them until the next message, again and again."""
    while pipe.recv():
        with selectors.DefaultSelector() as streams:
            for _ in range(count):
                stream = socket.create_connection(("127.0.0.1", port))
                stream.sendall(REQUEST)
                streams.register(stream, selectors.EVENT_READ)
            heard = 0
            while not pipe.poll():
                heard += sum(len(key.fileobj.recv(1 << 16)) for key, _ in streams.select(0.1))  # type: ignore[union-attr]
            open_still = list(streams.get_map().values())
            pipe.recv()
            pipe.send(heard)
            for key in open_still:
                key.fileobj.close()  # type: ignore[union-attr]


def beside_viewers(case: Case, viewers: int, turn_s: float, bound_s: float) -> dict[str, Any]:
    """Return the times of the rounds without viewers and beside them."""
    turns: list[tuple[float, float, bool]] = []
    over, heard = threading.Event(), [0]
    port = free_port()
    command = [sys.executable, "-m", "diloco", "dashboard", case.listen, "--port", str(port)]

    def take_turns() -> None:
        with_viewers = False
        while not over.is_set():
            if with_viewers:
                ours.send("open")
            began = time.monotonic() + SETTLE_S
            over.wait(turn_s + SETTLE_S)
            turns.append((began, time.monotonic(), with_viewers))
            if with_viewers:
                ours.send("close")
                heard[0] += ours.recv()
            with_viewers = not with_viewers

    thread = threading.Thread(target=take_turns)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as page, ExitStack() as stack:
        ours = started(stack, view, port, viewers)
        assert page.stdout is not None
        page.stdout.readline()
        try:
            spans = measure_ours(case, bound_s, thread.start)["sites"][0]["spans"]
        finally:
            over.set()
            thread.join(bound_s)
            page.terminate()
    rows: dict[str, Any] = {"viewers": viewers, "megabytes_to_viewers": heard[0] / 1e6}
    for name, wanted in (("alone", False), ("beside", True)):
        times = [b - a for a, b in spans if any(c <= a and b <= d and on is wanted for c, d, on in turns)]
        rows |= {f"rounds_{name}": len(times), f"round_{name}_s_p50": percentile(times, 50)}
    return {**rows, "ratio": rows["round_beside_s_p50"] / rows["round_alone_s_p50"]}


def write_events(path: Path, days: float) -> int:
    """Write the events of so many days; return how many."""
    report: dict[str, Any] = dict.fromkeys(ReportInfo.__dataclass_fields__, 0) | {
        "run_id": "bench",
        "loss": 2.5,
        "link": None,
    }
    lines, version = 0, 0
    with closing(FileLines(path, lambda count, why: "")) as file:
        for beat in range(int(days * 86_400 / 5)):
            found: list[tuple[str, dict[str, object]]] = []
            for site in SITES:
                facts: dict[str, Any] = {
                    "site_id": site,
                    "step": 5 * beat,
                    "train_ns": 5 * beat * 10**9,
                    "bytes_up": 300_000 * beat,
                }
                told = ReportInfo(**{**report, **facts, "versions": (version,), "digests": (), "units": None})
                found.append(("reported", recorded(told)))
            if beat % 12 == 0:
                version += 1
                facts = {"fragment": 0, "version": version}
                shares = {"sites": dict.fromkeys(SITES, 0.125), "staleness": dict.fromkeys(SITES, 0)}
                found += [("grace", {"fragment": 0, "why": "quorum"}), ("outer_step", {**facts, **shares, "norm": 1.5})]
                found.append(("published", {**facts, "bytes": 240_000, "run_tokens": 10**6 * version}))
            lines += len(found)
            for what, fields in found:
                file.write(json.dumps({"at": 1.78e9 + 5 * beat, "who": "syncer", "what": what, **fields}) + "\n")
    return lines


def long_run(folder: Path, days: float) -> dict[str, Any]:
    """Return how long the first page and all of them take, the page's size, and the memory that all that takes."""
    events = write_events(folder / "events.jsonl", days)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    page = Dashboard("bench", folder / "events.jsonl", "", lambda: (None, {}))
    began = time.monotonic()
    parts, pages = page.made(), 1
    first_s = time.monotonic() - began
    while page.reads:
        parts, pages = page.made(), pages + 1
    row = {"days": days, "events": events, "first_page_s": first_s, "all_read_s": time.monotonic() - began}
    began = time.monotonic()
    page.made()
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    sizes = {"page_mb": sum(map(len, parts.values())) / 1e6, "memory_mb": more / 1e3}
    return {**row, "pages": pages, "next_page_s": time.monotonic() - began, **sizes}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=2500, help="rounds in all (default 2500)")
    parser.add_argument("--numel", type=int, default=1_000_000, help="values of the model")
    parser.add_argument("--viewers", type=int, default=500)
    parser.add_argument("--turn-s", type=float, default=8.0, help="seconds of each turn")
    parser.add_argument("--days", type=float, default=30.0, help="length of the run with the long file of events")
    parser.add_argument("--bound-s", type=float, default=540.0, help="longest wait for the rounds")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.viewers, options.turn_s, options.days = 300, 20, 1.0, 0.05
    with tempfile.TemporaryDirectory() as folder:
        rows = [long_run(Path(folder), options.days)]
    print(json.dumps(rows[0]), flush=True)
    task = Task(numel=options.numel, sites=2, rounds=options.rounds, seed=options.seed)
    case = Case(task=task, codec="int4:32", listen=f"127.0.0.1:{free_port()}", synced=False, beat_every_s=1.0)
    rows.append(beside_viewers(case, options.viewers, options.turn_s, options.bound_s))
    print(json.dumps(rows[1]), flush=True)
    config = {name: getattr(options, name) for name in ("rounds", "numel", "viewers", "turn_s", "days")}
    finish(record("dashboard", config, rows, options.seed), save=options.save)


if __name__ == "__main__":
    main()
