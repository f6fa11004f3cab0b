"""The hunt's table is complete, and a short hunt finds nothing."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from pathlib import Path

import pytest

from diloco.durable import KillingDisk, Step
from diloco.syncer.spool import Settled, Spool
from diloco.wire.messages import PushHeader
from tests.hunts.crash import BY_HAND, CASES, main

PAYLOAD = b"payload" * 100
DIGEST = hashlib.sha256(PAYLOAD).hexdigest()
HEADER = PushHeader("run", "a", 1, 0, 1, 0, 10, 1, 1, 1, False, "fp32", len(PAYLOAD), 175, DIGEST)


def test_every_step_has_a_kill_case() -> None:
    missing = set(Step) - set(CASES) - set(BY_HAND)
    assert not missing, f"steps without a kill case in tests/hunts/crash.py: {sorted(missing)}"
    assert not set(CASES) & set(BY_HAND)


def give_back(folder: Path, passage: int) -> None:
    spool = Spool(folder, KillingDisk(Step.SPOOL_BACK, passage))
    partial = spool.open_partial(HEADER)
    partial.write(memoryview(PAYLOAD))
    partial.digest()
    spool.settle(spool.keep(partial, HEADER), Settled.GIVEN_BACK, partial)


@pytest.mark.parametrize("passage", [1, 2])
def test_an_update_that_is_being_given_back_is_a_whole_or_a_partial_one(tmp_path: Path, passage: int) -> None:
    process = multiprocessing.get_context("forkserver").Process(target=give_back, args=(tmp_path, passage))
    process.start()
    process.join(60.0)
    assert process.exitcode == -9
    spool = Spool(tmp_path)
    if passage == 1:
        assert spool.read(spool.reference(HEADER), DIGEST) == PAYLOAD
        assert spool.sweep(set()) == 1
    else:
        partial = spool.open_partial(HEADER)
        assert (partial.offset, partial.digest()) == (len(PAYLOAD), DIGEST)
        partial.close()


@pytest.mark.slow
def test_a_short_hunt_finds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--kills", "40", "--seed", "4"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (code, found["violations"]) == (0, 0), found
    assert found["kills"] >= 40
