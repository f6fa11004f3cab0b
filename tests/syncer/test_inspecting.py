"""An update looked at as it comes is what it is when it is looked at whole, and each range is looked at once."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diloco.codec import merging
from diloco.codec.base import Buffers, DecodeError, digest
from diloco.codec.registry import make_codec
from diloco.syncer.api import LARGEST, Inspection, Vitals
from diloco.wire.messages import PushHeader
from tests.syncer.building import update

NUMEL = 5000
NAMES = ("fp32", "bf16", "int8", "int4:32", "int4+zstd1", "fp32+zstd1")


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "RANGE_VALUES", 1024)
    monkeypatch.setattr(merging, "READ_VALUES", 1024)


def dice(seed: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


class Arriving:
    """A payload that is written piece by piece and looked at after each."""

    def __init__(self, folder: Path, header: PushHeader, payload: bytes, momentum: torch.Tensor | None = None) -> None:
        self.path = folder / "payload"
        self.payload = payload
        self.path.touch()
        self.begun = 0
        self.momentum = momentum
        self.inspection = Inspection(self.path, header, lambda: self.momentum, nullcontext(), self._begins, Buffers(1))

    def _begins(self) -> None:
        self.begun += 1

    def come(self, upto: int) -> None:
        held = self.path.stat().st_size
        with self.path.open("ab") as file:
            file.write(self.payload[held:upto])
        self.inspection.advance(max(held, upto))

    def all(self, step: int) -> Vitals:
        for upto in range(step, len(self.payload) + step, step):
            self.come(min(upto, len(self.payload)))
        try:
            return self.inspection.finish()
        finally:
            self.inspection.close()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("step", [97, 1 << 20])
def test_the_pieces_it_came_in_change_nothing(tmp_path: Path, name: str, step: int) -> None:
    values, momentum = dice(1), dice(2)
    header, payload = update(values=values, encoding=name)
    decoded = make_codec(name).decode(payload, NUMEL)
    arriving = Arriving(tmp_path, replace(header, values_digest=digest(decoded)), payload, momentum)
    found = arriving.all(step)
    assert found.intact
    assert found.norm == pytest.approx(float(torch.linalg.vector_norm(decoded.double())), rel=1e-12)
    assert found.cosine == pytest.approx(float(torch.cosine_similarity(decoded, momentum, dim=0)), abs=1e-6)
    assert arriving.begun == 1


@pytest.mark.parametrize("name", NAMES)
def test_other_values_than_the_site_has_decoded_are_not_intact(tmp_path: Path, name: str) -> None:
    header, payload = update(values=dice(1), encoding=name)
    found = Arriving(tmp_path, replace(header, values_digest=digest(dice(3))), payload).all(500)
    assert (found.finite, found.intact) == (True, False)


def test_what_has_come_has_been_looked_at_and_only_the_rest_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header, payload = update(values=dice(1), encoding="int4:32")
    arriving = Arriving(tmp_path, header, payload)
    looked: list[tuple[int, int]] = []
    look = Inspection._look
    monkeypatch.setattr(Inspection, "_look", lambda self, *given: (looked.append(given[-1]), look(self, *given))[1])
    scales = 2 * (NUMEL // 32 + 1)
    arriving.come(scales + 511)
    assert looked == []
    arriving.come(scales + 512)
    assert looked == [(0, 1024)]
    arriving.come(len(payload) - 1)
    assert looked[1:] == [(1024, 2048), (2048, 3072), (3072, 4096)]
    arriving.come(len(payload))
    assert looked[4:] == [(4096, 5000)]
    arriving.inspection.finish()
    assert len(looked) == 5
    arriving.inspection.close()


@pytest.mark.parametrize("place", [0, 2000, NUMEL - 1])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 2 * LARGEST])
def test_what_is_not_finite_is_found_wherever_it_stands(tmp_path: Path, place: int, bad: float) -> None:
    values = dice(1)
    values[place] = bad
    header, payload = update(values=values)
    found = Arriving(tmp_path, header, payload).all(333)
    assert (found.finite, found.norm, found.cosine) == (False, 0.0, None)


@pytest.mark.parametrize("block", [0, 60, 156])
def test_what_nobody_encoded_is_refused_wherever_it_stands(tmp_path: Path, block: int) -> None:
    header, payload = update(values=dice(1), encoding="int8:32")
    broken = bytearray(payload)
    broken[2 * block : 2 * block + 2] = b"\xff\xff"
    with pytest.raises(DecodeError, match="negative, subnormal or not finite"):
        Arriving(tmp_path, header, bytes(broken)).all(333)


@pytest.mark.parametrize("payload", [b"\x02" + bytes(100), b"\x01" + bytes(100), b"\x00" + bytes(100)])
def test_an_entropy_stage_that_is_none_is_refused(tmp_path: Path, payload: bytes) -> None:
    header = replace(update(values=dice(1), encoding="int4+zstd")[0], payload_bytes=len(payload))
    with pytest.raises(DecodeError):
        Arriving(tmp_path, header, payload).all(33)


def test_blocks_are_measured_against_the_momentum_of_their_time(tmp_path: Path) -> None:
    values = dice(1)
    arriving = Arriving(tmp_path, *update(values=values), momentum=dice(2))
    arriving.come(4 * 3000)
    arriving.momentum = dice(3)
    seen = torch.cat([dice(2)[:2048], dice(3)[2048:]])
    cosine = arriving.all(4 * NUMEL).cosine
    assert cosine == pytest.approx(float(torch.cosine_similarity(values, seen, dim=0)), abs=1e-6)


def test_who_looks_has_entered(tmp_path: Path) -> None:
    header, payload = update(values=dice(1))
    (tmp_path / "payload").write_bytes(payload)
    checks = threading.BoundedSemaphore(1)
    told: list[bool] = []

    def momentum() -> None:
        told.append(checks.acquire(blocking=False))

    inspection = Inspection(tmp_path / "payload", header, momentum, checks, lambda: None, Buffers(1))
    inspection.finish()
    inspection.close()
    assert told == [False] * 5
    assert checks.acquire(blocking=False)
