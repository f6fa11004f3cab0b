"""How fast are the codecs on one core, beside memcpy?

Rates are GB/s of fp32 (4 bytes for each value of the fragment, whatever else a call reads or writes) and multiples of
memcpy, which is ``Tensor.copy_`` of the same values in the same run.  All memory, memcpy's too, is from
``codec.base.Buffers``, as for the fragments of a run, allocated in advance and reused.  ``encode`` makes the payload of
``base - local``; ``ef_encode`` adds error feedback, and also reads and writes the residual; ``decode`` writes the
values, and ``accumulate`` moves a running mean towards them.  Times are CPU seconds of the one working thread, because
the question is about a core and the machine's cores are shared.  All calls alternate, forwards and backwards; the first
turn is not counted.  Before each call, memcpy's too, a tensor larger than the caches is read, so that no call finds its
input in the cache, or pays for writing back the data of the call before it, which made a difference of 10 % and more.
First, every payload and decoded value is compared with the plain torch version.  Bits per value and the relative L2
error are those of the difference, which is Gaussian.

The last line has ``x_memcpy`` and ``topk_gb_per_s`` from the medians, and ``level``, the kernels that ran: the best
that this CPU supports, or those that ``--level`` or ``DILOCO_KERNELS`` forces.  Run as ``python -m
benchmarks.bench_codec``.
"""

from __future__ import annotations

import os
from time import thread_time
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.record import finish, parser_of, percentile, record
from diloco.codec import kernel_library
from diloco.codec.base import Buffers, bytes_of
from diloco.codec.kernel_library import Fold
from diloco.codec.registry import make_codec

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco.codec.base import Codec

    Job = Callable[[], object]

CODECS = ("fp32", "bf16", "int8", "int8:256", "int4", "int4:256", "e3m0", "int2", "sign", "topk", "int4+zstd1")
OPERATIONS = ("encode", "ef_encode", "decode", "accumulate")
BETA = 0.95
CACHES_BYTES = 96 << 20
"""More than the caches of a core."""


class Bench:
    """One codec with its memory."""

    def __init__(self, name: str, base: torch.Tensor, local: torch.Tensor, out: torch.Tensor) -> None:
        """Prepare the codec ``name``; all codecs share ``out`` for their results."""
        self.codec: Codec = make_codec(name)
        room = Buffers(0)
        self.base, self.local, self.out = base, local, out
        self.payload = room.raw(self.codec.payload_bytes(base.numel()))
        self.sent = bytes(self.encode())
        self.residual = room.values(base.numel()).zero_()

    def encode(self, residual: torch.Tensor | None = None) -> memoryview:
        """Return the payload of the difference, as it is sent."""
        self.codec.plain.encode_into((self.base, self.local), self.payload, residual=residual, beta=BETA)
        return self.codec.closed(self.payload)

    def decode(self, fold: Fold = Fold.WRITE) -> None:
        """Decode the payload into ``out``."""
        plain, raw = self.codec.opened(self.sent, self.base.numel())
        plain.decode_into(raw, self.base.numel(), self.out, 0, fold, 0.5)

    def check(self) -> float:
        """Compare with the plain version and return the relative L2 error."""
        numel = self.base.numel()
        difference = self.base - self.local
        inner, raw = self.codec.opened(self.sent, numel)
        plain, decoded = torch.empty(len(raw), dtype=torch.uint8), torch.empty(numel)
        level = kernel_library.level_name()
        kernel_library.force(kernel_library.PLAIN)
        inner.encode_into((difference,), plain, decoded)
        kernel_library.force(level)
        if bytes(bytes_of(plain)) != bytes(raw):
            raise SystemExit(f"{self.codec.name}: the payload differs from the plain version's")
        self.decode()
        if not torch.equal(self.out.view(torch.int32), decoded.view(torch.int32)):
            raise SystemExit(f"{self.codec.name}: the values differ from the plain version's")
        error = torch.linalg.vector_norm((decoded - difference).double())
        return float(error / torch.linalg.vector_norm(difference.double()))

    def jobs(self) -> dict[str, Job]:
        """Return the operations by name."""
        return {
            "encode": self.encode,
            "ef_encode": lambda: self.encode(self.residual),
            "decode": self.decode,
            "accumulate": lambda: self.decode(Fold.TOWARDS),
        }


