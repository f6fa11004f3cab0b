from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from diloco.observe import view
from diloco.observe.console import SiteLines, identity_lines, missing_lines
from diloco.observe.eventlog import Event, LineWriter
from diloco.observe.history import RunHistory
from diloco.observe.text import CAUSED, ENDED, clock, count, sentence, size, times_less, units_shortly, units_text
from diloco.observe.view import Facts, LiveView, PlainView, make_view, screen, sparkline, standing, time_left
from diloco.runs.scenario import KINDS
from tests.observe.recorded import BEGIN, SITES, Recorder

FACTS = Facts(name="quiet-otter", what="tiny transformer · int4", seconds=60)


def played(seconds: float) -> RunHistory:
    history = RunHistory()
    for event in Recorder(60).record():
        history.take(event)
        if history.seconds > seconds:
            break
    return history


def shown(history: RunHistory, width: int = 100) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(screen(history, FACTS, width))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_the_screen_in_the_middle_of_a_partition() -> None:
    lines = shown(played(33.5))
    text = "\n".join(lines)
    assert lines[0] == "diloco quiet-otter  tiny transformer · int4"
    assert lines[1] == "validation bits/byte  2.023  █▅▄▃▂▁▁  from 4.57   xz 1.32   zlib -9 1.81"
    assert "0:34  51%  0:29 left   166k tokens merged" in text
    (row,) = [line for line in lines if line.strip().startswith("site-c  ")]
    words = "site-c alone 62 4.27k 2.941 13 14 2 1 partition 1.74 MB 1.39 MB 0.4%"
    assert " ".join(row.split()) == words
    assert "syncer up  epoch 1  versions 15 15  30 rounds  last from site-a site-b" in lines
    assert "FAULT link:site-c is cut: nothing crosses it, for 10 s" in text
    assert "units  1,355 leased, 1,160 merged, 3 partly, 1 repeated" in lines
    assert sparkline([4.0, 3.0, 2.0]) == "█▅▁"
    assert sparkline([1.0]) == sparkline([1.0, 1.0])[0]
    assert len(sparkline([float(number) for number in range(500)])) == view.SPARKS_MAX


def test_at_any_time_the_screen_fits_and_shows_what_is_dead_not_leased_or_not_known_yet() -> None:
    for width in (60, 80, 100, 160):
        for seconds in (0, 17, 33, 43, 999):
            lines = shown(played(seconds), width)
            assert max(map(len, lines)) <= width
            assert len(lines) <= 24 or width < 80
            assert width < 80 or seconds < 17 or all(any(name in line for line in lines) for name in SITES)
    (row,) = [line for line in shown(played(17)) if line.strip().startswith("site-b")]
    assert row.split()[1] == "killed"
    assert any(line.startswith("syncer down") for line in shown(played(43)))
    history = played(33.5)
    history.units = {}
    assert not any(line.startswith("units") for line in shown(history))
    assert len(list(standing(history, FACTS))) == 1
    text = "\n".join(shown(RunHistory()))
    assert "starting" in text
    assert "syncer down" in text


def test_the_time_left_is_of_the_clock_or_of_the_pace() -> None:
    history = played(33.5)
    assert time_left(history, FACTS) == pytest.approx(60 * (1 - 30.5 / 60), abs=1.5)
    without = Facts(name="x", what="", seconds=None)
    assert time_left(history, without) == pytest.approx(30.5, rel=0.2)
    assert time_left(RunHistory(), FACTS) is None
    assert time_left(played(999), FACTS) is None
    # Between the last step of one `up` and the first of the next nothing ran.
    before = time_left(history, without)
    for at, who, what in ((34, "up", "ended"), (900, "up", "started"), (960, "site-a", "joined")):
        history.take({"at": BEGIN + at, "who": who, "what": "run" if who == "up" else what, "state": what})
        assert time_left(history, without) == pytest.approx(before, abs=1.0)
    history.take({"at": BEGIN + 970, "who": "site-a", "what": "step", "step": 1, "tokens": 1})
    assert time_left(history, without) == pytest.approx(before, abs=1.0)
    history.take({"at": BEGIN + 980, "who": "site-a", "what": "step", "step": 2, "tokens": 1})
    assert time_left(history, without) == pytest.approx(before * 40.5 / 30.5, abs=1.0)


