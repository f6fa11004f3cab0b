"""Number formats, bit-for-bit repeatability and random state, for a CPU and for CUDA."""

from __future__ import annotations

import functools
import math
import time
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from diloco.inner import require

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from diloco.inner.parallel import SiteGroup

PRECISIONS = ("auto", "bf16", "fp32")
BF16_SPEED_MIN = 1.2
"""Least speed of bf16, relative to fp32, at which "auto" chooses it; above 1, so that noise does not decide."""
PROBE_SIZE = MappingProxyType({"cpu": 384, "cuda": 4096})
"""Rows and columns of the matrices that are multiplied to measure which format is faster."""
PROBES = 6


@functools.cache
def bf16_speed(device: torch.device) -> float:
    """Return how fast ``device`` multiplies matrices in bf16, relative to its speed in fp32.

    It is measured once per process, because a device may emulate bf16 at a fiftieth of the speed.  The formats
    alternate, so that other work on the machine slows both.  The fastest product of each counts, because the first one
    also builds what torch caches.
    """
    fp32 = torch.ones(PROBE_SIZE[device.type], PROBE_SIZE[device.type], device=device)
    bf16 = fp32.bfloat16()
    fp32_s = bf16_s = math.inf
    for probe in range(PROBES):
        fp32_s, bf16_s = min(fp32_s, _product_s(fp32)), min(bf16_s, _product_s(bf16))
        if probe == 1 and bf16_s > 4 * fp32_s:  # Emulated: further probes would only take time.
            break
    return fp32_s / bf16_s


def _product_s(matrix: Tensor) -> float:
    """Return the seconds of one product."""
    began_s = time.perf_counter()
    matrix @ matrix
    if matrix.is_cuda:
        torch.cuda.synchronize(matrix.device)
    return time.perf_counter() - began_s


def resolve_precision(precision: str, device: torch.device, group: SiteGroup | None = None) -> str:
    """Return "bf16" or "fp32" for ``precision``: under "auto" bf16 if it is clearly faster than fp32.

    With ``group`` it must be faster on all ranks, and all get the same answer: a collective under "auto".
    """
    require(precision in PRECISIONS, "precision", precision, f"one of {', '.join(PRECISIONS)}")
    if precision != "auto":
        return precision
    slow = float(bf16_speed(device) < BF16_SPEED_MIN)
    return "fp32" if (group.all_reduce_sum([slow])[0] if group else slow) else "bf16"


def autocast_dtype(precision: str, device: torch.device, group: SiteGroup | None = None) -> torch.dtype | None:
    """Return the dtype of matrix products under ``precision`` on ``device``; None for plain fp32.

    With ``group`` all ranks get the same answer: a collective under "auto".
    """
    return torch.bfloat16 if resolve_precision(precision, device, group) == "bf16" else None


@contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Inside, if ``enabled``, torch uses only kernels that give the same bits twice, or raises.

    On CUDA the launcher must have set ``CUBLAS_WORKSPACE_CONFIG=:4096:8``; otherwise torch's error asks for it.
    """
    before = torch.are_deterministic_algorithms_enabled()
    benchmark = torch.backends.cudnn.benchmark
    if enabled:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.backends.cudnn.benchmark = benchmark


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of torch's global generators, uint8 CPU tensors by name: ``cpu`` and, on CUDA, ``cuda``."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore the state that ``random_state`` returned."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