def in_turns(jobs: dict[str, Job], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of ``repeats`` calls of each job after one that is not counted; turns alternate in order."""
    other = torch.zeros(CACHES_BYTES // 4)
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(repeats + 1):
        for name in list(jobs) if turn % 2 else reversed(list(jobs)):
            other.sum()
            began = thread_time()
            jobs[name]()
            if turn:
                seconds[name].append(thread_time() - began)
    return seconds


def measure(bench: Bench, repeats: int) -> dict[str, Any]:
    """Return the row of one codec, with memcpy measured beside it."""
    error = bench.check()
    numel = bench.base.numel()
    seconds = in_turns({"memcpy": lambda: bench.out.copy_(bench.base)} | bench.jobs(), repeats)
    row: dict[str, Any] = {"codec": bench.codec.name}
    copied = percentile(seconds["memcpy"], 50)
    for name in ("memcpy", *OPERATIONS):
        row[f"{name}_p50_gb_per_s"] = round(4 * numel / percentile(seconds[name], 50) / 1e9, 3)
        row[f"{name}_p95_gb_per_s"] = round(4 * numel / percentile(seconds[name], 95) / 1e9, 3)
        row[f"{name}_x_memcpy"] = round(copied / percentile(seconds[name], 50), 3)
    row |= {"bits_per_value": round(8 * len(bench.sent) / numel, 4), "relative_l2_error": round(error, 6)}
    return row


def show(row: dict[str, Any]) -> None:
    cells = "".join(f"{row[f'{name}_p50_gb_per_s']:9.2f} x{row[f'{name}_x_memcpy']:<5.2f}" for name in OPERATIONS)
    print(
        f"{row['codec']:11}{row['memcpy_p50_gb_per_s']:8.2f}{cells}"
        f"{row['bits_per_value']:8.3f}{row['relative_l2_error']:10.5f}",
        flush=True,
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--values", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=21)
    forced = os.environ.get(kernel_library.VARIABLE, "")
    parser.add_argument("--level", default=forced, help="level of the kernels, as in DILOCO_KERNELS")
    options = parser.parse_args()
    if fault := kernel_library.force(options.level):
        parser.exit(2, f"{fault}\n")
    numel, repeats = (200_000, 3) if options.quick else (options.values, options.repeats)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(options.seed)
    room = Buffers(0)
    base = room.values(numel).copy_(torch.randn(numel, generator=generator))
    local = room.values(numel).copy_(base - torch.randn(numel, generator=generator) * 1e-3)
    out = room.values(numel).zero_()
    kernels = kernel_library.description()
    print(f"{numel:,} values, {repeats} repeats, kernels {kernels}; GB/s of fp32 on one core, x memcpy")
    print(f"{'codec':11}{'memcpy':>8}" + "".join(f"{name:>15} " for name in OPERATIONS) + f"{'bits':>7}{'rel. L2':>10}")
    rows = []
    for name in CODECS:
        rows.append(measure(Bench(name, base, local, out), repeats))
        show(rows[-1])
    found = {row["codec"]: row for row in rows}
    config = {"values": numel, "threads": 1, "kernels": kernels, "data": "gaussian difference, 1e-3"}
    told = record("codec", config, rows, options.seed, repeats=repeats) | {
        "level": kernel_library.level_name(),
        "x_memcpy": {
            "int4_encode": found["int4"]["encode_x_memcpy"],
            "int4_decode_accumulate": found["int4"]["accumulate_x_memcpy"],
            "int8_encode": found["int8"]["encode_x_memcpy"],
            "int4_ef_encode": found["int4"]["ef_encode_x_memcpy"],
        },
        "topk_gb_per_s": found["topk"]["encode_p50_gb_per_s"],
    }
    finish(told, save=options.save)


if __name__ == "__main__":
    main()
