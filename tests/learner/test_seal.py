"""How far a site got is known after any end of its process."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diloco.inner.checkpoint import CheckpointError
from diloco.inner.trainer import StepInfo
from diloco.learner.agent import restored_machine
from diloco.learner.seal import FIELDS, FRESH_MAX, SPARE_MAX, Odometer, Outbox, OutboxError
from diloco.learner.seal import _read_slots as read_slots
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
from tests.syncer.building import update
from tests.wire.fake_syncer import push_header

PROGRAM = """
import sys, time
from pathlib import Path
from diloco.learner.seal import Odometer
odometer = Odometer(Path(sys.argv[1]))
for step in range(1, 1001):
    odometer.write(step, 10 * step)
print("there", flush=True)
time.sleep(60)
"""


def test_a_new_one_stands_at_nought_and_what_was_written_is_read(tmp_path: Path) -> None:
    odometer = Odometer(tmp_path / "site" / "odometer")
    assert odometer.read() == (0, 0)
    for reading in ((1, 10), (7, 1 << 40), (1 << 63, (1 << 64) - 1)):
        odometer.write(*reading)
        assert odometer.read() == reading
    odometer.close()
    again = Odometer(tmp_path / "site" / "odometer")
    assert again.read() == (1 << 63, (1 << 64) - 1)
    again.close()


def test_it_survives_sigkill(tmp_path: Path) -> None:
    path = tmp_path / "odometer"
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        process.kill()
        assert process.wait(10.0) == -9
    odometer = Odometer(path)
    assert odometer.read() == (1000, 10_000)
    odometer.close()


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 17, b"x" * 48])
def test_a_file_that_is_none_is_said_and_begun_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "odometer").write_bytes(content)
    notes = list[str]()
    odometer = Odometer(tmp_path / "odometer", note=notes.append)
    assert odometer.read() == (0, 0)
    odometer.close()
    assert notes == [f"{tmp_path / 'odometer'} is damaged: how far the site got is taken from its checkpoint"]
    Odometer(tmp_path / "odometer", note=notes.append).close()
    assert len(notes) == 1


def test_no_flipped_bit_is_believed(tmp_path: Path) -> None:
    """One in a file without a checksum made 70 million million tokens of 16."""
    odometer = Odometer(tmp_path / "odometer")
    odometer.write(1, 16)
    odometer.write(2, 32)
    odometer.close()
    whole = (tmp_path / "odometer").read_bytes()
    readings = set()
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        reading, damage = read_slots(bytes(damaged))
        readings.add(reading)
        assert damage or reading == (2, 32), "a bit in the padding is nobody's"
    assert readings == {(1, 16), (2, 32)}
    (tmp_path / "odometer").write_bytes(whole[:24] + whole[24:32] + b"\xff" + whole[33:])
    notes = list[str]()
    again = Odometer(tmp_path / "odometer", note=notes.append)
    assert again.read() == (1, 16)
    again.close()
    assert notes == [
        f"{tmp_path / 'odometer'} is damaged in one of its two readings: the other one's 16 tokens are taken"
    ]


def test_one_of_the_release_before_is_read_and_said_to_have_no_checksum(tmp_path: Path) -> None:
    (tmp_path / "odometer").write_bytes(FIELDS.pack(7, 7168))
    notes = list[str]()
    odometer = Odometer(tmp_path / "odometer", note=notes.append)
    assert odometer.read() == (7, 7168)
    odometer.write(8, 8192)
    odometer.close()
    (note,) = notes
    assert "is of an earlier release, without a checksum: 7,168 tokens are taken from it" in note
    again = Odometer(tmp_path / "odometer", note=notes.append)
    assert again.read() == (8, 8192)
    again.close()
    assert len(notes) == 1


# --- Sealed updates --------------------------------------------------------------------------------------------------


def test_the_same_bytes_are_sent_by_a_new_process(tmp_path: Path) -> None:
    header, payload = update(sequence=3, fragment=1, tokens=77)
    Outbox(tmp_path).put(header, payload)
    again = Outbox(tmp_path)
    assert again.digests() == {(1, 3): header.digest}
    found, view = again.get(1, 3, incarnation=9)
    assert found == replace(header, incarnation=9)
    assert bytes(view) == payload
    again.drop(1, 3)
    again.drop(1, 3)
    assert again.digests() == {}
    with pytest.raises(FileNotFoundError):
        again.get(1, 3, 9)


def test_its_folder_is_durable_before_anything_is_put_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site sends what is durable here; in a folder without a durable name nothing is."""
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")))
    Outbox(tmp_path / "site-a" / "outbox")
    assert synced[:2] == [str(tmp_path / "site-a"), str(tmp_path)]


