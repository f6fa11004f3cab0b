"""How a site seals an update: measure the pseudo-gradient, encode it, and write it to the outbox.

Encoding happens where the values are.  On the host the codec itself encodes.  On an accelerator a codec that has
kernels (``codec.gpu.accelerated``) encodes there, so that only the payload, a fault flag and a norm are copied to the
host; with any other codec the pseudo-gradient is copied and encoded on the host.  Either way the bytes are the same.
The host needs the decoded values for the update's digest and norm, which the same pass computes.  An accelerator keeps
them for later arithmetic; on the host, later arithmetic decodes the payload itself.

Outbox.  A sealed update is durable before its first byte is sent, so that a new process can send the same bytes.  Each
update is one file, ``<fragment>-<sequence>.update``: a line, then the payload.  The line holds the CRC-32 of its rest,
as eight hexadecimal digits, and the header's fields as JSON; the header holds the digest of the payload.

A file that is no longer needed is kept for a while under a spare name, and the next update is written over it.  If a
power cut brings its old name back, its content is damaged or belongs to another name, and either counts as missing.
The last updates stay in memory as well until they are read once, so that the first send reads no file.

Odometer.  ``Odometer`` records how far the site got, readable after a kill -9.  It is a memory-mapped file: a write is
a store to memory, cheap enough for the training thread, and the kernel keeps the page when the process dies.  A power
cut may lose the last seconds.  The ledger then counts too few lost tokens, which is why the checkpoint and the syncer's
figures are used as well.  The file holds two readings, each with a checksum, written in turn: a damaged or incomplete
reading is detected, and the other one is from the step before it.  An earlier release kept one reading without a
checksum.
"""

from __future__ import annotations

import json
import mmap
import struct
import threading
import time
import zlib
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from math import sqrt
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diloco.codec.base import Buffers, Hasher, bytes_of, digest, digest_of
from diloco.codec.gpu import DevicePasses, accelerated, new_fault
from diloco.codec.merging import ranges, sum_of_products
from diloco.codec.registry import Coded, coded, values_of
from diloco.codec.site_pass import seal_pieces
from diloco.durable import PLAIN_DISK, Step
from diloco.learner.tensors import Fed, SealInputs
from diloco.sync.effects import Seal
from diloco.sync.journal import parse_json
from diloco.wire.messages import PushHeader

if TYPE_CHECKING:
    from pathlib import Path

    from diloco.codec.base import Codec
    from diloco.durable import Disk
    from diloco.learner.tensors import Place


@dataclass(frozen=True, slots=True)
class Encoded:
    """An encoded update.  ``sent`` holds the decoded values on the model's device; on the host without feedback it is
    the payload before its entropy stage.

    ``norm`` is the L2 norm of the decoded values, ``digest`` their digest.  ``fed`` is the new residual, where feedback
    is on.
    """

    payload: bytes | memoryview
    sent: Tensor | Coded
    norm: float
    digest: str
    fed: Fed | None = None