def test_plain_lines_come_once_and_in_order() -> None:
    out = io.StringIO()
    history = RunHistory()
    with PlainView(history, FACTS, Console(file=out, color_system=None, width=40)) as plain:
        for event in Recorder(60).record():
            history.take(event)
            plain.show()
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("diloco quiet-otter")
    assert sum("FAULT" in line for line in lines) == 3
    assert sum("RECOVERED" in line for line in lines) == 3
    standings = [line for line in lines if "versions" in line and "%" in line]
    assert 5 <= len(standings) <= 7
    assert all("site-a" in line and "site-c" in line for line in standings), "a line was wrapped"
    units = [line.strip() for line in lines if "units of the data" in line]
    assert len(units) == len(standings)
    assert units[0] == "units of the data: 432 leased, 240 merged, 0 partly, 1 repeated"
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({"FORCE_COLOR": "1", "NO_COLOR": ""}, LiveView),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, PlainView),
        ({"FORCE_COLOR": "1", "CI": "true"}, PlainView),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, PlainView),
        ({}, PlainView),
    ],
)
def test_who_sees_what(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], wanted: type) -> None:
    for name in ("NO_COLOR", "CI", "TERM", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert isinstance(make_view(RunHistory(), FACTS), wanted)


def test_the_live_screen_draws_and_lets_lines_stand() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, height=40)
    with LiveView(played(33.5), FACTS, console) as live:
        live.show()
        live.say("asked to stop")
    assert "quiet-otter" in out.getvalue()
    assert "asked to stop" in out.getvalue()


def test_figures_in_words() -> None:
    counts = (0, 999, 999.9, 12_345, 999_700, 27e9, 2.1375e15)
    assert [count(value) for value in counts] == ["0", "999", "1.00k", "12.3k", "1.00M", "27.0G", "2.14P"]
    assert [size(value) for value in (12, 240_000, 10_400_000)] == ["12 B", "240 kB", "10.4 MB"]
    assert [clock(value) for value in (-3, 0, 59.6, 61, 3600)] == ["0:00", "0:00", "1:00", "1:01", "1:00:00"]
    shares = [times_less(*each) for each in ((1, 64), (10, 64), (64, 32), (0, 5), (5, 0))]
    assert shares == ["1/64 of", "1/6.4 of", "2.0 times", "-", "-"]


@pytest.mark.parametrize(
    ("who", "what", "fields", "wanted"),
    [
        ("up", "fault", {"fault": "kill", "target": "site-b", "seconds": 6.0}, "FAULT site-b is killed (SIGKILL), for"),
        ("up", "healed", {"fault": "kill", "target": "site-b"}, "RECOVERED site-b: restarted"),
        ("syncer", "resumed", {"why": "the run had been drained"}, "the run resumed: the run had been"),
        ("site-b", "resumed", {"step": 40, "tokens_lost": 10240}, "10,240 tokens lost"),
        ("site-c", "disconnected", {"why": "no answer"}, "site-c lost the syncer and trains on: no answer"),
        ("syncer", "refused", {"site": "site-c", "reason": "stale"}, "update of site-c was refused: stale"),
        ("up", "eval", {"val_bits_per_byte": 1.9, "versions": [3]}, "validation 1.900 bits/byte at versions 3"),
        ("syncer", "syncer_started", {"epoch": 2, "recovered": 12}, "epoch 2, 12 journal records"),
        ("up", "process", {"name": "a", "state": "ended", "unasked": True, "code": 1, "why": "x"}, "exit code 1: x"),
    ],
)
def test_what_happened_in_words(who: str, what: str, fields: dict[str, Any], wanted: str) -> None:
    assert wanted in str(sentence({"who": who, "what": what, **fields}))


def test_every_fault_of_a_scenario_has_words_and_what_happens_all_the_time_is_not_told() -> None:
    assert set(CAUSED) == set(KINDS)
    assert set(ENDED) == {name for name, (_, lasts) in KINDS.items() if lasts != "never"}
    quiet = {"step", "meter", "pushed", "fetched", "adopted", "sealed", "link", "published", "outer_step", "joined"}
    assert {event["what"] for event in Recorder(10).record() if sentence(event) is None} >= quiet


# --- Units of the data in words --------------------------------------------------------------------------------------

