from __future__ import annotations

import pytest

from diloco.observe.text import CAUSED, ENDED, sentence
from diloco.runs.scenario import KINDS
from tests.launch.recorded import Recorder


def test_every_fault_of_a_scenario_has_words() -> None:
    assert set(CAUSED) == set(KINDS)
    assert set(ENDED) == {name for name, (_, lasts) in KINDS.items() if lasts != "never"}


@pytest.mark.parametrize(
    ("event", "wanted"),
    [
        (
            {"who": "up", "what": "fault", "fault": "kill", "target": "site-b", "seconds": 6.0},
            "FAULT site-b is killed (SIGKILL), for 6 s",
        ),
        ({"who": "up", "what": "healed", "fault": "kill", "target": "site-b"}, "HEALED site-b is started again"),
        ({"who": "syncer", "what": "resumed", "why": "the run had been drained"}, "the run goes on: the run had been"),
        ({"who": "site-b", "what": "resumed", "step": 40, "tokens_lost": 10240}, "10,240 tokens were lost"),
        (
            {"who": "site-c", "what": "disconnected", "why": "no answer"},
            "site-c lost the syncer and trains on: no answer",
        ),
        (
            {"who": "syncer", "what": "refused", "site": "site-c", "reason": "stale"},
            "update of site-c was refused: stale",
        ),
        (
            {"who": "up", "what": "eval", "val_bits_per_byte": 1.9, "versions": [3, 4]},
            "validation 1.900 bits/byte at versions 3 4",
        ),
        ({"who": "syncer", "what": "syncer_started", "epoch": 2, "recovered": 12}, "epoch 2, 12 journal records"),
        (
            {
                "who": "up",
                "what": "process",
                "name": "site-a",
                "state": "ended",
                "unasked": True,
                "code": 1,
                "why": "x",
            },
            "site-a ended unasked with exit code 1: x",
        ),
    ],
)
def test_what_happened_in_words(event: dict[str, object], wanted: str) -> None:
    assert wanted in str(sentence(event))


def test_what_happens_all_the_time_is_not_told() -> None:
    quiet = {"step", "meter", "pushed", "fetched", "adopted", "sealed", "link", "published", "outer_step", "joined"}
    assert {event["what"] for event in Recorder(10).record() if sentence(event) is None} >= quiet
