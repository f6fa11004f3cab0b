"""How fast are the codecs on an accelerator, beside its own copy, and are their bytes those of the plain codecs?

First every pass is compared with the plain definition on the CPU, bit for bit: Gaussian, heavy-tailed and arbitrary
bits, odd sizes; any difference makes the exit code 1.  Then each pass is timed in alternation with a copy on the same
device, in alternating order.  A rate counts the bytes that a pass must read and write, once each; ``x_copy`` is that
rate over the copy's in the same turn.  ``to_host`` rows time how long a site waits until its update is in pinned
memory: encoding on a side stream and copying its bytes, compared with copying the fp32 values.

Needs torch with Triton and a CUDA device, and only ``diloco.codec`` of the package; without a device it says so, and
exits 0.  ``--device cpu`` with TRITON_INTERPRET=1 shows that it runs; its times mean nothing.
Run as ``python -m benchmarks.bench_gpu_codec``; ``--sweep`` times other launches too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.record import finish, parser_of, percentile, record
from diloco.codec.blocks import E3m0Codec, Int2Codec, Int4Codec, Int8Codec, SignCodec
from diloco.codec.gpu import accelerated, new_fault
from diloco.codec.topk import TopKCodec
from diloco.outer.pseudo_gradient import pseudo_gradient

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from torch import Tensor

    from diloco.codec.base import PlainCodec

# Constructed directly, because the registry also needs the library of the entropy stage.
TIMED: tuple[PlainCodec, ...] = (
    Int4Codec("int4:32", 32),
    Int4Codec("int4:256", 256),
    Int8Codec("int8:128", 128),
    E3m0Codec("e3m0:128", 128),
    Int2Codec("int2:256", 256),
    SignCodec("sign:128", 128),
    TopKCodec("topk:4096x64", 4096, 64),
)
ONLY_CHECKED: tuple[PlainCodec, ...] = (
    Int4Codec("int4:2", 2),
    Int8Codec("int8:48", 48),
    Int8Codec("int8:4096", 4096),
    Int2Codec("int2:40", 40),
    TopKCodec("topk:256x16", 256, 16),
)
SUMMARY = {
    "int4_encode": ("int4:32", "difference"),
    "int8_encode": ("int8:128", "difference"),
    "topk_encode": ("topk:4096x64", "difference"),
}
TARGET = 0.8
SWEEP = tuple((values, warps) for values in (1024, 2048, 4096, 8192) for warps in (2, 4, 8))
"""Launches: values per program, and warps."""
LEAST_REPEATS = 7


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over the tensors of a :class:`Room`; it moves ``num_tensors`` fp32 tensors and the payload."""

    name: str
    num_tensors: int
    run: Callable[[], None]


class Room:
    """The tensors of one measurement on the device, filled with fresh values."""

    def __init__(
        self, codec: PlainCodec, numel: int, launch: tuple[int, int] | None, values: list[Tensor], device: torch.device
    ) -> None:
        self.plain, self.device, self.numel = codec, device, numel
        found = accelerated(codec)
        assert found is not None, codec.name
        self.codec = found if launch is None else replace(found, program_values=launch[0], num_warps=launch[1])
        self.base, self.local, self.sent = (each.to(device, copy=True) for each in values)
        self.out, self.other = torch.full((2, numel), torch.nan, device=device).unbind()
        self.payload = self.codec.payload(numel, device)
        self.fault = new_fault(device)

    def passes(self) -> list[Pass]:
        """Return the passes to time."""
        codec, base, local, sent, out, payload = self.codec, self.base, self.local, self.sent, self.out, self.payload
        fault = self.fault
        return [
            Pass("encode", 1, lambda: codec.encode((base,), payload, fault)),
            Pass("difference", 2, lambda: codec.encode((base, local), payload, fault)),
            Pass("difference, decoded", 3, lambda: codec.encode((base, local), payload, fault, out)),
            Pass("one in flight, decoded", 4, lambda: codec.encode((base, local, sent), payload, fault, out)),
        ]


