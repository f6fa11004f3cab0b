"""A new process takes over a checkpoint, an outbox and an odometer; no token is counted twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diloco.inner.checkpoint import CheckpointError
from diloco.inner.trainer import StepInfo
from diloco.learner.agent import restored_machine
from diloco.learner.seal import Odometer, Outbox
from diloco.learner.tensors import SiteTensors
from diloco.outer.fragments import plan_layout
from diloco.sync.effects import Retake
from diloco.sync.events import (
    BoundaryReached,
    FragmentStanding,
    JoinAnswered,
    Outcome,
    PushAnswered,
    Sealed,
    SealFailed,
    StepDone,
    VersionFetched,
)
from diloco.sync.learner import LearnerSync
from diloco.sync.options import LearnerOptions
from diloco.sync.progress import Ledger, site_ledger
from tests.learner.participant import held
from tests.wire.fake_syncer import push_header

TOKENS = 10


def standing(watermark: int = 0, merged: int = 0) -> FragmentStanding:
    return FragmentStanding(0, 0, "", watermark, 0, merged, 0, (), ())


def joined(part: FragmentStanding) -> JoinAnswered:
    return JoinAnswered(1, 1, (part,), 0, 0, None)


def step(number: int) -> StepInfo:
    return StepInfo(number, 1.0, TOKENS, number * TOKENS, 1000, number, 1.0, 0.1, applied=True)


def trained(steps: int) -> LearnerSync:
    """A site that has trained ``steps`` steps on version 0 and sent nothing."""
    machine = LearnerSync(LearnerOptions(inner_steps=100))
    machine.handle(joined(standing()), 0)
    machine.handle(VersionFetched(0, 0, ()), 0)
    machine.handle(BoundaryReached(), 0)
    for number in range(1, steps + 1):
        machine.handle(StepDone(number, TOKENS, 1000, number), 0)
    return machine


def take_over(folder: Path, machine: LearnerSync, crashed_at: int, redo: StepInfo | None) -> LearnerSync:
    """The machine of a new process, after the last one had got to step ``crashed_at``."""
    layout = plan_layout([("w", (4,))], 1)
    site_tensors = SiteTensors(layout, held({"w": torch.zeros(4)}), "rebase", 0.5)
    odometer = Odometer(folder / "odometer")
    odometer.write(crashed_at, crashed_at * TOKENS)
    kept = ({"base.0": torch.zeros(4)}, {"machine": machine.snapshot()})
    return restored_machine(machine.options, kept, redo, Outbox(folder / "outbox"), odometer, site_tensors)


@pytest.mark.parametrize(("crashed_at", "lost_steps"), [(4, 0), (5, 0), (6, 1), (9, 4)])
def test_the_checkpoints_own_step_is_counted_once(tmp_path: Path, crashed_at: int, lost_steps: int) -> None:
    """The checkpoint of step 5 is taken before the machine hears of that step; the process died at ``crashed_at``."""
    machine = take_over(tmp_path, trained(4), crashed_at, step(5))
    machine.handle(joined(standing()), 0)
    read = max(5, crashed_at) * TOKENS
    assert site_ledger(machine.state) == Ledger(read, 0, 0, 0, 5 * TOKENS, 0, lost_steps * TOKENS)


def test_of_a_damaged_odometer_the_checkpoint_is_believed(tmp_path: Path) -> None:
    Odometer(tmp_path / "odometer").write(9, 9 * TOKENS)
    whole = (tmp_path / "odometer").read_bytes()
    (tmp_path / "odometer").write_bytes(bytes(each ^ 64 for each in whole))
    site_tensors = SiteTensors(plan_layout([("w", (4,))], 1), held({"w": torch.zeros(4)}), "rebase", 0.5)
    machine, outbox = trained(4), Outbox(tmp_path / "outbox")
    kept = ({"base.0": torch.zeros(4)}, {"machine": machine.snapshot()})
    again = restored_machine(machine.options, kept, step(5), outbox, Odometer(tmp_path / "odometer"), site_tensors)
    again.handle(joined(standing()), 0)
    assert site_ledger(again.state) == Ledger(5 * TOKENS, 0, 0, 0, 5 * TOKENS, 0, 0)


def test_a_checkpoint_at_the_end_of_a_run_has_no_step_to_tell_again(tmp_path: Path) -> None:
    machine = take_over(tmp_path, trained(5), 5, None)
    machine.handle(joined(standing()), 0)
    assert site_ledger(machine.state) == Ledger(5 * TOKENS, 0, 0, 0, 5 * TOKENS, 0, 0)


def test_a_step_that_later_work_has_outrun_is_lost_with_the_rest(tmp_path: Path) -> None:
    """The syncer has merged an update of 3 steps that was sent after the checkpoint of step 5."""
    machine = take_over(tmp_path, trained(4), 9, step(5))
    machine.handle(joined(standing(watermark=1, merged=3 * TOKENS)), 0)
    assert site_ledger(machine.state) == Ledger(9 * TOKENS, 3 * TOKENS, 0, 0, 0, 0, 6 * TOKENS)


def test_a_checkpoint_taken_while_a_retake_is_due_can_be_resumed(tmp_path: Path) -> None:
    """The seal of step 3 failed beside training, and the checkpoint of step 5 came before the next boundary."""
    machine = LearnerSync(LearnerOptions(inner_steps=3))
    machine.handle(joined(standing()), 0)
    machine.handle(VersionFetched(0, 0, ()), 0)
    machine.handle(BoundaryReached(), 0)
    for number in range(1, 5):
        machine.handle(StepDone(number, TOKENS, 1000, number), 0)
    machine.handle(SealFailed(0, 1), 0)
    assert machine.state.fragments[0].retaking is not None
    resumed = take_over(tmp_path, machine, 5, step(5))
    effects = [*resumed.handle(joined(standing()), 0), *resumed.handle(BoundaryReached(), 0)]
    assert [type(effect) for effect in effects] == [Retake]


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({}, "not one of a site"),
        ({"machine": {"fragments": [{}, {}]}}, "num_fragments is 1, and the checkpoint has 2"),
        ({"machine": {"fragments": [{"colour": 1}]}}, "of another version: .*colour"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused_in_words(
    tmp_path: Path, meta: dict[str, object], words: str
) -> None:
    site_tensors = SiteTensors(plan_layout([("w", (4,))], 1), held({"w": torch.zeros(4)}), "rebase", 0.5)
    odometer, outbox = Odometer(tmp_path / "odometer"), Outbox(tmp_path / "outbox")
    with pytest.raises(CheckpointError, match=words):
        restored_machine(LearnerOptions(), ({}, meta), None, outbox, odometer, site_tensors)


def test_a_site_without_a_checkpoint_has_lost_what_it_read(tmp_path: Path) -> None:
    site_tensors = SiteTensors(plan_layout([("w", (4,))], 1), held({"w": torch.zeros(4)}), "rebase", 0.5)
    odometer = Odometer(tmp_path / "odometer")
    odometer.write(7, 7 * TOKENS)
    machine = restored_machine(
        LearnerOptions(inner_steps=100), None, None, Outbox(tmp_path / "outbox"), odometer, site_tensors
    )
    machine.handle(joined(standing()), 0)
    assert site_ledger(machine.state) == Ledger(7 * TOKENS, 0, 0, 0, 0, 0, 7 * TOKENS)


@pytest.mark.parametrize("kept", [False, True])
def test_bytes_that_outlived_their_ack_go_unless_they_may_be_wanted_again(tmp_path: Path, kept: bool) -> None:
    """The process died after the ack and before it had removed them."""
    machine = LearnerSync(LearnerOptions(inner_steps=2))
    machine.handle(JoinAnswered(1, 1, (standing(),), 0, 0, None, keep=kept), 0)
    machine.handle(VersionFetched(0, 0, ()), 0)
    for number in (0, 1, 2):
        machine.handle(StepDone(number, TOKENS, 1000, number) if number else BoundaryReached(), 0)
    machine.handle(Sealed(0, 1, "digest"), 0)
    machine.handle(PushAnswered(0, 1, Outcome.ACCEPTED, None, "digest"), 0)
    outbox = Outbox(tmp_path / "outbox")
    header = push_header(b"bytes", fragment=0, sequence=1)
    machine.state.fragments[0].in_flight[0].digest = header.digest
    outbox.put(header, b"bytes")
    layout = plan_layout([("w", (4,))], 1)
    site_tensors = SiteTensors(layout, held({"w": torch.zeros(4)}), "rebase", 0.5)
    tensors = {"base.0": torch.zeros(4), "sent.0.1": torch.zeros(4)}
    restored = (tensors, {"machine": machine.snapshot()})
    again = restored_machine(machine.options, restored, None, outbox, Odometer(tmp_path / "odometer"), site_tensors)
    assert len(again.state.fragments[0].in_flight) == 1
    assert set(outbox.digests()) == ({(0, 1)} if kept else set())
