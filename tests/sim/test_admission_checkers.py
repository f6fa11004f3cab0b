"""The checker of admission, shown what it must not accept."""

from __future__ import annotations

import pytest

from diloco.sim.checkers import Violation
from diloco.sim.site_checkers import Admission
from diloco.sim.world import OuterPlan, OuterRule
from diloco.sync import effects as fx
from diloco.sync.events import Outcome, Reason
from diloco.sync.options import HealthOptions, OuterOptions
from tests.sync.driving import Syncer


def checker(policy: str) -> tuple[Admission, Syncer]:
    """A checker that has seen four updates that are alike."""
    syncer = Syncer(grace="fixed", grace_ns=0)
    found = Admission(OuterPlan(OuterOptions(), OuterRule(), health=HealthOptions(policy=policy)))
    for sequence in range(1, 5):
        arrives(found, syncer, sequence)
    return found, syncer


def arrives(found: Admission, syncer: Syncer, sequence: int, norm: float = 1.0, **answer: object) -> None:
    event = syncer.update("a", sequence, norm=norm, cosine=0.5)
    said = {"outcome": Outcome.ACCEPTED, "reason": None, **answer}
    notes = [fx.Note(str(what), "") for what in (said.pop("note", None),) if what]
    found.outer(0, event, [*notes, fx.AnswerPush(1, version=0, **said)], syncer.machine)  # type: ignore[arg-type]


def test_an_outlier_that_enters_without_a_word_is_seen() -> None:
    with pytest.raises(Violation, match="is an outlier under refuse"):
        arrives(*checker("refuse"), 5, 1e6)
    with pytest.raises(Violation):
        arrives(*checker("admit"), 5, 1e6)
    arrives(*checker("admit"), 5, 1e6, note="outlier_admitted")


def test_a_refusal_that_is_silent_or_wrong_is_seen() -> None:
    refused = {"outcome": Outcome.REFUSED, "reason": Reason.OUTLIER}
    with pytest.raises(Violation, match="is refused silently"):
        arrives(*checker("refuse"), 5, 1e6, **refused)
    with pytest.raises(Violation, match="is like the others"):
        arrives(*checker("refuse"), 5, 1.1, **refused, note="outlier_refused")
    arrives(*checker("refuse"), 5, 1e6, **refused, note="outlier_refused")
