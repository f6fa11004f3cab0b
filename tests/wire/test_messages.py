from __future__ import annotations

import dataclasses

import grpc

from diloco.wire import messages as m
from tests.wire.samples import everything

PARTS = {m.LearnerSettings, m.LinkInfo}
"""They travel inside of others, which have samples with and without them."""


def test_status_names_are_grpcs() -> None:
    assert {status.value for status in m.Status} == {code.name for code in grpc.StatusCode} - {"OK"}


def test_messages_are_frozen_and_all_have_a_sample() -> None:
    kinds = {
        value for value in vars(m).values() if dataclasses.is_dataclass(value) and value.__module__ == m.__name__
    } - PARTS
    assert all(kind.__dataclass_params__.frozen for kind in kinds)
    assert kinds <= {type(message) for message, _, _ in everything()}


def test_errors_carry_their_words() -> None:
    refusal = m.Refusal(m.Status.NOT_FOUND, "no such run", 5)
    assert (refusal.status, refusal.text, refusal.retry_ms) == (m.Status.NOT_FOUND, "no such run", 5)
    assert str(refusal) == "NOT_FOUND: no such run"
    assert str(m.Unreachable("away", 1.5)) == "away"
    assert str(m.Refused(m.Status.ABORTED, "no")) == "no"
