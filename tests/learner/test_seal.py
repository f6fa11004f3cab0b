"""How far a site got and what it sealed is known after any end of its process, and an update says what is in it."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diloco.codec.base import NonFiniteError, digest, digest_of
from diloco.codec.registry import make_codec, values_of
from diloco.durable import Disk, Step
from diloco.learner.seal import (
    FIELDS,
    FRESH_MAX,
    SPARE_MAX,
    Encoded,
    Encoder,
    Odometer,
    Outbox,
    OutboxError,
    SealJob,
    seal,
)
from diloco.learner.tensors import HOST, Place, SealInputs
from diloco.learner.transfer import Sealer
from diloco.sync.effects import Seal
from diloco.sync.events import (
    SealFailed,
)
from diloco.wire.messages import PushHeader
from tests.codec.values import bf16_by_default
from tests.forked import forkserver
from tests.learner.participant import Elsewhere, Recorder
from tests.syncer.building import dice, update


def write_and_die(path: Path) -> None:
    odometer = Odometer(path)
    for step in range(1, 1001):
        odometer.write(step << 54, step << 54)
    os.kill(os.getpid(), signal.SIGKILL)


def test_it_survives_sigkill(tmp_path: Path) -> None:
    process = forkserver().Process(target=write_and_die, args=(tmp_path / "odometer",))
    process.start()
    process.join(60.0)
    assert process.exitcode == -signal.SIGKILL
    assert Odometer(tmp_path / "odometer").reading == (1000 << 54, 1000 << 54)


@pytest.mark.parametrize(
    ("content", "reading", "words"),
    [
        *((each, (0, 0), "is damaged: the site's progress is taken from its") for each in (b"", b"short", b"x" * 48)),
        (FIELDS.pack(7, 7168), (7, 7168), "is of an earlier release, without a checksum: 7,168 tokens are taken from"),
    ],
)
def test_a_file_of_something_else_or_of_the_release_before_is_said_once(
    tmp_path: Path, content: bytes, reading: tuple[int, int], words: str
) -> None:
    path = tmp_path / "odometer"
    path.write_bytes(content)
    found = Odometer(path)
    assert found.reading == reading
    assert found.damage.startswith(words)
    found.write(8, 8192)
    again = Odometer(path)
    assert (again.reading, again.damage) == ((8, 8192), "")


def test_no_flipped_bit_is_believed(tmp_path: Path) -> None:
    """One in a file without a checksum made 70 million million tokens of 16."""
    path = tmp_path / "odometer"
    found = Odometer(path)
    found.write(1, 16)
    found.write(2, 32)
    whole = path.read_bytes()
    readings = set()
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        found = Odometer(path)
        readings.add(found.reading)
        kept = f"has one damaged reading of two: the site goes on from the other, {found.reading[1]} tokens"
        assert found.damage == kept or (found.reading, found.damage) == ((2, 32), ""), "a bit in the padding"
    assert readings == {(1, 16), (2, 32)}


@pytest.fixture
def outbox(tmp_path: Path) -> Outbox:
    return Outbox(tmp_path)


# --- Sealed updates --------------------------------------------------------------------------------------------------


def test_the_same_bytes_are_sent_by_a_new_process(outbox: Outbox, tmp_path: Path) -> None:
    header, payload = update(sequence=3, fragment=1, tokens=77)
    outbox.put(*update(sequence=3, fragment=1, encoding="int8"))
    outbox.put(header, payload)  # A later one takes the place of an earlier of the same number.
    again = Outbox(tmp_path)
    assert again.digests() == {(1, 3): header.digest}
    found, view = again.get(1, 3)
    assert (found, bytes(view)) == (header, payload)
    again.drop(1, 3)
    again.drop(1, 3)
    assert again.digests() == {}
    with pytest.raises(FileNotFoundError):
        again.get(1, 3)


def test_its_folder_is_durable_before_anything_is_put_there_and_each_update_when_put_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site sends what is durable here; in a folder without a durable name nothing is."""
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")))
    folder = tmp_path / "site-a/outbox"
    outbox = Outbox(folder)
    assert synced[:2] == [str(tmp_path / "site-a"), str(tmp_path)]
    synced.clear()
    outbox.put(*update())
    assert len(synced) == 2
    assert synced[1] == str(folder)