UNITS = {"processed": 1201, "leased": 1300, "merged": 1200, "partly": 0, "in_hand": 100}
UNITS |= {"given_back": 0, "reissued": 7, "repeated": 0, "sequences": 64}


def test_units_of_the_data_without_what_is_empty_and_in_columns() -> None:
    wanted = "units of 64 sequences: 1,300 leased, 1,201 processed, 1,200 merged, 100 in hand, 7 re-issued"
    assert units_text(UNITS) == wanted
    assert units_text(dict.fromkeys(UNITS, 0)).endswith("0 merged")
    every = dict.fromkeys(UNITS, 1)
    assert units_text(every).endswith("1 partly merged, 1 in hand, 1 given back, 1 re-issued, 1 repeated")
    assert units_shortly(UNITS) == "1,300 leased, 1,200 merged, 0 partly, 0 repeated"
    assert units_shortly({}) == "0 leased, 0 merged, 0 partly, 0 repeated"


def event(what: str, **fields: object) -> Event:
    return {"at": 1.0, "who": "site-a", "what": what, **fields}


def test_a_step_line_has_torchtitans_words_and_ours_behind_the_bar() -> None:
    out = io.StringIO()
    lines = SiteLines(10, [out])
    lines(event("joined", incarnation=1, epoch=1, versions=[3, 4]))
    lines(event("adopted", fragment=1, version=5, merged=[2]))
    lines(event("meter", staleness=1, bytes_up=2048, bytes_down=3 << 20))
    step = {"loss": 2.438912, "grad_norm": 0.9213, "tokens_per_s": 8120.4, "lr": 0.02}
    for number in range(1, 21):
        lines(event("step", step=number, **step))
    said = out.getvalue().splitlines()
    assert said[0].startswith("[site-a] joined: incarnation 1")
    assert len(said) == 3
    assert said[1] == (
        "[site-a] step:     10  loss:  2.43891  grad_norm:  0.9213  tps: 8,120  lr: 0.02000 "
        "| v: 3,5  stale: 1  up: 2.05 kB  down: 3.15 MB"
    )
    lines(event("step", step=30, **step, mfu=0.40661))
    assert "tps: 8,120  mfu: 40.66%  lr: 0.02000 |" in out.getvalue().splitlines()[-1]


def test_who_may_come_in_now_is_said_and_no_other_note_and_a_terminal_that_went_away_ends_nothing() -> None:
    out = io.StringIO()
    lines = identity_lines(out)
    for kind in ("identity", "digest_differs"):
        lines(event("note", note=kind, why="permissions cannot be used"))
    lines(event("syncer_started"))
    lines(event("note", note="backup_behind", why="if another syncer leads the run now, end this one"))
    first, last = out.getvalue().splitlines()
    assert first == "access rules: permissions cannot be used"
    assert last == "BEHIND: if another syncer leads the run now, end this one"

    def gone(data: memoryview) -> int:
        raise BrokenPipeError

    said = SiteLines(1, [LineWriter(gone, missing_lines("site-a")), out := io.StringIO()])
    for step in (1, 2):
        said(event("step", step=step))
    assert len(out.getvalue().splitlines()) == 2, "and the log goes on"


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (event("pushed", fragment=0, sequence=3, outcome="accepted", reason=None), ""),
        (event("pushed", fragment=0, sequence=4, reason="stale"), ""),  # "update_kept" says so.
        (event("pushed", fragment=0, sequence=4, reason="outlier"), "refused: fragment 0 update 4: outlier\n"),
        (event("fate", fragment=0, sequence=4, reason="non_finite"), "refused: fragment 0 update 4: non_finite\n"),
        (event("disconnected", why="the syncer closed the stream"), "disconnected: the syncer closed the stream\n"),
        (event("retaken", fragment=0, why="a new site", at=2.0), "retaken: fragment 0: a new site\n"),
        (event("adapted", up={"rate": 1.25, "codecs": ["a", "b"]}), "adapted: up (rate 1.25, codecs a/b)\n"),
        (event("step", step=10, loss=None), "step:     10  loss:      nan  "),
    ],
)
def test_an_event_in_words(told: Event, said: str) -> None:
    out = io.StringIO()
    SiteLines(10, [out])(told)
    assert out.getvalue().startswith(f"[site-a] {said}" if said else "")
    assert bool(out.getvalue()) == bool(said)
