"""The training thread stands still for as long as its values are read, and no longer."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from diloco.learner.exchange import Standstill
from diloco.learner.seal import SealJob
from diloco.learner.tensors import SealInputs
from diloco.sync.effects import Seal


def job(*, in_place: bool) -> SealJob:
    inputs = SealInputs(torch.zeros(3), [torch.zeros(3)], [], in_place=in_place)
    return SealJob(Seal(0, 1, 0, (), 1, 1, 1, 1, final=False), inputs, "int4")


def test_it_waits_for_what_is_read_in_place() -> None:
    changed = threading.Condition(threading.RLock())
    standstill, first, second = Standstill(changed, lambda: False), job(in_place=True), job(in_place=True)
    for each in (first, second, job(in_place=False)):
        standstill.begins(each)
    with changed, pytest.raises(TimeoutError, match="lock_step"):
        standstill.wait(time.monotonic() + 0.05)
    standstill.ends(first)
    with changed, pytest.raises(TimeoutError):
        standstill.wait(0.0)
    other = threading.Timer(0.05, standstill.ends, [second])
    other.start()
    with changed:
        standstill.wait(time.monotonic() + 30.0)
    other.join()


def test_a_copy_is_not_waited_for_and_a_failed_agent_waits_for_nothing() -> None:
    changed, failed = threading.Condition(threading.RLock()), False
    standstill = Standstill(changed, lambda: failed)
    standstill.begins(job(in_place=False))
    with changed:
        standstill.wait(0.0)
    standstill.begins(job(in_place=True))
    failed = True
    with changed:
        standstill.wait(0.0)
