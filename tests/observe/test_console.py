from __future__ import annotations

import io

import pytest

from diloco.observe.console import SiteLines, identity_lines, missing_lines
from diloco.observe.eventlog import Event, LineWriter


def event(what: str, **fields: object) -> Event:
    return {"at": 1.0, "who": "site-a", "what": what, **fields}


def test_a_step_line_has_torchtitans_words_and_ours_behind_the_bar() -> None:
    out = io.StringIO()
    lines = SiteLines("site-a", 10, [out])
    lines(event("joined", incarnation=1, epoch=1, versions=[3, 4]))
    lines(event("adopted", fragment=1, version=5, merged=[2]))
    lines(event("meter", staleness=1, bytes_up=2048, bytes_down=3 << 20))
    for step in range(1, 21):
        lines(event("step", step=step, loss=2.438912, grad_norm=0.9213, tokens_per_s=8120.4, lr=0.02))
    said = out.getvalue().splitlines()
    assert said[0].startswith("[site-a] joined: incarnation 1")
    assert len(said) == 3
    assert said[1] == (
        "[site-a] step:     10  loss:  2.43891  grad_norm:  0.9213  tps: 8,120  lr: 0.02000 "
        "| v: 3,5  stale: 1  up: 2.05 kB  down: 3.15 MB"
    )
    lines(event("step", step=30, loss=2.438912, grad_norm=0.9213, tokens_per_s=8120.4, lr=0.02, mfu=0.40661))
    assert "tps: 8,120  mfu: 40.66%  lr: 0.02000 |" in out.getvalue().splitlines()[-1]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (event("fate", fragment=0, sequence=3, version=4, reason=None), ""),
        (event("fate", fragment=0, sequence=4, version=None, reason="stale"), "refused: fragment 0 update 4: stale\n"),
        (event("adapted", up={"rate": 1.25, "codecs": ["a", "b"]}), "adapted: up (rate 1.25, codecs a/b)\n"),
        (event("step", step=10, loss=None), "step:     10  loss:      nan  "),
    ],
)
def test_an_event_in_words(told: Event, said: str) -> None:
    out = io.StringIO()
    SiteLines("site-a", 10, [out])(told)
    assert out.getvalue().startswith(f"[site-a] {said}" if said else "")
    assert bool(out.getvalue()) == bool(said)


def test_what_changes_about_who_may_come_in_is_said_and_no_other_note() -> None:
    out = io.StringIO()
    lines = identity_lines(out)
    for kind in ("identity", "digest_differs"):
        lines(event("note", note=kind, why="permissions cannot be used"))
    lines(event("syncer_started"))
    assert out.getvalue() == "who may come in: permissions cannot be used\n"


def test_a_terminal_that_went_away_ends_nothing() -> None:
    def gone(data: memoryview) -> int:
        raise BrokenPipeError

    said = SiteLines("site-a", 1, [LineWriter(gone, missing_lines("site-a")), out := io.StringIO()])
    for step in (1, 2):
        said(event("step", step=step))
    assert len(out.getvalue().splitlines()) == 2, "and the log goes on"
