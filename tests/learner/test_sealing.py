"""An update says truly what is in it."""

from __future__ import annotations

import errno
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from diloco.codec.base import NonFiniteError, digest, digest_of
from diloco.codec.registry import make_codec, values_of
from diloco.durable import Disk, Step
from diloco.learner.seal import Encoder, Outbox, SealedUpdate, Sealer, SealJob, seal
from diloco.learner.tensors import HOST, Place, SealInputs
from diloco.sync.effects import Seal
from diloco.sync.events import SealFailed
from tests.learner.participant import Recorder
from tests.syncer.building import dice

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

EFFECT = Seal(0, 7, 3, (5, 6), 120, 12, 1000, 99, final=True)


def encoder(codec: str) -> Encoder:
    return Encoder(make_codec(codec), Place(HOST))


def inputs() -> SealInputs:
    return SealInputs(dice("base", 0), [dice("local", 0)], [dice("d5", 0), dice("d6", 0)])


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4:32+zstd1"])
def test_the_header_is_that_of_the_payload_and_decoded_is_what_the_syncer_reads(codec: str) -> None:
    sealed = seal(SealJob(EFFECT, inputs(), codec), encoder(codec), "run", "a", 4)
    measured = dice("base", 0) - dice("local", 0) - dice("d5", 0) - dice("d6", 0)
    header = sealed.header
    assert (header.run_id, header.site_id, header.incarnation) == ("run", "a", 4)
    assert (header.fragment, header.sequence, header.base_version) == (0, 7, 3)
    assert (header.tokens, header.steps, header.step_ns, header.cursor, header.final) == (120, 12, 1000, 99, True)
    assert (header.encoding, header.numel) == (codec, measured.numel())
    assert (header.payload_bytes, header.digest) == (len(sealed.encoded.payload), digest_of(sealed.encoded.payload))
    assert header.values_digest == digest(make_codec(codec).decode(sealed.encoded.payload, measured.numel()))
    assert torch.equal(
        values_of(sealed.encoded.sent), make_codec(codec).decode(sealed.encoded.payload, measured.numel())
    )
    assert bytes(sealed.encoded.payload) == make_codec(codec).encode(measured)
    assert sealed.encoded.norm == pytest.approx(float(values_of(sealed.encoded.sent).norm()))


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_never_encoded(codec: str, bad: float) -> None:
    job = SealJob(EFFECT, inputs(), codec)
    job.inputs.local[3] = bad
    with pytest.raises(NonFiniteError):
        seal(job, encoder(codec), "run", "a", 4)


def test_an_update_is_in_the_outbox_before_it_is_told_and_out_of_it_when_it_is_dropped(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    found: list[tuple[SealedUpdate, dict[tuple[int, int], str]]] = []

    class Looks(Recorder):
        def keep_sealed(self, sealed: SealedUpdate) -> None:
            found.append((sealed, outbox.digests()))

    site = Looks()
    sealer = Sealer(site, [encoder("fp32")], outbox)
    ruined = SealInputs(dice("base", 0), [dice("local", 0) / 0.0], [])
    for order in (SealJob(EFFECT, inputs(), "fp32"), SealJob(replace(EFFECT, sequence=8), ruined, "fp32"), None):
        sealer.queue.put(order)
    sealer.run()
    ((sealed, held),) = found
    assert held == {(0, 7): sealed.header.digest}
    assert site.told == [SealFailed(0, 8)]
    for drop in ((0, 7), None):
        sealer.queue.put(drop)
    sealer.run()
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
    monkeypatch.setattr("diloco.learner.seal.ROOM_EVERY_S", 0.01)
    site = Recorder()
    outbox = Outbox(tmp_path, FullDisk(3, site.stopping if stops else None))
    sealer = Sealer(site, [encoder("fp32")], outbox)
    for order in (SealJob(EFFECT, inputs(), "fp32"), None):
        sealer.queue.put(order)
    sealer.run()
    said = [event.get("note", event["what"]) for event in site.events.all]
    assert said == (["disk_full"] if stops else ["disk_full", "disk_has_room", "sealed"])
    assert len(site.sealed) == len(outbox.digests()) == (0 if stops else 1)


@pytest.mark.parametrize(("codec", "stage"), [("int4", None), ("int4+zstd", "raw"), ("fp32+auto", "zstd")])
def test_what_became_of_the_entropy_stage_is_said(tmp_path: Path, codec: str, stage: str | None) -> None:
    site = Recorder()
    sealer = Sealer(site, [encoder(codec)], Outbox(tmp_path))
    even = SealInputs(torch.ones(4096), [torch.zeros(4096)], [])
    for order in (SealJob(EFFECT, inputs() if stage == "raw" else even, codec), None):
        sealer.queue.put(order)
    sealer.run()
    assert site.events.all[0].get("stage") == stage


def test_each_update_is_encoded_as_its_job_says(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    site = Recorder()
    sealer = Sealer(site, [encoder("int8"), encoder("int4")], outbox)
    for sequence, codec in enumerate(["int8", "int4", "int8"], 1):
        sealer.queue.put(SealJob(replace(EFFECT, sequence=sequence), inputs(), codec))
    sealer.queue.put(None)
    sealer.run()
    assert [each.header.encoding for each in site.sealed] == ["int8", "int4", "int8"]
    assert [event["codec"] for event in site.events.all] == ["int8", "int4", "int8"]
    assert [outbox.get(0, sequence, 4)[0].encoding for sequence in (1, 2, 3)] == ["int8", "int4", "int8"]