def pairs_of_values(numel: int, seed: int) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield the base, the local values and an update in flight, for three kinds of data."""
    random = torch.Generator().manual_seed(seed)
    normal = torch.randn(3, numel, generator=random)
    base, step, sent = normal.unbind()
    yield "gaussian", [base, base - step * 1e-3, sent * 1e-4]
    tailed = step / torch.rand(numel, generator=random).clamp_(min=1e-4)
    yield "heavy-tailed", [base, base - tailed * 1e-4, sent * 1e-5]
    bits = torch.randint(-(2**31), 2**31, (numel,), generator=random).to(torch.int32).view(torch.float32)
    # Halved, so that no sum of two values overflows.
    wild = torch.where(torch.isfinite(bits), bits, -0.0) / 2
    yield "any bits", [wild, torch.where(normal[1] > 0, 0.0, -wild), torch.zeros(numel)]


def differences(codec: PlainCodec, numel: int, seed: int, device: torch.device) -> list[str]:
    """Return a line for each difference from the plain codec; there must be none."""
    found: list[str] = []
    for kind, values in pairs_of_values(numel, seed):
        room = Room(codec, numel, None, values, device)
        base, local, sent = values
        where = f"{codec.name}, {numel} values, {kind}"

        def same(name: str, one: Tensor, other: Tensor, where: str = where) -> None:
            differ = int((one.cpu().view(torch.uint8) != other.view(torch.uint8)).sum())
            if differ:
                found.append(f"{where}: {differ} bytes of {name} differ")

        for sents in ((), (sent,), (sent, sent)) if codec in TIMED else ((sent,),):
            payload = torch.frombuffer(bytearray(codec.encode(pseudo_gradient(base, local, sents))), dtype=torch.uint8)
            there = [room.sent] * len(sents)
            room.codec.encode((room.base, room.local, *there), room.payload, room.fault, room.out)
            same(f"the payload, {len(sents)} in flight", room.payload, payload)
            decoded = codec.decode(payload.numpy().tobytes(), numel)
            same("what was sent", room.out, decoded)
        room.codec.check(int(room.fault))
    return found


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        begin = perf_counter()
        call()
        return perf_counter() - begin
    first: Any = torch.cuda.Event(enable_timing=True)
    last: Any = torch.cuda.Event(enable_timing=True)
    first.record()
    call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def in_turns(call: Callable[[], object], copy: Callable[[], object], repeats: int, device: torch.device) -> Any:
    """Return the seconds of both, one pair per turn, in alternating order, after two turns that are not counted."""
    taken = []
    for turn in range(-2, repeats):
        if turn % 2:
            pair = (seconds_of(call, device), seconds_of(copy, device))
        else:
            pair = (seconds_of(copy, device), seconds_of(call, device))[::-1]
        if turn >= 0:
            taken.append(pair)
    return taken


def measure(room: Room, each: Pass, repeats: int) -> dict[str, Any]:
    """Return the row of one pass: its rate, the copy's, and their ratio turn by turn."""
    moved = 4 * room.numel * each.num_tensors + room.payload.numel()
    copied = 8 * room.numel
    taken = in_turns(each.run, lambda: room.other.copy_(room.base), repeats, room.device)
    ratios = [(moved / mine) / (copied / copy) for mine, copy in taken]
    return {
        "codec": room.plain.name,
        "pass": each.name,
        "bytes_per_value": round(moved / room.numel, 3),
        "p50_gb_per_s": round(moved / percentile([mine for mine, _ in taken], 50) / 1e9, 1),
        "p95_gb_per_s": round(moved / percentile([mine for mine, _ in taken], 95) / 1e9, 1),
        "copy_gb_per_s": round(copied / percentile([copy for _, copy in taken], 50) / 1e9, 1),
        "x_copy": round(percentile(ratios, 50), 3),
        "x_copy_p5": round(percentile(ratios, 5), 3),
        "launch": [room.codec.program_values, room.codec.num_warps],
    }


