"""How fast are the codecs beside memcpy?

GB/s of fp32 input for encode and decode of each codec, beside ``Tensor.copy_`` of the same values in the same run, with
bits per value and relative L2 error on Gaussian data.  Decode's GB/s count its fp32 output.  One warm-up call each, not
counted.  Run as ``python -m benchmarks.bench_codec``.
"""

from __future__ import annotations

import argparse
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.record import add_arguments, finish, percentile, record
from diloco.codec.registry import make_codec

if TYPE_CHECKING:
    from collections.abc import Callable

CODECS = ("fp32", "bf16", "int8", "int8:256", "int4", "int4:256", "int8+zstd1", "int4+zstd1")


def seconds_of(call: Callable[[], object], repeats: int) -> list[float]:
    call()
    samples = []
    for _ in range(repeats):
        start = perf_counter()
        call()
        samples.append(perf_counter() - start)
    return samples


def rates(samples: list[float], num_bytes: int, prefix: str) -> dict[str, float]:
    """Return the rate at the median and at the slow end (the 95th percentile of the time)."""
    return {
        f"{prefix}_p50_gb_per_s": round(num_bytes / percentile(samples, 50) / 1e9, 3),
        f"{prefix}_p95_gb_per_s": round(num_bytes / percentile(samples, 95) / 1e9, 3),
    }


def measure(name: str, values: torch.Tensor, repeats: int) -> dict[str, Any]:
    codec = make_codec(name)
    numel = values.numel()
    payload = codec.encode(values)
    decoded = codec.decode(payload, numel)
    error = torch.linalg.vector_norm((decoded - values).double()) / torch.linalg.vector_norm(values.double())
    row: dict[str, Any] = {"codec": name}
    row |= rates(seconds_of(lambda: codec.encode(values), repeats), 4 * numel, "encode")
    row |= rates(seconds_of(lambda: codec.decode(payload, numel), repeats), 4 * numel, "decode")
    row |= {"bits_per_value": round(8 * len(payload) / numel, 4), "relative_l2_error": round(error.item(), 6)}
    return row


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['codec']:12} {row['encode_p50_gb_per_s']:8.2f} {row['encode_p95_gb_per_s']:8.2f} "
        f"{row['decode_p50_gb_per_s']:8.2f} {row['decode_p95_gb_per_s']:8.2f} "
        f"{row['bits_per_value']:8.3f} {row['relative_l2_error']:10.5f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--values", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    numel, repeats = (200_000, 3) if options.quick else (options.values, options.repeats)
    values = torch.randn(numel, generator=torch.Generator().manual_seed(options.seed)) * 1e-3
    target = torch.empty_like(values)
    copies = rates(seconds_of(lambda: target.copy_(values), repeats), 4 * numel, "encode")
    copies |= {key.replace("encode", "decode"): rate for key, rate in copies.items()}
    rows: list[dict[str, Any]] = [{"codec": "memcpy", **copies, "bits_per_value": 32.0, "relative_l2_error": 0.0}]
    print(f"{numel:,} Gaussian values, {repeats} repeats, {torch.get_num_threads()} threads; GB/s of fp32")
    print(f"{'codec':12} {'enc p50':>8} {'enc p95':>8} {'dec p50':>8} {'dec p95':>8} {'bits':>8} {'rel. L2':>10}")
    show(rows[0])
    for name in CODECS:
        rows.append(measure(name, values, repeats))
        show(rows[-1])
    config = {"values": numel, "threads": torch.get_num_threads(), "data": "gaussian, standard deviation 1e-3"}
    finish(record("codec", config, rows, options.seed, repeats=repeats), save=options.save)


if __name__ == "__main__":
    main()
