from __future__ import annotations

import errno
import json
import math
import queue
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest

from diloco.observe import eventlog
from diloco.observe.console import missing_lines
from diloco.observe.eventlog import (
    FILES_MAX,
    Event,
    EventLog,
    FileLines,
    LineWriter,
    event_blocks,
    new_events,
    read_events,
    recent_events,
)
from tests.forked import forkserver
from tests.wire.relay import wait_until


def test_an_event_says_when_who_and_what_as_far_as_it_is_json(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "deep" / "events.jsonl", "site-a")
    log.emit("step", {"path": Path("x"), "loss": math.nan, "sites": {"a": math.inf}, "versions": (1, 2)})
    log.emit("connected")
    assert wait_until(lambda: len(list(read_events(log.path))) == 2)
    first, second = read_events(log.path)
    said = {"who": "site-a", "path": "PosixPath('x')", "loss": None, "sites": {"a": None}, "versions": [1, 2]}
    assert {name: first[name] for name in said} == said
    assert (first["what"], second["what"]) == ("step", "connected")
    log.path.rename(tmp_path / "events.jsonl-20261125")  # As logrotate does it.
    log.emit("two")
    log.close()
    assert [event["what"] for event in read_events(log.path)] == ["two"]


def test_a_reader_goes_on_where_it_stopped_and_loses_only_what_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    blocks = event_blocks(path)
    assert list(new_events(blocks)) == []
    path.write_bytes(b'{"at": 1, "who": "up", "what": "a"}\n{"at": 2, "who"')
    assert [event["what"] for event in new_events(blocks)] == ["a"]
    with path.open("ab") as file:
        file.write(b': "up", "what": "b"}\nnot an event\n{"at": 3, "who": "up", "what": "c"}\n')
    assert [event["what"] for event in new_events(blocks)] == ["b", "c"]
    # As an earlier release left it, or another process that shares the file.
    whole = {"at": 2.0, "who": "site-b", "what": "step", "units": {"at": 3}}
    path.write_text('{"at": 1.0, "who": "site-a", "wh' + json.dumps(whole) + '\n{"at": 1.0, "who": "site-a"')
    assert list(read_events(path)) == [whole]
    log = EventLog(path, "site-a")
    log.emit("connected")
    log.close()
    assert [event["what"] for event in read_events(path)] == ["step", "connected"], "a dead process had cut that"


def write_steps(path: Path, who: str) -> None:
    with closing(EventLog(path, who)) as log:
        for number in range(300):
            log.emit("step", {"step": number, "text": "x" * 400})


def test_processes_share_a_file_without_mixing_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    names = ("site-a", "site-b", "syncer")
    with ProcessPoolExecutor(3, forkserver()) as processes:
        list(processes.map(partial(write_steps, path), names))
    for line in filter(None, path.read_text().splitlines()):  # One that opens it during a write begins a new line.
        json.loads(line)
    events = list(read_events(path))
    for name in names:
        assert [event["step"] for event in events if event["who"] == name] == list(range(300))


def test_processes_turn_a_shared_file_over_and_readers_follow_however_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eventlog, "BLOCK_BYTES", 100)
    monkeypatch.setattr(eventlog, "FILE_BYTES_MAX", 2000)
    path, seen, late = tmp_path / "events.jsonl", list[Event](), list[Event]()
    writers = {who: FileLines(path, lambda count, why: "") for who in ("site-a", "site-b")}
    soon, slow = event_blocks(path), event_blocks(path)
    for step in range(500):
        for who, lines in writers.items():
            lines.write(json.dumps({"at": 1, "who": who, "what": "step", "step": step}) + "\n")
        seen += new_events(soon)
        if step % 50 == 0:  # Two new files have begun since.
            late += new_events(slow)
    late += new_events(slow)
    assert late == seen
    for who, lines in writers.items():
        lines.close()
        assert [event["step"] for event in seen if event["who"] == who] == list(range(500))
    sizes = [each.stat().st_size for each in tmp_path.iterdir()]
    assert len(sizes) == FILES_MAX
    assert max(sizes) < 2100
    kept = list(read_events(path))
    assert len(kept) > 30 * FILES_MAX
    assert kept == seen[-len(kept) :], "older files come first"


class Disk:
    """One that takes so many bytes, and then none before it has ``room`` again."""

    def __init__(self, room: int) -> None:
        self.room, self.taken = room, b""

    def write(self, data: memoryview) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        fits = bytes(data[: self.room])
        self.taken, self.room = self.taken + fits, self.room - len(fits)
        return len(fits)