def test_every_damaged_byte_is_noticed_in_header_and_payload(outbox: Outbox, tmp_path: Path) -> None:
    """A flipped digit of ``tokens`` or ``base_version`` is as bad as one of the payload."""
    header, payload = update()
    outbox.put(header, payload)
    outbox.get(0, 1)  # Later ones read the file.
    path = tmp_path / "0-1.update"
    whole = path.read_bytes()
    seed = random.randrange(1 << 30)
    dice = random.Random(seed)
    for at in range(0, len(whole), 5):
        bit = dice.randrange(8)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :])
        with pytest.raises(OutboxError, match=f"{path} is damaged"):
            outbox.get(0, 1)
        assert outbox.digests() == {}, (seed, at, bit)
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        assert outbox.digests() == {}, length
    path.write_bytes(whole)
    assert outbox.digests() == {(0, 1): header.digest}
    path.rename(tmp_path / "0-2.update")  # As a power cut may bring a name back.
    assert outbox.digests() == {}
    with pytest.raises(OutboxError, match="another name"):
        outbox.get(0, 2)


def test_the_last_updates_are_had_from_memory_once(outbox: Outbox, tmp_path: Path) -> None:
    for sequence in range(1, FRESH_MAX + 2):
        outbox.put(*update(sequence=sequence))
    outbox.drop(0, 2)
    for path in tmp_path.glob("*.update"):
        path.unlink()
    header, payload = update(sequence=FRESH_MAX + 1)
    found, view = outbox.get(0, FRESH_MAX + 1)
    assert (found, bytes(view)) == (header, payload)
    for sequence in (1, 2, FRESH_MAX + 1):  # Too old, dropped, had once.
        with pytest.raises(FileNotFoundError):
            outbox.get(0, sequence)


def test_what_is_not_kept_is_cleared_and_leftovers_too_but_not_by_another_rank(outbox: Outbox, tmp_path: Path) -> None:
    for sequence in (1, 2):
        outbox.put(*update(sequence=sequence))
    half = tmp_path / ".0-4.update.77.tmp"
    half.write_bytes(b"half")
    other = Outbox(tmp_path, settled=True)
    assert half.exists(), "it may be one that is being written at this moment"
    other.put(*update(sequence=3))
    assert list(other.digests()) == [(0, 1), (0, 2), (0, 3)]
    Outbox(tmp_path).clear({(0, 2), (1, 3)})
    assert [path.name for path in tmp_path.iterdir()] == ["0-2.update"]


def test_a_file_that_is_needed_no_more_is_written_over(outbox: Outbox, tmp_path: Path) -> None:
    room = set()
    for sequence, kind in enumerate(("fp32", "int8", "fp32", "bf16"), 1):
        header, payload = update(sequence=sequence, encoding=kind)
        outbox.put(header, payload)
        room.add((tmp_path / f"0-{sequence}.update").stat().st_ino)
        found, view = Outbox(tmp_path, settled=True).get(0, sequence)
        assert (found, bytes(view)) == (header, payload), "shorter or longer than what was there"
        outbox.drop(0, sequence)
        assert outbox.digests() == {}
    assert len(room) == len(list(tmp_path.iterdir())) == 1
    for do in (lambda sequence: outbox.put(*update(sequence=sequence)), lambda sequence: outbox.drop(0, sequence)):
        for sequence in range(1, SPARE_MAX + 3):
            do(sequence)
    assert len(list(tmp_path.iterdir())) == SPARE_MAX, "no more than a few are kept for that"
    Outbox(tmp_path)
    assert not list(tmp_path.iterdir()), "another process starts without"
    outbox.put(*update(sequence=9))  # The files that were kept here are gone, as where an operator tidied up.
    assert (0, 9) in outbox.digests()