def to_host(room: Room, repeats: int) -> dict[str, Any]:
    """Return the row of copying an update into pinned memory, beside that of the fp32 values."""
    pinned = torch.empty(room.payload.numel(), dtype=torch.uint8, pin_memory=True)
    values = torch.empty(room.numel, pin_memory=True)
    side = torch.cuda.Stream(room.device)

    def encoded() -> None:
        side.wait_stream(torch.cuda.current_stream(room.device))
        with torch.cuda.stream(side):
            room.codec.encode((room.base, room.local), room.payload, room.fault)
            pinned.copy_(room.payload, non_blocking=True)
        torch.cuda.current_stream(room.device).wait_stream(side)

    taken = in_turns(encoded, lambda: values.copy_(room.local, non_blocking=True), repeats, room.device)
    return {
        "codec": room.plain.name,
        "pass": "to_host",
        "encoded_ms": round(percentile([mine for mine, _ in taken], 50) * 1e3, 3),
        "fp32_ms": round(percentile([copy for _, copy in taken], 50) * 1e3, 3),
        "x_sooner": round(percentile([copy / mine for mine, copy in taken], 50), 2),
    }


def timed(options: argparse.Namespace, numel: int, device: torch.device) -> list[dict[str, Any]]:
    """Time every pass of every codec and, with ``--sweep``, the one that sites use most with other launches."""
    repeats = LEAST_REPEATS if options.quick else max(LEAST_REPEATS, options.repeats)
    values = next(pairs_of_values(numel, options.seed))[1]
    rows = []
    for codec in TIMED:
        room = Room(codec, numel, None, values, device)
        for each in room.passes():
            rows.append(measure(room, each, repeats))
            show(rows[-1])
        if device.type == "cuda":
            rows.append(to_host(room, repeats))
            print(f"{codec.name:12} {'to host':24} {rows[-1]}")
        room.codec.check(int(room.fault))
        for launch in SWEEP if options.sweep else ():
            swept = Room(codec, numel, launch, values, device)
            wanted = [each for each in swept.passes() if each.name == "difference"]
            for each in wanted:
                rows.append(measure(swept, each, repeats) | {"swept": True})
                show(rows[-1])
    return rows


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['codec']:12} {row['pass']:24} {row['bytes_per_value']:8.3f} {row['p50_gb_per_s']:9.1f} "
        f"{row['copy_gb_per_s']:9.1f} {row['x_copy']:7.3f}  {row['launch'][0]} values, {row['launch'][1]} warps",
        flush=True,
    )


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--values", type=int, default=2**27)
    parser.add_argument(
        "--check-values", type=int, default=2**21 + 4321, help="values of each check (default 2 Mi, odd)"
    )
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--sweep", action="store_true", help="time other launches too")
    options = parser.parse_args()
    device = torch.device(options.device)
    config = {"values": options.values, "check_values": options.check_values, "target_x_copy": TARGET}
    if device.type == "cuda" and not torch.cuda.is_available():
        why = "torch finds no CUDA device here"
        print(f"Nothing is measured: {why}.")
        finish(record("gpu_codec", config, [], options.seed) | {"skipped": why}, save=False)
        return 0
    sizes = (1, 63, 4097) if options.quick else (1, 63, 100_003, options.check_values)
    wrong = []
    for codec in (*TIMED, *ONLY_CHECKED):
        for numel in sizes:
            wrong += differences(codec, numel, options.seed + numel, device)
    print(*(wrong or [f"Every pass gave the plain codecs' bits, sizes {', '.join(map(str, sizes))}."]), sep="\n")
    numel = min(options.values, 2**22 if device.type == "cuda" else 4096) if options.quick else options.values
    rows = timed(options, numel, device)
    chosen = {(row["codec"], row["pass"]): row for row in rows if "x_copy" in row and "swept" not in row}
    summary = {key: chosen[place]["x_copy"] for key, place in SUMMARY.items()}
    result = record("gpu_codec", config | {"values": numel}, rows, options.seed, repeats=options.repeats)
    result |= {"x_copy": summary, "checked": not wrong, "differences": wrong}
    finish(result, save=options.save)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
