"""The training thread stands still for as long as its values are read, and no longer."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from diloco.learner.seal import SealJob
from diloco.sync.effects import Retake, Seal
from tests.learner.test_exchange import Held
from tests.syncer.building import dice


def sealing(held: Held, sequence: int, *, at_rest: bool) -> SealJob:
    held.at_boundary(Seal(0, sequence, 0, (), 1, 1, 1, 1, final=False), "fp32", at_rest=at_rest)
    job = held.sealer.queue.get()
    assert isinstance(job, SealJob)
    return job


@pytest.fixture
def held(tmp_path: Path) -> Held:
    found = Held(tmp_path)
    found.arrive(0, dice("v0", 0))
    found.at_boundary(Retake(0, 0, (), "first version"))
    return found


def test_it_waits_for_what_is_read_in_place(held: Held) -> None:
    first, second = (sealing(held, sequence, at_rest=True) for sequence in (1, 2))
    sealing(held, 3, at_rest=False)
    with held.changed, pytest.raises(TimeoutError, match="lock_step"):
        held.stand_still(time.monotonic() + 0.05)
    held.was_read(first)
    with held.changed, pytest.raises(TimeoutError):
        held.stand_still(0.0)
    other = threading.Timer(0.05, held.was_read, [second])
    other.start()
    with held.changed:
        held.stand_still(time.monotonic() + 30.0)
    other.join()


def test_a_copy_is_not_waited_for_and_a_failed_agent_waits_for_nothing(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealing(held, 1, at_rest=False)
    with held.changed:
        held.stand_still(0.0)
    sealing(held, 2, at_rest=True)
    monkeypatch.setattr(held, "has_failed", lambda: True)
    with held.changed:
        held.stand_still(0.0)
