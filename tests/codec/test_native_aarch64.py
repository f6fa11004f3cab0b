"""The kernels on AArch64, built by Debian's cross compiler and run by qemu: the same bits as here, for every format.

The same calls are made on the same memory on both sides, and all of that memory is compared: what is written, and what
must not be.  What the kernels compute here is compared with plain torch in ``test_base`` and beside it.
"""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco.codec import kernel_library
from diloco.codec.base import BYTES_MIN, kernels, tile
from diloco.codec.kernel_library import (
    SUM_BLOCK,
    DecodeJob,
    DigestState,
    EncodeJob,
    Fold,
    FollowJob,
    MeasureJob,
    OuterJob,
    Pieces,
    Place,
    Rule,
    SealJob,
    Status,
    TakeJob,
    Update,
)
from diloco.codec.registry import make_codec

ROOT = Path(__file__).resolve().parents[2]
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
FUNCTIONS = {EncodeJob: 0, DecodeJob: 1, MeasureJob: 2, OuterJob: 3, SealJob: 4, FollowJob: 5, TakeJob: 6}
NAMES = ["encode", "decode", "measure", "outer", "seal", "follow", "take"]
CODECS = ["fp32", "bf16", "int8", "int8:256", "int8:6", "int4", "int4:64", "int4:6", "e3m0", "e3m0:8", "int2"]
CODECS += ["int2:24", "sign", "sign:8", "topk", "topk:256x8", "topk:256x64"]
EDGES = [256, 512, 1024, 2048, 4096]
# Of 0 to 4097: every remainder of vectors and blocks, and what lies around the sizes that are handled at a time.  The
# hunt has all of them.
SIZES = [*range(132), *(size for edge in EDGES for size in range(edge - 4, edge + 4)), 1503, 3333, 4097]
pytestmark = [
    pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no {COMPILER} here (Debian: g++-aarch64-linux-gnu)"),
    pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"no {EMULATOR} here (Debian: qemu-user)"),
    pytest.mark.skipif(kernels() is None, reason="no compiled kernels here: " + kernel_library.description()),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``aarch64_calls.cpp`` with the kernels in it, built as the package builds them."""
    [module] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    source, built = Path(__file__).with_name("aarch64_calls.cpp"), tmp_path_factory.mktemp("aarch64") / "calls"
    command = [COMPILER, *module["extra-compile-args"], "-static", f"-I{ROOT / 'diloco/codec/kernels'}", str(source)]
    subprocess.run([*command, "-o", str(built)], check=True)
    return built


class Memory:
    """Memory that is the same wherever it lies, with calls of the kernels on it: a pointer is an offset."""

    def __init__(self) -> None:
        self.data = bytearray(64)  # nothing lies at 0, which is the null pointer
        self.pointers: list[int] = []
        self.calls: list[tuple[int, int]] = []

    def put(self, data: bytes, skew: int = 0) -> int:
        """Place bytes ``skew`` behind a multiple of 64."""
        at = (len(self.data) + 63) // 64 * 64 + skew
        self.data += bytes(at - len(self.data)) + data
        return at

    def put_pointers(self, targets: list[int]) -> int:
        at = self.put(struct.pack(f"<{len(targets)}Q", *targets))
        self.pointers += range(at, at + 8 * len(targets), 8)
        return at

    def put_structure(self, kind: type[ctypes.Structure], values: dict[str, Any], at: int | None = None) -> int:
        """Place one whose pointers are given as offsets; fields that are not given are 0."""
        at = self.put(bytes(ctypes.sizeof(kind))) if at is None else at
        for name, of in kind._fields_:
            field, value = getattr(kind, name), values.get(name)
            if value is None:
                continue
            if of is Pieces:
                self.put_structure(of, value, at + field.offset)
            elif isinstance(value, ctypes.Structure):
                self.data[at + field.offset : at + field.offset + field.size] = bytes(value)
            elif of is ctypes.c_void_p or issubclass(of, ctypes._Pointer):
                struct.pack_into("<Q", self.data, at + field.offset, value)
                self.pointers.append(at + field.offset)
            else:
                self.data[at + field.offset : at + field.offset + field.size] = bytes(of(value))
        return at

    def call(self, job: type[ctypes.Structure], **values: Any) -> None:
        self.calls.append((FUNCTIONS[job], self.put_structure(job, values)))

    def run_here(self, level: int) -> tuple[list[int], bytes]:
        """Make the calls with the library of this process."""
        room = np.frombuffer(bytearray(len(self.data) + 64), dtype=np.uint8)
        begin = -room.ctypes.data % 64
        memory = room[begin : begin + len(self.data)]
        memory[:] = np.frombuffer(self.data, dtype=np.uint8)
        words = memory[: len(memory) // 8 * 8].view(np.uint64)
        words[np.array(self.pointers) // 8] += np.uint64(memory.ctypes.data)
        fast = kernel_library.choice().kernels
        assert fast is not None
        statuses = [
            getattr(fast.library, f"diloco_{NAMES[function]}")(level, ctypes.c_void_p(memory.ctypes.data + job))
            for function, job in self.calls
        ]
        words[np.array(self.pointers) // 8] -= np.uint64(memory.ctypes.data)
        return statuses, memory.tobytes()

    def run_there(self, program: Path) -> tuple[list[int], bytes]:
        """Make them with the program under the emulator."""
        self.data += bytes(-len(self.data) % 64)
        head = struct.pack("<3q", len(self.data), len(self.pointers), len(self.calls))
        pointers = struct.pack(f"<{len(self.pointers)}q", *self.pointers)
        calls = b"".join(struct.pack("<2q", *each) for each in self.calls)
        text = head + bytes(self.data) + pointers + calls
        told = subprocess.run([EMULATOR, str(program)], input=text, stdout=subprocess.PIPE, check=True).stdout
        count = len(self.calls)
        return list(struct.unpack_from(f"<{count}i", told)), told[4 * count :]


class Case:
    """One codec and one size: what all its calls work on, each at another distance from a line of the cache."""

    def __init__(self, memory: Memory, name: str, numel: int, giant: float = 0.0) -> None:
        """``giant`` is added to the value in the middle."""
        codec = make_codec(name).plain
        self.memory, self.codec, self.numel = memory, codec, numel
        self.format = codec.format(numel)
        self.random = np.random.default_rng([numel, len(name), codec.block])
        base = self.draw() + 1
        base[numel // 2 : numel // 2 + 1] += np.float32(giant)
        self.base, self.local = self.values(base), self.values(self.draw() * np.float32(1e-3))
        self.sent, self.fed = self.payload(), self.payload()

    def draw(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Gaussian values, some of them equal, 0 of either sign or subnormal."""
        found = self.random.standard_normal(self.numel).astype(np.float32)
        for value in (0.0, -0.0, 0.5, -0.5, 1e-40):
            found[self.random.random(self.numel) < 0.02] = value
        return found

    def skew(self) -> int:
        return 4 * int(self.random.integers(16))

    def values(self, values: np.ndarray[Any, np.dtype[np.float32]] | None = None) -> int:
        return self.memory.put(bytes(4 * self.numel) if values is None else values.tobytes(), self.skew())

    def payload(self) -> int:
        """Room at any address."""
        return self.memory.put(bytes(self.codec.payload_bytes(self.numel)), int(self.random.integers(64)))

    def tile(self) -> int:
        return tile(SUM_BLOCK, [self.codec])

    def digest(self) -> int | None:
        if 4 * self.numel < BYTES_MIN:
            return None
        return self.memory.put_structure(DigestState, {"total": 4 * self.numel})

    def updates(self, *places: Place) -> int:
        """The two payloads as updates with these places."""
        size = ctypes.sizeof(Update)
        at = self.memory.put(bytes(size * len(places)))
        for index, (place, payload) in enumerate(zip(places, (self.sent, self.fed), strict=False)):
            update = {"format": self.format, "payload": payload, "place": place, "share": 0.4}
            self.memory.put_structure(Update, update, at + size * index)
        return at

    def pieces(self) -> dict[str, int]:
        """Two, in one of which most tiles lie."""
        cut, values = self.numel // 3, self.draw()
        places = [self.memory.put(part.tobytes(), self.skew()) for part in (values[:cut], values[cut:])]
        return {
            "values": self.memory.put_pointers(places),
            "ends": self.memory.put(struct.pack("<2q", cut, self.numel)),
            "count": 2,
        }

    def encode(self) -> None:
        """Encode a difference, one with feedback, and values."""
        whole = {"format": self.format, "count": self.numel}
        less = {"less": self.memory.put_pointers([self.local]), "less_count": 1}
        self.memory.call(EncodeJob, **whole, **less, values=self.base, payload=self.sent, decoded=self.values())
        residual = self.values(self.draw() * np.float32(1e-3))
        carried = {"residual": residual, "beta": 0.95}
        self.memory.call(EncodeJob, **whole, **less, values=self.base, payload=self.fed, **carried)
        self.memory.call(EncodeJob, **whole, values=self.base, payload=self.payload())

    def decode(self) -> None:
        """Decode, add and move towards."""
        whole = {"format": self.format, "count": self.numel}
        for fold, payload in ((Fold.WRITE, self.sent), (Fold.ADD, self.fed), (Fold.TOWARDS, self.sent)):
            out = self.values(self.draw())
            self.memory.call(DecodeJob, **whole, payload=payload, held=out, out=out, fold=fold, share=0.3)

    def refuse(self) -> None:
        """Decode what is no payload."""
        noise = self.memory.put(self.random.bytes(self.codec.payload_bytes(self.numel)))
        out = self.values()
        self.memory.call(DecodeJob, format=self.format, count=self.numel, payload=noise, held=out, out=out)

    def passes(self) -> None:
        """The passes of a syncer and of a site."""
        whole = {"stop": self.numel, "tile": self.tile()}
        decoded = {"format": self.format, "count": self.numel, "tile": self.tile(), "payload": self.sent}
        self.memory.call(MeasureJob, **decoded, out=self.values(), digest=self.digest())
        self.memory.call(MeasureJob, **decoded, against=self.local)
        for rule in Rule:
            for fused in (0, 1):
                held = {name: self.values(self.draw()) for name in ("theta", "published", "momentum")}
                after = {f"{name}_after": self.values() for name in held}
                both = self.updates(
                    Place.IN_MEAN | Place.OPENS_SITE | Place.ENDS_SITE, Place.OPENS_SITE | Place.ENDS_SITE
                )
                down = {"down": self.format, "payload": self.payload(), "lossless": self.codec.lossless}
                step = {"rule": rule, "fused": fused, "minus_lr": -0.7, "momentum_factor": 0.9}
                self.memory.call(OuterJob, **whole, **held, **after, **down, **step, updates=both, updates_count=2)
        one = self.updates(Place(0))
        for count in (0, 1):
            sealed = {"sent": one, "sent_count": count, "payload": self.payload(), "digest": self.digest()}
            self.memory.call(SealJob, **whole, **sealed, format=self.format, local=self.pieces(), base=self.base)
        following = {"parts": one, "parts_count": 1, "out": self.values(), "digest": self.digest()}
        self.memory.call(FollowJob, **whole, **following, held=self.base)
        taken = {"merged": one, "merged_count": 1, "old_base": self.base, "new_base": self.local}
        self.memory.call(TakeJob, **whole, **taken, local=self.pieces())