def test_a_full_disk_takes_the_spare_file_too(outbox: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert (0, 2) in outbox.digests()


# --- An update says truly what is in it -------------------------------------------------------------------------------

EFFECT = Seal(0, 7, 3, (5, 6), 120, 12, 1000, 99, final=True)


def encoder(codec: str) -> Encoder:
    return Encoder(make_codec(codec), Place(HOST))


def inputs() -> SealInputs:
    return SealInputs(dice("base", 0), [dice("local", 0)], [dice("d5", 0), dice("d6", 0)])


def sealed_in(outbox: Outbox, *jobs: object, site: Recorder | None = None, codecs: str = "fp32") -> Recorder:
    """A site whose sealer has done the jobs."""
    site = site or Recorder()
    site.outbox = outbox
    sealer = Sealer(site, [encoder(codec) for codec in codecs.split()])
    for order in (*jobs, None):
        sealer.queue.put(order)
    sealer.run()
    return site


@pytest.mark.parametrize("codec", ["fp32", "int4:32+zstd1"])
def test_the_header_is_that_of_the_payload_and_of_the_values_that_the_syncer_reads(codec: str) -> None:
    header, encoded = seal(SealJob(EFFECT, inputs(), codec), encoder(codec), "run", "a", 4)
    measured = dice("base", 0) - dice("local", 0) - dice("d5", 0) - dice("d6", 0)
    payload = encoded.payload
    assert bytes(payload) == make_codec(codec).encode(measured)
    assert (header.run_id, header.site_id, header.incarnation) == ("run", "a", 4)
    assert (header.fragment, header.sequence, header.base_version) == (0, 7, 3)
    assert (header.tokens, header.steps, header.step_ns, header.cursor, header.final) == (120, 12, 1000, 99, True)
    assert (header.encoding, header.numel) == (codec, measured.numel())
    assert (header.payload_bytes, header.digest) == (len(payload), digest_of(payload))
    assert header.values_digest == digest(make_codec(codec).decode(payload, measured.numel()))


def test_an_update_is_in_the_outbox_before_it_is_told_and_out_of_it_when_it_is_dropped(outbox: Outbox) -> None:
    found: list[tuple[PushHeader, dict[tuple[int, int], str]]] = []

    class Looks(Recorder):
        def keep_sealed(self, header: PushHeader, encoded: Encoded) -> None:
            found.append((header, outbox.digests()))

    ruined = SealInputs(dice("base", 0), [dice("local", 0) / 0.0], [])
    jobs = SealJob(EFFECT, inputs(), "fp32"), SealJob(replace(EFFECT, sequence=8), ruined, "fp32")
    site = sealed_in(outbox, *jobs, site=Looks())
    ((header, held),) = found
    assert held == {(0, 7): header.digest}
    assert site.told == [SealFailed(0, 8)]
    sealed_in(outbox, (0, 7))
    assert outbox.digests() == {}


class FullDisk(Disk):
    """Has no room for the first ``refusals`` updates that are put on it."""

    def __init__(self, refusals: int, stopping: threading.Event | None = None) -> None:
        self.left, self.stopping = refusals, stopping

    def keep(self, path: Path, write: Callable[[Path], object], step: Step) -> None:
        if self.left > 0:
            self.left -= 1
            if self.left == 0 and self.stopping is not None:
                self.stopping.set()
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        super().keep(path, write, step)


@pytest.mark.parametrize("stops", [False, True])
def test_a_full_disk_is_waited_for_and_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: bool) -> None:
    """Seen: it ended the training of the site."""
    monkeypatch.setattr("diloco.learner.transfer.ROOM_EVERY_S", 0.01)
    site = Recorder()
    outbox = Outbox(tmp_path, FullDisk(3, site.stopping if stops else None))
    sealed_in(outbox, SealJob(EFFECT, inputs(), "fp32"), site=site)
    said = [event.get("note", event["what"]) for event in site.events.all]
    assert said == (["disk_full"] if stops else ["disk_full", "disk_has_room", "sealed"])
    assert len(site.sealed) == len(outbox.digests()) == (0 if stops else 1)


def test_each_update_is_encoded_as_its_job_says_and_what_became_of_the_entropy_stage_is_said(outbox: Outbox) -> None:
    even = SealInputs(torch.ones(4096), [torch.zeros(4096)], [])
    jobs = [("int8", inputs()), ("int4+zstd", inputs()), ("fp32+auto", even), ("int8", inputs())]
    codecs = [codec for codec, _ in jobs]
    orders = [SealJob(replace(EFFECT, sequence=at), each, codec) for at, (codec, each) in enumerate(jobs, 1)]
    site = sealed_in(outbox, *orders, codecs="int8 int4+zstd fp32+auto")
    assert [each.header.encoding for each in site.sealed] == codecs
    assert [event["codec"] for event in site.events.all] == codecs
    stored = Outbox(outbox.folder, settled=True)
    assert [stored.get(0, sequence)[0].encoding for sequence in (1, 2, 3, 4)] == codecs
    assert [event.get("stage") for event in site.events.all] == [None, "raw", "zstd", None]


# --- The same update wherever it is encoded ---------------------------------------------------------------------------


ON_THE_DEVICE = ("int4", "int8:16", "int4:32+zstd1", "e3m0", "int2", "sign", "topk:256x16")

CODECS = ("fp32", "bf16", "bf16+zstd1", *ON_THE_DEVICE)


