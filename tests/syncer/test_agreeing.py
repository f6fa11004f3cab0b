"""What a probe is told is what a join would be refused for, and neither touches the machine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from diloco.outer.fragments import plan_layout
from diloco.sync.options import PROTOCOL, PROTOCOL_OLDEST
from diloco.syncer.api import difference
from diloco.wire.messages import ProbeAsk, Refusal
from tests.syncer.building import LAYOUT, RUN, SHARED, agreement, files, join_ask, serving

if TYPE_CHECKING:
    from pathlib import Path

OTHER = plan_layout([("w", (5, 2)), ("b", (3,))], 2)


def ask(**changes: Any) -> ProbeAsk:
    whole = ProbeAsk(PROTOCOL, RUN, LAYOUT.fingerprint, LAYOUT.to_json().encode(), SHARED)
    return replace(whole, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"protocol": 0},
        {"shared_config": {}},
        {"shared_config": {**SHARED, "extra": "1"}},
        {"layout_fingerprint": "0" * 64, "layout_json": b""},
        {"layout_fingerprint": OTHER.fingerprint, "layout_json": OTHER.to_json().encode()},
    ],
)
def test_a_probe_is_told_what_a_join_is_refused_for(tmp_path: Path, changes: dict[str, Any]) -> None:
    with serving(tmp_path) as syncer:
        before = files(tmp_path)
        told = syncer.api.probe(ask(**changes))
        assert files(tmp_path) == before
        assert syncer.core.ask(lambda machine: list(machine.state.sites)) == []
        refused = ""
        try:
            syncer.api.join(join_ask(**changes))
        except Refusal as refusal:
            refused = refusal.text
    assert told.difference == refused
    assert bool(refused) == bool(changes)
    assert (told.protocol, told.protocol_oldest, told.run_id, told.standby_of) == (PROTOCOL, PROTOCOL_OLDEST, RUN, "")


def test_without_a_run_nothing_is_compared(tmp_path: Path) -> None:
    with serving(tmp_path) as syncer:
        assert syncer.api.probe(ProbeAsk(99)).difference == ""
        assert syncer.api.probe(ProbeAsk(PROTOCOL, RUN, shared_config=SHARED)).difference == ""


def test_who_asks_is_told_what_a_join_must_say(tmp_path: Path) -> None:
    with serving(tmp_path) as syncer:
        told = syncer.api.probe(ProbeAsk(PROTOCOL))
        assert told.run_id == RUN
        assert syncer.api.join(join_ask(shared_config=told.shared_config)).incarnation == 1


def test_a_layout_that_is_none_is_the_senders_fault(tmp_path: Path) -> None:
    with serving(tmp_path) as syncer, pytest.raises(Refusal, match="layout_json describes no layout"):
        syncer.api.probe(ask(layout_fingerprint="0" * 64, layout_json=b"{"))


def test_a_lineage_from_the_future_is_a_difference(tmp_path: Path) -> None:
    with serving(tmp_path) as syncer:
        theirs = replace(agreement(), lineage=9)
        text = difference(syncer.plan, 7, theirs, b"")
    assert text is not None
    assert text.startswith("lineage is 9 at the site and 7 at the syncer")
