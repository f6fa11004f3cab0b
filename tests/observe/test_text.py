from __future__ import annotations

import pytest

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