def drawn(num_sent: int) -> SealInputs:
    random = torch.Generator().manual_seed(0)
    base, step, *sent = torch.randn(2 + num_sent, 333, generator=random).unbind()
    return SealInputs(base, [base - step * 1e-3], [each * 1e-4 for each in sent])


def assert_equal(one: Encoded, other: Encoded) -> None:
    assert bytes(one.payload) == bytes(other.payload)
    assert one.digest == other.digest == digest(values_of(other.sent).cpu())
    assert torch.equal(values_of(one.sent).cpu(), values_of(other.sent).cpu())
    assert one.norm == pytest.approx(other.norm, rel=1e-5)


@pytest.mark.parametrize("codec", CODECS)
def test_an_update_is_the_same_here_and_there(codec: str, interpreter: None) -> None:
    here, there = Encoder(make_codec(codec), Place(HOST)), Encoder(make_codec(codec), Elsewhere())
    assert here.where == "host"
    assert (there.where == "cpu, Triton") == (codec in ON_THE_DEVICE)
    given = [(drawn(num_sent), drawn(num_sent)) for num_sent in (0, 2, 3)]
    with bf16_by_default():
        made = [(there.encode(one), here.encode(other)) for one, other in given]
    for one, other in made:
        assert_equal(one, other)  # What one update was outlives the next: the buffers are used again.


def test_it_says_why_it_does_not_encode_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Encoder(make_codec("bf16+zstd1"), Elsewhere()).where == "host, values from cpu: bf16 has no kernel there"
    monkeypatch.setattr("diloco.learner.seal.find_spec", lambda name: None)
    without = Encoder(make_codec("int4"), Elsewhere())
    assert "Triton is not installed" in without.where
    assert_equal(without.encode(drawn(1)), Encoder(make_codec("int4"), Place(HOST)).encode(drawn(1)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, which interprets, warns of what is refused
@pytest.mark.parametrize(("codec", "bad"), [("fp32", torch.nan), ("bf16", torch.inf), ("int8", torch.nan)])
@pytest.mark.parametrize("place", [Place(HOST), Elsewhere()])
def test_invariant_12_values_that_are_not_finite_are_never_encoded(
    codec: str, bad: float, place: Place, interpreter: None
) -> None:
    encodes, ruined = Encoder(make_codec(codec), place), drawn(0)
    ruined.local[7] = bad
    with pytest.raises(NonFiniteError):
        encodes.encode(ruined)
    assert_equal(encodes.encode(drawn(0)), Encoder(make_codec(codec), Place(HOST)).encode(drawn(0)))


@pytest.mark.gpu
@pytest.mark.parametrize("codec", CODECS)
def test_on_the_accelerator(codec: str, kernel_device: torch.device) -> None:
    made = drawn(2)
    there = SealInputs(
        made.reference.to(kernel_device),
        [made.local.to(kernel_device)],
        [values_of(each).to(kernel_device) for each in made.in_flight],
    )
    on_it = Encoder(make_codec(codec), Place(kernel_device))
    assert_equal(on_it.encode(there), Encoder(make_codec(codec), Place(HOST)).encode(made))


@pytest.mark.parametrize("codec", ["bf16", "int4", "sign", "topk:256x4"])
def test_what_is_fed_back_is_the_same_here_and_there(codec: str, interpreter: None) -> None:
    residual = torch.randn(333, generator=torch.Generator().manual_seed(9)) * 1e-3
    both = [Encoder(make_codec(codec), place) for place in (Place(HOST), Elsewhere())]
    assert (both[1].where == "cpu, Triton") == (codec != "bf16")
    fresh = drawn(1).pseudo_gradient()
    for carried in (residual, None):
        made = [drawn(1) for _ in both]  # An encoder uses them up.
        for each in made:
            each.residual, each.beta = carried, 0.9
        here, there = (encoder.encode(each) for encoder, each in zip(both, made, strict=True))
        assert here.payload == there.payload
        assert torch.equal(values_of(here.sent), values_of(there.sent))
        to_send = fresh if carried is None else fresh + carried * 0.9
        assert here.payload == make_codec(codec).encode(to_send)
        for encoded in (here, there):
            assert encoded.fed is not None
            assert torch.equal(encoded.fed.fresh, fresh)
            assert torch.equal(encoded.fed.term, fresh - values_of(here.sent))
            assert torch.equal(encoded.fed.residual, to_send - values_of(here.sent))
    assert both[0].encode(drawn(1)).fed is None