@pytest.mark.parametrize(("room", "cut", "refused"), [(10, "", 2), (15, "secon\n", 2), (8, "", 3)])
def test_what_a_full_disk_refuses_is_counted_and_said_once(room: int, cut: str, refused: int) -> None:
    disk, missing = Disk(room), "[a] lines missing here: {} (No space left on device)\n"
    lines = LineWriter(disk.write, missing_lines("a"))
    for line in ("the first\n", "second\n", "third\n"):
        lines.write(line)
    disk.room = 1000
    for line in ("fourth\n", "fifth\n"):
        lines.write(line)
    first = "the first\n" if room > 8 else "the firs\n"
    assert disk.taken.decode() == f"{first}{cut}{missing.format(refused)}fourth\nfifth\n"
    disk = Disk(3)
    lines = LineWriter(disk.write, missing_lines("a"))
    lines.write("only\n")
    disk.room = 4  # Not enough: that it is missing is said whole or again.
    lines.write("another\n")
    disk.room = 1000
    lines.write("third\n")
    assert disk.taken.decode() == f"onl\n[a]\n{missing.format(2)}third\n"


@contextmanager
def full(path: Path, room: int) -> Iterator[None]:
    """As by a disk with so much room left: the kernel takes what fits of a write, and then none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_log_heals_with_the_disk_and_a_line_cut_short_costs_itself_alone(tmp_path: Path) -> None:
    """The next event was glued to it, and neither could be read."""
    taken: queue.SimpleQueue[Event] = queue.SimpleQueue()
    log = EventLog(tmp_path / "events.jsonl", "site-a", also=taken.put)
    log.emit("step", {"step": 1})
    assert taken.get(timeout=30)["step"] == 1
    with full(log.path, room=40):
        for step in (2, 3, 4):
            log.emit("step", {"step": step})
            assert taken.get(timeout=30)["step"] == step, "the terminal goes on"
    log.emit("step", {"step": 5})
    log.close()
    first, missing, last = read_events(log.path)
    assert (first["step"], last["step"]) == (1, 5)
    assert (missing["note"], missing["count"]) == ("events_not_written", 3)
    assert missing["why"] == "events missing here: 3 (File too large)"
    assert len(log.path.read_text().splitlines()) == 4, "and the piece of line that there was room for"

    again = EventLog(tmp_path / "again.jsonl", "site-a", also=taken.put)
    again.emit("step", {"step": 6})
    assert [taken.get(timeout=30)["step"] for _ in range(2)] == [5, 6]
    with full(again.path, room=0):
        again.emit("step", {"step": 7})
        assert taken.get(timeout=30)["step"] == 7
    again.close()
    _, missing = read_events(again.path)
    assert missing["note"] == "events_not_written", "said at the end too"


def test_a_follower_that_fails_ends_neither_the_log_nor_the_others(tmp_path: Path, logged: list[str]) -> None:
    log, taken = EventLog(tmp_path / "events.jsonl", "syncer"), []

    def fails(event: Event) -> None:
        raise KeyError(event["number"])

    log.follow(fails)
    log.follow(taken.append)
    for number in range(3):
        log.emit("step", {"number": number})
    log.close()
    events = list(read_events(log.path))
    assert [event["number"] for event in events if event["what"] == "step"] == [0, 1, 2]
    assert [event["number"] for event in taken] == [0, 1, 2]
    assert log.failures == 3
    (said,) = [event for event in events if event["what"] == "note"]
    assert (said["note"], said["why"]) == ("follower_failed", "KeyError(0)")
    assert ["in fails" in text for text in logged] == [True], "once, with where it failed"


def test_what_waits_to_be_written_is_bounded_and_what_is_left_out_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eventlog, "WAITING_MAX", 10)
    gate, begun = threading.Event(), threading.Event()

    def stands(event: Event) -> None:
        begun.set()
        gate.wait(30)

    log = EventLog(tmp_path / "events.jsonl", "site-a", also=stands)
    log.emit("step", {"number": 0})
    assert begun.wait(30)
    for number in range(1, 26):
        log.emit("step", {"number": number})
    gate.set()
    log.close()
    events = list(read_events(log.path))
    assert [event["number"] for event in events if event["what"] == "step"] == list(range(11))
    (said,) = [event for event in events if event["what"] == "note"]
    assert (said["note"], said["count"]) == ("events_left_out", 15)


def test_a_rare_event_is_found_behind_many_others_in_an_older_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eventlog, "FILE_BYTES_MAX", 6000)
    path = tmp_path / "events.jsonl"
    log = EventLog(path, "syncer")
    log.emit("published", {"version": 7})
    for number in range(200):
        log.emit("reported", {"step": number})
    log.close()
    assert len(list(tmp_path.iterdir())) == 3
    monkeypatch.setattr(eventlog, "RECENT_BYTES", 500)
    events, blocks = recent_events(path, "published")
    assert (events[0]["version"], next(blocks)) == (7, [])
    assert [event["step"] for event in events[1:]] == list(range(200))
    assert len(recent_events(path, "reported")[0]) < 10
    monkeypatch.setattr(eventlog, "RECENT_BYTES_MAX", 2000)
    assert 0 < len(recent_events(path, "published")[0]) < 200, "no further than the bound"
    assert recent_events(tmp_path / "none.jsonl", "published")[0] == []
