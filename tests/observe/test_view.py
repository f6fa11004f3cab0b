from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from diloco.observe import view
from diloco.observe.history import RunHistory
from diloco.observe.view import Facts, LiveView, PlainView, make_view, screen, sparkline, standing, time_left
from tests.observe.recorded import SITES, Recorder
from tests.sooner import sooner

FACTS = Facts(name="quiet-otter", what="tiny transformer · int4", seconds=60)


def played(seconds: float) -> RunHistory:
    history = RunHistory()
    for event in Recorder(60).record():
        history.take(event)
        if history.seconds > seconds:
            break
    return history


def shown(history: RunHistory, width: int = 100, facts: Facts = FACTS) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(screen(history, facts, width))
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


def test_what_is_dead_not_leased_or_not_known_yet_is_shown_as_such() -> None:
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


@pytest.mark.parametrize("width", sooner([60, 80, 100, 160], 60, 100))
def test_no_line_is_wider_than_the_console_and_all_fit_a_small_one(width: int) -> None:
    for seconds in (0, 1, 5, 17, 33, 43, 999):
        lines = shown(played(seconds), width)
        assert max(map(len, lines)) <= width
        assert len(lines) <= 24 or width < 80
    for name in SITES:
        assert any(name in line for line in shown(played(33), 80))


def test_a_sparkline_spans_its_range() -> None:
    assert sparkline([4.0, 3.0, 2.0]) == "█▅▁" or sparkline([4.0, 3.0, 2.0]) == "█▄▁"
    assert sparkline([1.0]) == sparkline([1.0, 1.0])[0]
    assert len(sparkline([float(number) for number in range(500)])) == view.SPARKS_MAX


def test_the_time_left_is_of_the_clock_or_of_the_pace() -> None:
    history = played(33.5)
    assert time_left(history, FACTS) == pytest.approx(60 * (1 - 30.5 / 60), abs=1.5)
    without = Facts(name="x", what="", seconds=None)
    assert time_left(history, without) == pytest.approx(30.5, rel=0.2)
    assert time_left(RunHistory(), FACTS) is None
    assert time_left(played(999), FACTS) is None


def test_plain_lines_come_once_and_in_order() -> None:
    out = io.StringIO()
    history = RunHistory()
    with PlainView(history, FACTS, Console(file=out, color_system=None, width=40)) as plain:
        for event in Recorder(60).record():
            history.take(event)
            plain.update()
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
    ("environment", "terminal", "wanted"),
    [
        ({}, True, LiveView),
        ({"NO_COLOR": "1"}, True, PlainView),
        ({"CI": "true"}, True, PlainView),
        ({"TERM": "dumb"}, True, PlainView),
        ({"NO_COLOR": ""}, True, LiveView),
        ({}, False, PlainView),
    ],
)
def test_who_sees_what(monkeypatch: Any, environment: dict[str, str], terminal: bool, wanted: type) -> None:
    for name in ("NO_COLOR", "CI", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1" if terminal else "")
    if not terminal:
        monkeypatch.delenv("FORCE_COLOR")
    assert isinstance(make_view(RunHistory(), FACTS, environment), wanted)


def test_the_live_screen_draws_and_lets_lines_stand() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, height=40)
    with LiveView(played(33.5), FACTS, console) as live:
        live.update()
        live.say("asked to stop")
    assert "quiet-otter" in out.getvalue()
    assert "asked to stop" in out.getvalue()
