"""Several agents say what one site says."""

from __future__ import annotations

from diloco.learner.several_syncers import OneVoice, in_whole
from tests.syncer.building import Events

METER = {"bytes_up": 5, "bytes_down": 7, "in_flight": 1, "adopt_s": 0.5, "incarnation": 1, "staleness": 0, "link": 9}


def test_fragments_are_those_of_the_whole_model() -> None:
    events = Events()
    voice = OneVoice([[0, 2], [1, 3]], events.emit)
    voice.of(1)("adopted", {"fragment": 1, "version": 4})
    voice.of(0)("joined", {"versions": [7, 8]})
    voice.of(1)("note", {"note": "x", "fragment": None})
    assert events.all == [
        {"what": "adopted", "fragment": 3, "version": 4, "of_syncer": 1},
        {"what": "joined", "versions": [7, 8], "fragments": [0, 2], "of_syncer": 0},
        {"what": "note", "note": "x", "fragment": None, "of_syncer": 1},
    ]
    assert in_whole({"fragment": -1}, [4]) == {"fragment": -1}


def test_a_sites_meter_is_one_and_adds_up_what_its_agents_sent() -> None:
    events = Events()
    voice = OneVoice([[0], [1]], events.emit)
    voice.meter()
    assert not events.all, "nothing was measured yet"
    voice.spent.step(1_000_000, 10, 2.0)
    voice.spent.stalled(2_000_000, 0)
    voice.of(0)("meter", {**METER, "stall_s": 9.0})
    voice.of(1)("meter", {**METER, "incarnation": 3, "stall_s": 9.0})
    voice.of(0)("meter", {**METER, "stall_s": 9.0})
    assert len(events.of("meter")) == 2, "as often as one of them has one"
    told = events.of("meter")[-1]
    assert told["bytes_up"] == 10
    assert told["adopt_s"] == 1.0
    assert told["incarnation"] == 3
    assert told["stall_s"] == 0.002, "the loop's own clock counts, not the agents'"
    assert told["inner_steps"] == 1


def test_a_site_is_done_once() -> None:
    events = Events()
    voice = OneVoice([[0], [1]], events.emit)
    voice.of(0)("site_done", {"ledger": {}})
    assert not events.all
    voice.emit("site_done", {"ledger": {}})
    assert len(events.of("site_done")) == 1
