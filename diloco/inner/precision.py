"""Number formats, bit-for-bit repeatability and random state, for a CPU and for CUDA."""

from __future__ import annotations

import functools
import math
import time
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from diloco.inner.checks import require

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from diloco.inner.parallel import SiteGroup

PRECISIONS = ("auto", "bf16", "fp32")
BF16_SPEED_MIN = 1.2
"""Below it bf16 only costs bits; the distance from 1 keeps noise from choosing."""
PROBE_SIZE = MappingProxyType({"cpu": 384, "cuda": 4096})
"""Rows and columns of the matrices that are multiplied to see which format is faster."""
PROBES = 6


@functools.cache
def bf16_speed(device: torch.device) -> float:
    """Return how fast ``device`` multiplies matrices in bf16, in units of its speed in fp32.

    Measured, once in a process: a device may have the format, or emulate it at a fiftieth of the speed.  The formats
    take turns, so that other work on the machine slows both.  The fastest product of each counts: the first one also
    makes what torch keeps for the others.
    """
    fp32 = torch.ones(PROBE_SIZE[device.type], PROBE_SIZE[device.type], device=device)
    bf16 = fp32.bfloat16()
    fp32_s = bf16_s = math.inf
    for probe in range(PROBES):
        fp32_s, bf16_s = min(fp32_s, _product_s(fp32)), min(bf16_s, _product_s(bf16))
        if probe == 1 and bf16_s > 4 * fp32_s:  # Emulated: more of these would only take long.
            break
    return fp32_s / bf16_s


def _product_s(matrix: Tensor) -> float:
    """Seconds of one product."""
    began_s = time.perf_counter()
    matrix @ matrix
    if matrix.is_cuda:
        torch.cuda.synchronize(matrix.device)
    return time.perf_counter() - began_s


def resolve_precision(precision: str, device: torch.device, group: SiteGroup | None = None) -> str:
    """Return "bf16" or "fp32" for ``precision``: under "auto" bf16 where it is clearly faster than fp32.

    With ``group`` it must be so on all ranks, and all get the same answer: a collective.
    """
    require(precision in PRECISIONS, "precision", precision, f"one of {', '.join(PRECISIONS)}")
    if precision != "auto":
        return precision
    slow = float(bf16_speed(device) < BF16_SPEED_MIN)
    return "fp32" if (group.all_reduce_sum([slow])[0] if group else slow) else "bf16"


def autocast_dtype(precision: str, device: torch.device, group: SiteGroup | None = None) -> torch.dtype | None:
    """The dtype of matrix products under ``precision`` on ``device``; None for plain fp32.

    With ``group`` all ranks get the same answer: a collective.
    """
    return torch.bfloat16 if resolve_precision(precision, device, group) == "bf16" else None


@contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """While inside and ``enabled``, torch uses only kernels that give the same bits twice, or raises.

    On CUDA the launcher must have set ``CUBLAS_WORKSPACE_CONFIG=:4096:8``; torch says so in words where it is not.
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
    """The state of torch's global generators, uint8 CPU tensors by name: ``cpu`` and, on CUDA, ``cuda``."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Take over what ``random_state`` told."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
