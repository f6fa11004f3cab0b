"""What are fused kernels worth in an inner step, in time and in memory, beside torch's own operations and its compiler?

One model on one accelerator is trained in alternating blocks of steps with each way of computing it (``inner.kernels``,
``inner.compile``, ``inner.loss_chunk``); the order is reversed with every round.  A row has the time of a step, tokens
per second, the share of the device's peak (``--peak-tflops``, as ``site.peak_tflops``), and the peak memory.
``x_torch`` is torch's time over the row's.

Needs a CUDA device and ``pip install 'diloco[fused]'``; without a device it says so, and exits 0.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.record import finish, parser_of, percentile, record
from diloco.inner.model import ComputeOptions, ModelOptions, Transformer, flops_per_token, prepare
from diloco.inner.optimizer import InnerOptions, build_optimizers

if TYPE_CHECKING:
    import argparse

WAYS = {
    "torch": ComputeOptions(),
    "torch_chunked": ComputeOptions(loss_chunk=2048),
    "liger": ComputeOptions(kernels="liger"),
    "compile": ComputeOptions(compile=True),
    "compile_chunked": ComputeOptions(compile=True, loss_chunk=2048),
}
WHOLE = ModelOptions(vocab_size=32768, layers=16, dim=1024, heads=16, kv_heads=8, context=1024)
SMALL = ModelOptions(vocab_size=1024, layers=2, dim=128, heads=4, context=128)


class Way:
    """A model with one way of computing it."""

    def __init__(self, options: ModelOptions, compute: ComputeOptions, batch: int, seed: int) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.model = Transformer(options, seed).to(device)
        prepare(self.model, compute, device)
        self.optimizers = build_optimizers(self.model, InnerOptions(optimizer="adamw"))
        dice = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, options.vocab_size, (batch, options.context + 1), generator=dice).to(device)

    def run(self, steps: int) -> tuple[float, int]:
        """Make ``steps`` steps; return the seconds of one and the peak memory in bytes."""
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = self.model(self.tokens[:, :-1], self.tokens[:, 1:])
            loss.backward()
            for optimizer in self.optimizers._parts.values():
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / steps, torch.cuda.max_memory_allocated()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step (default 16)")
    parser.add_argument("--steps", type=int, default=5, help="steps of a block (default 5)")
    parser.add_argument("--rounds", type=int, default=7, help="blocks of each way (default 7)")
    parser.add_argument("--peak-tflops", type=float, help="peak of the device in bf16")
    parser.add_argument("--kernels", nargs="+", choices=list(WAYS), default=list(WAYS), help="default: all")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        why = "torch finds no CUDA device here"
        print(f"Nothing is measured: {why}.")
        finish(record("kernels", {}, [], asked.seed) | {"skipped": why}, save=False)
        return
    options = SMALL if asked.quick else WHOLE
    seconds: dict[str, list[float]] = {name: [] for name in asked.kernels}
    memory = dict.fromkeys(asked.kernels, 0)
    for turn in range(asked.rounds + 1):
        for name in asked.kernels if turn % 2 else asked.kernels[::-1]:
            way = Way(options, WAYS[name], asked.batch, asked.seed)  # Only one is in memory at a time.
            way.run(3)
            step_s, memory[name] = way.run(asked.steps)
            seconds[name].append(step_s)
            del way
            torch.cuda.empty_cache()
    rows = [_row(name, options, asked, seconds, memory[name]) for name in asked.kernels]
    config: dict[str, Any] = {"model": f"{options.layers}x{options.dim}", "batch": asked.batch, "steps": asked.steps}
    finish(record("kernels", config, rows, asked.seed, repeats=asked.rounds), save=asked.save)


def _row(
    name: str, options: ModelOptions, asked: argparse.Namespace, seconds: dict[str, list[float]], peak: int
) -> dict[str, Any]:
    step_s = percentile(seconds[name][1:], 50)
    tokens_per_s = asked.batch * options.context / step_s
    row: dict[str, Any] = {"way": name, "step_ms_p50": 1e3 * step_s, "tokens_per_s": tokens_per_s}
    row["peak_memory_gib"] = peak / (1 << 30)
    if asked.peak_tflops:
        row["mfu"] = tokens_per_s * flops_per_token(options) / (1e12 * asked.peak_tflops)
    if "torch" in seconds:
        row["x_torch"] = percentile(seconds["torch"][1:], 50) / step_s
    print(json.dumps(row), flush=True)
    return row


if __name__ == "__main__":
    main()
