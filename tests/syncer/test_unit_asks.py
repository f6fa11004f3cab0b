"""Asks for units of the data that come with heartbeats, at a syncer with a journal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco.sync import fates
from diloco.sync.agreement import CORPUS
from diloco.sync.events import SiteLeft, UnitsAsked, UnitsTold
from diloco.sync.progress import UnitAsk
from diloco.sync.state import Turn
from diloco.syncer.server import Syncer
from diloco.wire.messages import Refusal, Status
from tests.syncer.building import SHARED, join, join_ask, report, serving

LEASING: dict[str, Any] = {"outer": {"unit_sequences": 8}}


def told(syncer: Syncer, site: str = "a", known: int = 0, upto: int = 4, floor: int = 0) -> UnitsTold | None:
    ask = UnitAsk(known, known, upto, floor, 0)
    return syncer.api.report(report(site, versions=(), units=ask)).units


def asks(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The asks that the machine decides, and that are journalled."""
    found: list[object] = []
    right = fates.asked

    def asked(turn: Turn, event: UnitsAsked) -> None:
        found.append(event)
        right(turn, event)

    monkeypatch.setattr(fates, "asked", asked)
    return found


def test_a_heartbeat_brings_units_and_the_same_one_the_same_without_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided = asks(monkeypatch)
    with serving(tmp_path, **LEASING) as syncer:
        join(syncer, "a")
        join(syncer, "b")
        assert told(syncer) == UnitsTold(0, ((0, 4),))
        assert told(syncer) == UnitsTold(0, ((0, 4),))
        assert len(decided) == 1
        assert told(syncer, "b", upto=2) == UnitsTold(0, ((4, 2),))
        units = syncer.api.status()["units"]
        assert isinstance(units, dict)
        assert (units["leased"], units["in_hand"], units["merged"], units["sequences"]) == (6, 6, 0, 8)
        assert syncer.api.report(report("a", versions=())).units is None


def test_leases_are_there_after_a_restart(tmp_path: Path) -> None:
    with serving(tmp_path, **LEASING) as syncer:
        join(syncer, "a")
        told(syncer)
    with serving(tmp_path, **LEASING) as syncer:
        assert told(syncer) == UnitsTold(0, ((0, 4),))
        assert told(syncer, known=4, upto=5) == UnitsTold(4, ((4, 1),))


def test_who_does_not_speak_for_the_site_is_leased_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, **LEASING) as syncer:
        join(syncer, "a")
        syncer.core.call(lambda call: SiteLeft(call, "a", 1))
        assert told(syncer) is None


def test_where_nothing_is_leased_status_says_so(tmp_path: Path) -> None:
    with serving(tmp_path) as syncer:
        join(syncer, "a")
        assert told(syncer) is None
        assert syncer.api.status()["units"] is None


def test_another_text_is_refused_in_words_that_name_both(tmp_path: Path) -> None:
    with serving(tmp_path, **LEASING) as syncer:
        syncer.api.join(replace(join_ask("a"), shared_config={**SHARED, CORPUS: "1" * 64}))
        with pytest.raises(Refusal, match=r"data\.corpus is 222222222222 at the site and 111111111111") as caught:
            syncer.api.join(replace(join_ask("b"), shared_config={**SHARED, CORPUS: "2" * 64}))
        assert caught.value.status is Status.FAILED_PRECONDITION
        assert syncer.api.join(join_ask("c")).incarnation == 1, "it draws from data of its own"
