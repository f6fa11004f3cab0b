from __future__ import annotations

import io

import pytest

from diloco.observe.console import SiteLines, identity_lines, missing_lines
from diloco.observe.eventlog import Event, LineWriter
from diloco.observe.text import CAUSED, ENDED, clock, count, sentence, size, times_less, units_shortly, units_text
from diloco.runs.scenario import KINDS
from tests.observe.recorded import Recorder


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        *[(count(value), wanted) for value, wanted in ((0, "0"), (999, "999"), (999.9, "1.00k"), (12_345, "12.3k"))],
        *[(count(value), wanted) for value, wanted in ((999_700, "1.00M"), (27e9, "27.0G"), (2.1375e15, "2.14P"))],
        *[(size(value), wanted) for value, wanted in ((12, "12 B"), (240_000, "240 kB"), (10_400_000, "10.4 MB"))],
        *[(clock(value), wanted) for value, wanted in ((0, "0:00"), (59.6, "1:00"), (61, "1:01"), (-3, "0:00"))],
        (clock(3600), "1:00:00"),
        *[(times_less(1, 64), "1/64 of"), (times_less(10, 64), "1/6.4 of"), (times_less(64, 32), "2.0 times")],
        *[(times_less(0, 5), "-"), (times_less(5, 0), "-")],
    ],
)
def test_figures_in_words(value: str, wanted: str) -> None:
    assert value == wanted


def test_every_fault_of_a_scenario_has_words() -> None:
    assert set(CAUSED) == set(KINDS)
    assert set(ENDED) == {name for name, (_, lasts) in KINDS.items() if lasts != "never"}


def said(who: str, what: str, **fields: object) -> str:
    return str(sentence({"who": who, "what": what, **fields}))


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        (said("up", "fault", fault="kill", target="site-b", seconds=6.0), "FAULT site-b is killed (SIGKILL), for 6"),
        (said("up", "healed", fault="kill", target="site-b"), "RECOVERED site-b: restarted"),
        (said("syncer", "resumed", why="the run had been drained"), "the run resumed: the run had been"),
        (said("site-b", "resumed", step=40, tokens_lost=10240), "10,240 tokens lost"),
        (said("site-c", "disconnected", why="no answer"), "site-c lost the syncer and trains on: no answer"),
        (said("syncer", "refused", site="site-c", reason="stale"), "update of site-c was refused: stale"),
        (said("up", "eval", val_bits_per_byte=1.9, versions=[3, 4]), "validation 1.900 bits/byte at versions 3 4"),
        (said("syncer", "syncer_started", epoch=2, recovered=12), "epoch 2, 12 journal records"),
        (said("up", "process", name="a", state="ended", unasked=True, code=1, why="x"), "unasked with exit code 1: x"),
    ],
)
def test_what_happened_in_words(told: str, wanted: str) -> None:
    assert wanted in told


def test_what_happens_all_the_time_is_not_told() -> None:
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


# ---  ----------------------------------------------------------------------------------------------------------------


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
