from __future__ import annotations

import pytest

from diloco.sim.outer_disk import VERSIONS_KEPT, ZERO, Kept, Replayer, restored
from diloco.sim.values import OuterRule
from diloco.sync.effects import Contribution, StartOuterStep, UpdateRef
from diloco.sync.events import SyncerStarted
from diloco.sync.journal import JournalError, Record
from diloco.sync.options import OuterOptions
from diloco.sync.syncer import OuterSync

STEP = StartOuterStep(0, 1, (Contribution("a", 1.0, 0, (UpdateRef(1, "p", "exact", "d"),)),))


def a_replayer(rule: OuterRule | None = None) -> Replayer:
    machine = OuterSync(OuterOptions(num_fragments=1))
    return Replayer(machine, [{0: ZERO}], lambda name: (-30, -7, 0), rule or OuterRule())


def test_a_version_is_the_one_before_and_what_was_merged() -> None:
    made = a_replayer().made_again(STEP)
    assert made == Kept((30, 7, 0), (-30, -7, 0), (30, 7, 0), (30, 7, 0))
    coarse = a_replayer(OuterRule(10, 0, 64)).made_again(STEP)
    assert (coarse.theta, coarse.published) == ((30, 7, 0), (0, 7, 0)), "what is published is rounded"


def test_only_the_newest_versions_are_kept() -> None:
    replayer = a_replayer()
    for version in range(1, 10):
        replayer.store(0, version, ZERO)
    assert sorted(replayer.versions[0]) == list(range(10 - VERSIONS_KEPT, 10))


def test_what_the_machine_said_otherwise_is_damage() -> None:
    with pytest.raises(JournalError, match="record 0"):
        a_replayer().apply(Record(5, SyncerStarted(1), "another"))


def test_a_restored_version_has_no_momentum_and_no_link() -> None:
    kept = Kept((1, 1, 0), (2, 2, 0), (3, 3, 0), (4, 4, 0))
    assert restored([{6: ZERO, 7: kept}]) == [{8: Kept((1, 1, 0), (0, 0, 0), (3, 3, 0), (0, 0, 0))}]