class Encoder:
    """Encodes the updates of one site, one at a time, in a background thread; reuses its buffers."""

    def __init__(self, codec: Codec, place: Place, buffers: Buffers | None = None) -> None:
        """``buffers`` supplies memory for payloads on the host."""
        self.codec = codec
        self._buffers = buffers if buffers is not None else Buffers(0)
        self._place = place
        self._passes: DevicePasses | None = None
        self._pinned: dict[torch.dtype, Tensor] = {}
        self.where = "host"
        """Where updates are encoded, and why there."""
        if place.is_host:
            return
        passes = accelerated(codec.plain)
        if passes is None:
            self.where = f"host, values from {place.device}: {codec.plain.name} has no kernel there"
        elif find_spec("triton") is None:
            self.where = f"host, values from {place.device}: Triton is not installed (pip install 'diloco[gpu]')"
        else:
            self._passes, self.where = passes, f"{place.device}, Triton"

    def encode(self, inputs: SealInputs) -> Encoded:
        """Encode ``base - local - sent...``, with feedback plus beta times the residual; ``NonFiniteError`` where that
        is not finite.  It overwrites the private copy in ``inputs``.
        """
        if self._place.is_host and inputs.beta:
            return self._feed_here(inputs)
        if self._place.is_host:  # In one pass.
            plain, numel, sent = self.codec.plain, inputs.reference.numel(), [coded(each) for each in inputs.in_flight]
            payload = self._buffers.raw(plain.payload_bytes(numel))
            found, norm = seal_pieces(inputs.pieces, inputs.reference, sent, plain, payload)
            kept = Coded(plain, bytes_of(payload), numel)
            return Encoded(self.codec.closed(payload), kept, norm, found)
        fed = None
        if inputs.beta:  # In memory allocated for the training stream.
            fed = Fed(inputs.residual, *(torch.empty_like(inputs.local) for _ in range(3)))
        if self._passes is not None:
            return self._encode_there(inputs, fed, self._passes)
        return self._encode_fetched(inputs, fed)

    def _feed_here(self, inputs: SealInputs) -> Encoded:
        """Encode on the host with feedback, in ranges that are hashed and measured while still in the cache.  The
        decoded values overwrite the copy of the site's values."""
        plain, decoded, fresh = self.codec.plain, inputs.local, inputs.pseudo_gradient()
        residual = None if inputs.residual is None else inputs.residual.clone()
        numel, in_flight = decoded.numel(), [values_of(each) for each in inputs.in_flight]
        payload, found, squares = self._buffers.raw(plain.payload_bytes(numel)), Hasher(), 0.0
        for start, stop in ranges(numel, [plain]):
            part = decoded[start:stop]
            plain.encode_into(
                (inputs.reference[start:stop], part, *(sent[start:stop] for sent in in_flight)),
                payload,
                part,
                residual=None if residual is None else residual[start:stop],
                beta=inputs.beta,
                start=start,
                numel=numel,
            )
            found.update(bytes_of(part))
            squares += sum_of_products(part, part)
        term = torch.sub(fresh, decoded)
        fed = Fed(inputs.residual, fresh, term, term if residual is None else residual)
        return Encoded(self.codec.closed(payload), decoded, sqrt(squares), found.text(), fed)

    def _encode_there(self, inputs: SealInputs, fed: Fed | None, passes: DevicePasses) -> Encoded:
        local, device = inputs.local, self._place.device
        payload, fault = passes.payload(local.numel(), device), new_fault(device)
        # The decoded values overwrite the copy of the site's values, as on the host.
        decoded, norm = local, torch.empty((), dtype=torch.float32, device=device)
        told = self._room(payload.numel(), torch.uint8)
        told_fault, told_norm = self._room(1, torch.int32), self._room(1, torch.float32)
        with self._place.beside():
            if fed is None:
                sent = [values_of(each) for each in inputs.in_flight]
                passes.encode((inputs.reference, local, *sent), payload, fault, decoded)
            else:
                passes.encode((fed.measure(inputs),), payload, fault, decoded)
                fed.subtract(decoded)
            torch.linalg.vector_norm(decoded, out=norm)
            told.copy_(payload, non_blocking=True)
            told_fault.copy_(fault, non_blocking=True)
            told_norm.copy_(norm, non_blocking=True)
        passes.check(int(told_fault))
        closed = bytes(self.codec.closed(told))
        here = self.codec.plain.decode(told.numpy().data, local.numel())
        return Encoded(closed, decoded, float(told_norm), digest(here), fed)

    def _encode_fetched(self, inputs: SealInputs, fed: Fed | None) -> Encoded:
        """Measure on the device, encode on the host, and compute the residual on the device."""
        measured = self._room(inputs.local.numel(), torch.float32)
        with self._place.beside():
            values = inputs.pseudo_gradient() if fed is None else fed.measure(inputs)
            measured.copy_(values, non_blocking=True)
        del values
        payload = self.codec.encode(measured)
        decoded = measured.clone() if self.codec.lossless else self.codec.decode(payload, measured.numel())
        norm, there = float(torch.linalg.vector_norm(decoded)), self._place.of(decoded)
        if fed is not None:
            with self._place.beside():
                fed.subtract(there)
        return Encoded(payload, there, norm, digest(decoded), fed)

    def _room(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return page-locked host memory, to which the device copies directly; one buffer for each type, reused."""
        held, pin = self._pinned.get(dtype), self._place.device.type == "cuda"
        if held is None or held.numel() < numel:
            held = self._pinned[dtype] = torch.empty(numel, dtype=dtype, pin_memory=pin)
        return held[:numel]


@dataclass(frozen=True, slots=True)
class SealJob:
    """The machine's order to seal, with the tensors as they were at that boundary."""

    effect: Seal
    inputs: SealInputs
    codec: str
    """The name of the codec."""
    seal_s: float = 0.0
    """Seconds that the training thread took for it."""
    since_s: float = field(default_factory=time.perf_counter)
    """When it began to wait for the thread that encodes."""


def seal(job: SealJob, encoder: Encoder, run_id: str, site_id: str, incarnation: int) -> tuple[PushHeader, Encoded]:
    """Measure, encode and describe an update; ``NonFiniteError`` when the site's values are not finite."""
    encoded, ordered = encoder.encode(job.inputs), asdict(job.effect)
    del ordered["in_flight"]  # All other fields of the order are the header's as well.
    header = PushHeader(
        run_id=run_id,
        site_id=site_id,
        incarnation=incarnation,
        encoding=encoder.codec.name,
        payload_bytes=len(encoded.payload),
        numel=job.inputs.reference.numel(),
        digest=digest_of(encoded.payload),
        values_digest=encoded.digest,
        **ordered,
    )
    return header, encoded


FRESH_MAX = 4
"""Most updates kept in memory as well."""
SPARE_MAX = 4
"""Most files of unneeded updates that are kept; the next updates are written over them."""


class OutboxError(ValueError):
    """A file of the outbox is damaged; the text names it."""


class Outbox:
    """The folder of sealed updates of one site.

    Several ranks of the site may have it open, each for its own fragments.  A file is named by its fragment, so a new
    process finds it, whatever rank wrote it.
    """

    def __init__(self, folder: Path, disk: Disk = PLAIN_DISK, *, settled: bool = False) -> None:
        """``settled``: another rank has removed the leftovers of earlier processes."""
        self.folder = folder
        self._disk = disk
        self._fresh: dict[tuple[int, int], tuple[PushHeader, memoryview]] = {}
        self._fresh_lock = threading.Lock()
        self._spare: list[Path] = []
        self._reading = threading.Lock()  # Held while a file is read, and while it is renamed to a spare.
        if settled:
            return
        disk.settle(folder, Step.OUTBOX_FOLDER)
        for leftover in folder.glob(".*.tmp"):
            disk.remove(leftover, Step.OUTBOX_DROP)

    def put(self, header: PushHeader, payload: bytes | memoryview) -> Path:
        """Make an update durable, replacing an earlier one of the same sequence, and return its path.

        ``payload`` must not change afterwards.
        """
        fields = json.dumps(asdict(header), sort_keys=True).encode()
        line = b"%08x %b\n" % (zlib.crc32(fields), fields)
        key, view = (header.fragment, header.sequence), memoryview(payload)
        spare, path = self._spare.pop() if self._spare else None, self.folder / _name(*key)
        self._disk.write_parts(path, (line, view), Step.OUTBOX_PUT, over=spare)
        with self._fresh_lock:
            self._fresh.pop(key, None)  # So that it is the latest.
            self._fresh[key] = (header, view)
            while len(self._fresh) > FRESH_MAX:
                del self._fresh[next(iter(self._fresh))]
        return path

    def get(self, fragment: int, sequence: int) -> tuple[PushHeader, memoryview]:
        """Return an update: from memory at the first call after ``put``, then from its file.

        ``OutboxError`` if that is damaged, ``FileNotFoundError`` if it was dropped.
        """
        with self._fresh_lock:
            found = self._fresh.pop((fragment, sequence), None)
        if found is not None:
            return found
        with self._reading:
            return _read(self.folder / _name(fragment, sequence))

    def drop(self, fragment: int, sequence: int) -> None:
        """Remove an update that is no longer needed; its file may become a spare."""
        with self._fresh_lock:
            self._fresh.pop((fragment, sequence), None)
        path = self.folder / _name(fragment, sequence)
        if len(self._spare) >= SPARE_MAX or not path.exists():
            self._disk.remove(path, Step.OUTBOX_DROP)
            return
        spare = path.with_name(f".{path.name}.tmp")
        with self._reading:
            self._disk.rename(path, spare, Step.OUTBOX_DROP)
        self._spare.append(spare)

    def digests(self) -> dict[tuple[int, int], str]:
        """Return the digest of every undamaged update, by (fragment, sequence)."""
        found: dict[tuple[int, int], str] = {}
        for path in sorted(self.folder.glob("*.update")):
            try:
                header, _ = _read(path)
            except OutboxError:
                continue  # The machine then takes its progress back as unsent, so nothing is lost.
            found[header.fragment, header.sequence] = header.digest
        return found

    def clear(self, keep: set[tuple[int, int]]) -> None:
        """Remove an earlier process's updates that are not in ``keep``, given as (fragment, sequence)."""
        for path in self.folder.glob("*.update"):
            fragment, _, sequence = path.stem.partition("-")
            if (int(fragment), int(sequence)) not in keep:
                self._disk.remove(path, Step.OUTBOX_DROP)


def _name(fragment: int, sequence: int) -> str:
    return f"{fragment}-{sequence}.update"


def _read(path: Path) -> tuple[PushHeader, memoryview]:
    data = path.read_bytes()
    line, newline, _ = data.partition(b"\n")
    try:
        if not newline or line[:9] != b"%08x " % zlib.crc32(line[9:]):
            raise ValueError("its header does not match its checksum")
        fields = parse_json(line[9:])
        fields["spans"] = tuple((start, stop) for start, stop in fields.get("spans", ()))
        header = PushHeader(**fields)
        if path.name != _name(header.fragment, header.sequence):
            raise ValueError("it was written under another name")
        payload = memoryview(data)[len(line) + 1 :]
        if digest_of(payload, header.digest) != header.digest:
            raise ValueError("its digest is not the one it was sealed with")
        return header, payload
    except (ValueError, TypeError, AttributeError) as error:
        raise OutboxError(f"{path} is damaged: {error}") from error


FIELDS = struct.Struct("<QQ")
SLOT = struct.Struct("<QQI4x")
"""Step, tokens and the CRC-32 of both."""


class Odometer:
    """Counts a site's steps and tokens over all its processes.

    ``reading`` is (step, tokens processed); zeros where nothing is known.  ``damage`` is what was wrong with the file,
    empty if nothing.
    """

    def __init__(self, path: Path, disk: Disk = PLAIN_DISK) -> None:
        self._disk, self._next = disk, 0
        disk.make_folder(path.parent, Step.ODOMETER)
        whole = path.exists()
        self.reading, self.damage = _read_slots(path.read_bytes()) if whole else ((0, 0), "")
        if self.damage or not whole:
            disk.write_file(path, 2 * _slot(*self.reading), Step.ODOMETER)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 2 * SLOT.size)

    def write(self, step: int, tokens: int) -> None:
        """Record the present step and the tokens processed."""
        self._disk.reached(Step.ODOMETER)
        begin = self._next * SLOT.size
        self._map[begin : begin + SLOT.size] = _slot(step, tokens)
        self.reading, self._next = (step, tokens), 1 - self._next
        self._disk.reached(Step.ODOMETER)


def _slot(step: int, tokens: int) -> bytes:
    return SLOT.pack(step, tokens, zlib.crc32(FIELDS.pack(step, tokens)))


def _read_slots(data: bytes) -> tuple[tuple[int, int], str]:
    """Return the reading in a file, and what is wrong with the file ("" if nothing)."""
    if len(data) == FIELDS.size:
        step, tokens = FIELDS.unpack(data)
        return (step, tokens), f"is of an earlier release, without a checksum: {tokens:,} tokens are taken from it"
    found = SLOT.iter_unpack(data) if len(data) == 2 * SLOT.size else iter(())
    good = [(step, tokens) for step, tokens, crc in found if crc == zlib.crc32(FIELDS.pack(step, tokens))]
    if not good:
        return (0, 0), "is damaged: the site's progress is taken from its checkpoint"
    step, tokens = max(good, key=lambda reading: reading[1])
    if len(good) == 1:
        return (step, tokens), f"has one damaged reading of two: the site goes on from the other, {tokens:,} tokens"
    return (step, tokens), ""