def compare(program: Path, memory: Memory) -> list[int]:
    """Make the calls on both sides; returns their statuses."""
    fast = kernels()
    assert fast is not None
    statuses, after = memory.run_there(program)
    here, expected = memory.run_here(fast.level)
    assert statuses == here
    if set(statuses) == {Status.DONE} and after != expected:
        first = next(at for at, (one, other) in enumerate(zip(after, expected, strict=True)) if one != other)
        [function, job] = max((call for call in memory.calls if call[1] < first), key=lambda call: call[1])
        pytest.fail(f"byte {first} differs, behind the job at {job} of {NAMES[function]}")
    return statuses


@pytest.mark.parametrize(
    "sizes", [pytest.param(SIZES, marks=pytest.mark.slow), pytest.param(range(4098), marks=pytest.mark.hunt)]
)
@pytest.mark.parametrize("name", CODECS)
def test_the_bits_are_the_same(program: Path, name: str, sizes: Sequence[int]) -> None:
    for first in range(0, len(sizes), 241):
        memory = Memory()
        for numel in sizes[first : first + 241]:
            case = Case(memory, name, numel)
            case.encode()
            case.decode()
            if numel in (1, 33, 67, 1503, 2049, 4095, 4097):
                case.passes()
        assert set(compare(program, memory)) == {Status.DONE}


@pytest.mark.slow
@pytest.mark.parametrize("name", CODECS)
def test_giants_are_held_and_what_is_not_finite_is_refused(program: Path, name: str) -> None:
    for giant, status in ((3e38, Status.DONE), (float("inf"), Status.NOT_FINITE)):
        memory = Memory()
        for numel in (1, 33, 300, 2051):
            Case(memory, name, numel, giant).encode()
        assert set(compare(program, memory)) == {status}


@pytest.mark.slow
def test_noise_is_refused_as_here(program: Path) -> None:
    memory = Memory()
    for name in CODECS:
        for numel in range(1, 40):
            Case(memory, name, numel).refuse()
    assert len(set(compare(program, memory))) > 8