def test_it_is_durable_when_put_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    outbox = Outbox(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")))
    outbox.put(*update())
    assert len(synced) == 2
    assert synced[1] == str(tmp_path)


def test_a_later_one_takes_the_place_of_an_earlier_of_the_same_number(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    outbox.put(*update(values=None))
    second, payload = update(site="a", values=None, encoding="int8")
    outbox.put(second, payload)
    assert outbox.get(0, 1, 1)[0] == second
    assert len(list(tmp_path.iterdir())) == 1


def test_every_damaged_byte_is_noticed_in_header_and_payload(tmp_path: Path) -> None:
    """A flipped digit of ``tokens`` or ``base_version`` is as bad as one of the payload."""
    header, payload = update()
    outbox = Outbox(tmp_path)
    outbox.put(header, payload)
    path = tmp_path / "0-1.update"
    whole = path.read_bytes()
    seed = random.randrange(1 << 30)
    dice = random.Random(seed)
    for at in range(0, len(whole), 5):
        bit = dice.randrange(8)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :])
        with pytest.raises(OutboxError, match=f"{path} is damaged"):
            outbox.get(0, 1, 1)
        assert outbox.digests() == {}, (seed, at, bit)
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        assert outbox.digests() == {}, length
    path.write_bytes(whole)
    assert outbox.digests() == {(0, 1): header.digest}


def test_what_was_just_put_here_is_had_from_memory_once(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    header, payload = update()
    outbox.put(header, payload)
    found = outbox.fresh(0, 1, 9)
    assert found is not None
    assert (found[0], bytes(found[1])) == (replace(header, incarnation=9), payload)
    assert outbox.fresh(0, 1, 9) is None
    assert (outbox.get(0, 1, 9)[0], bytes(outbox.get(0, 1, 9)[1])) == (found[0], payload)


def test_what_is_dropped_cleared_or_of_long_ago_is_not_in_memory(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    for sequence in range(1, FRESH_MAX + 2):
        outbox.put(*update(sequence=sequence))
    assert outbox.fresh(0, 1, 1) is None
    outbox.drop(0, 2)
    assert outbox.fresh(0, 2, 1) is None
    outbox.clear({(0, 3)})
    assert outbox.fresh(0, 3, 1) is None
    assert outbox.get(0, 3, 1) is not None


def test_what_is_not_kept_is_cleared_and_leftovers_too(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    for sequence in (1, 2, 3):
        outbox.put(*update(sequence=sequence))
    (tmp_path / ".0-4.update.77.tmp").write_bytes(b"half")
    again = Outbox(tmp_path)
    again.clear({(0, 2), (1, 3)})
    assert [path.name for path in tmp_path.iterdir()] == ["0-2.update"]


def test_another_rank_clears_nothing_and_has_the_same_files(tmp_path: Path) -> None:
    Outbox(tmp_path).put(*update(sequence=1))
    half = tmp_path / ".0-4.update.77.tmp"
    half.write_bytes(b"half")
    other = Outbox(tmp_path, settled=True)
    assert half.exists(), "it may be one that is being written at this moment"
    assert list(other.digests()) == [(0, 1)]
    other.put(*update(sequence=2))
    assert list(Outbox(tmp_path).digests()) == [(0, 1), (0, 2)]


def test_a_file_that_is_needed_no_more_is_written_over(tmp_path: Path) -> None:
    outbox, room = Outbox(tmp_path), set()
    for sequence, kind in enumerate(("fp32", "int8", "fp32", "bf16"), 1):
        header, payload = update(sequence=sequence, encoding=kind)
        outbox.put(header, payload)
        room.add((tmp_path / f"0-{sequence}.update").stat().st_ino)
        found, view = outbox.get(0, sequence, header.incarnation)
        assert (found, bytes(view)) == (header, payload), "shorter or longer than what was there"
        outbox.drop(0, sequence)
        assert outbox.digests() == {}
        with pytest.raises(FileNotFoundError):
            outbox.get(0, sequence, 1)
    assert len(room) == 1
    assert len(list(tmp_path.iterdir())) == 1
    Outbox(tmp_path)
    assert not list(tmp_path.iterdir()), "another process starts without"


def test_a_name_that_a_power_cut_brought_back_has_nothing_behind_it(tmp_path: Path) -> None:
    Outbox(tmp_path).put(*update(sequence=2))
    (tmp_path / "0-2.update").rename(tmp_path / "0-1.update")
    again = Outbox(tmp_path)
    assert again.digests() == {}
    with pytest.raises(OutboxError, match="another name"):
        again.get(0, 1, 1)


def test_no_more_than_a_few_are_kept_for_that(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    for sequence in range(SPARE_MAX + 2):
        outbox.put(*update(sequence=sequence + 1))
    for sequence in range(SPARE_MAX + 2):
        outbox.drop(0, sequence + 1)
    assert len(list(tmp_path.iterdir())) == SPARE_MAX
    for path in tmp_path.iterdir():
        path.unlink()  # Somebody tidied up.
    outbox.put(*update(sequence=9))
    assert outbox.get(0, 9, 1) is not None


def test_a_full_disk_takes_the_spare_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outbox = Outbox(tmp_path)
    outbox.put(*update(sequence=1))
    outbox.drop(0, 1)

    def full(handle: int) -> None:
        raise OSError(28, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="full"):
            outbox.put(*update(sequence=2))
    assert not list(tmp_path.iterdir()), "what it took is free for others"
    outbox.put(*update(sequence=2))
    assert outbox.get(0, 2, 1) is not None


# --- A new process takes over a checkpoint, an outbox and an odometer; no token is counted twice ---------------------

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
