"""Whoever asks a standby for what only a syncer gives is sent there."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.outer.optimizer import OuterOptimizerOptions, OuterRule
from diloco.sync.options import HealthOptions, OuterOptions
from diloco.syncer.options import RunPlan
from diloco.syncer.standby import StandingBy
from diloco.wire.messages import ProbeAsk, Refusal, Status
from tests.syncer.building import LAYOUT, RUN, agreement

ASK: dict[str, Callable[[StandingBy], object]] = {
    "join": lambda api: api.join(None),  # type: ignore[arg-type,func-returns-value]
    "open_push": lambda api: api.open_push(None),  # type: ignore[arg-type,func-returns-value]
    "watch": lambda api: api.watch("a", 1),  # type: ignore[arg-type,func-returns-value]
    "pull": lambda api: api.pull(None, None),  # type: ignore[arg-type,func-returns-value]
    "report": lambda api: api.report(None),  # type: ignore[arg-type,func-returns-value]
    "leave": lambda api: api.leave("a", 1),  # type: ignore[arg-type,func-returns-value]
    "drain": lambda api: api.drain(),  # type: ignore[func-returns-value]
    "evict": lambda api: api.evict("a"),  # type: ignore[func-returns-value]
    "readmit": lambda api: api.readmit("a"),  # type: ignore[func-returns-value]
    "admit": lambda api: api.admit("a", 0, 1),  # type: ignore[func-returns-value]
    "refuse": lambda api: api.refuse("a", 0, 1),  # type: ignore[func-returns-value]
    "snapshot": lambda api: api.snapshot(),  # type: ignore[func-returns-value]
    "detach": lambda api: api.detach(),  # type: ignore[func-returns-value]
}


def an_api(why_not: str | None = None, **standby: Any) -> StandingBy:
    succession = SimpleNamespace(refusal=lambda lossy: why_not, status=lambda: None)
    api = StandingBy(SimpleNamespace(**standby), "host:7077", None, None)  # type: ignore[arg-type]
    api._succession = succession  # type: ignore[assignment]
    return api


@pytest.mark.parametrize("method", ASK)
def test_it_says_where_to_ask(method: str) -> None:
    with pytest.raises(Refusal, match="this is the standby of host:7077: ask there") as refused:
        ASK[method](an_api())
    assert refused.value.status is Status.UNAVAILABLE, "a site tries the next address after that"


def test_it_takes_over_when_it_has_something_to_go_on_from() -> None:
    api = an_api(ready=False)
    with pytest.raises(Refusal, match="no state to go on from"):
        api.promote(lossy=False)
    assert not api.promoted.is_set()
    api = an_api("it is not the heir", ready=True)
    with pytest.raises(Refusal, match="it is not the heir"):
        api.promote(lossy=False)
    assert not api.promoted.is_set()
    api = an_api(ready=True)
    api.promote(lossy=True)
    assert api.promoted.is_set()
    assert api.lossy


def test_its_status_says_whose_standby_it_is() -> None:
    api = an_api(status=lambda: {"role": "standby"})
    assert api.status() == {"role": "standby", "primary": "host:7077", "lease": None, "identity_complaints": []}


def test_a_probe_is_answered_here_and_told_where_the_syncer_is() -> None:
    api = an_api(
        plan=RunPlan(agreement(), LAYOUT, "shared", OuterOptions(), OuterRule(OuterOptimizerOptions()), HealthOptions())
    )
    told = api.probe(ProbeAsk(2, RUN, shared_config={"outer.lr": "9"}))
    assert (told.standby_of, told.run_id) == ("host:7077", RUN)
    assert told.difference
