from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diloco.observe.history import RunHistory
from diloco.observe.summary import SCHEMA, WIDTH, closing_lines, summarize
from tests.launch.recorded import Recorder


def closed(recorder: Recorder, **changes: Any) -> list[str]:
    history = RunHistory()
    history.take_all(sorted(recorder.events, key=lambda event: float(str(event["at"]))))
    summary = summarize(history, recorder.status(), {}, **changes)
    return closing_lines(summary, history, Path("runs/quiet-otter"))


def test_the_table_says_what_was_reached_and_fits() -> None:
    recorder = Recorder()
    recorder.record()
    lines = closed(recorder)
    text = "\n".join(lines)
    assert lines[0] == "quiet-otter: ok, after 1:06"
    assert "1.720 bits/byte of validation text (xz 1.32, zlib -9 1.81)" in text
    assert "kill site-b at 0:15 for 6.0 s" in text
    assert "site-a=18, site-b=18, site-c=18" in " ".join(text.split())
    assert "runs/quiet-otter/" in text
    assert max(map(len, lines)) <= WIDTH
    assert len(lines) <= 22


@pytest.mark.parametrize(
    ("formats", "said"),
    [
        (("fp32", "fp32", "fp32"), "site-a 6.83k, site-b 5.64k, site-c 4.27k, products in fp32"),
        (("fp32", "bf16", ""), "site-a 6.83k (fp32), site-b 5.64k (bf16), site-c 4.27k (?)"),
    ],
)
def test_what_each_machine_gave_is_said(formats: tuple[str, ...], said: str) -> None:
    recorder = Recorder()
    recorder.record()
    for site, products in zip(("site-a", "site-b", "site-c"), formats, strict=True):
        if products:
            recorder.say(1, site, "number_format", products=products)
    assert [line for line in closed(recorder) if line.startswith("speed")] == [f"speed   tokens/s: {said}"]


def test_where_the_units_of_the_data_are_is_said_where_any_were_leased() -> None:
    recorder = Recorder()
    recorder.record()
    history = RunHistory()
    units = dict.fromkeys(SCHEMA["units"], 123_456_789)
    summary = summarize(history, {**recorder.status(), "units": units}, {})
    lines = closing_lines(summary, history, Path("runs/quiet-otter"))
    (begin,) = [number for number, line in enumerate(lines) if line.startswith("data    units of")]
    assert "123,456,789 re-issued" in " ".join(lines[begin : begin + 4])
    assert max(map(len, lines)) <= WIDTH
    assert not [line for line in closed(recorder) if line.startswith("data")]


def test_a_site_and_its_numbers_stand_in_their_columns() -> None:
    recorder = Recorder()
    recorder.record()
    lines = closed(recorder)
    head = next(line for line in lines if line.startswith("site  "))
    row = next(line for line in lines if line.startswith("site-b"))
    assert len(row) == len(head)
    for name, cell in zip(head.split()[1:], row.split()[1:], strict=True):
        assert row[: head.index(name) + len(name)].endswith(f" {cell}"), name
    assert row.split()[4] == "10.2k"


@pytest.mark.parametrize("sites", [[], ["a-site-with-a-very-long-name"], [f"site-{number}" for number in range(30)]])
def test_any_run_fits(sites: list[str]) -> None:
    recorder = Recorder()
    recorder.say(0, "up", "run", state="started", sites=sites)
    for number in range(40):
        recorder.say(1 + number, "up", "fault", fault="reset", target=f"link:{sites[0] if sites else 'x'}")
    lines = closed(recorder, wrong=["site-a ended with exit code 1: " + "long words " * 30])
    assert max(map(len, lines)) <= WIDTH
