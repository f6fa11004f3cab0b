"""Number formats, bit-for-bit repeatability and random state, for a CPU and for CUDA."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from diloco.inner.checks import require

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

PRECISIONS = ("auto", "bf16", "fp32")


def has_fast_bf16(device: torch.device) -> bool:
    """Whether ``device`` multiplies bf16 in hardware: AVX-512 BF16 or AMX on a CPU, compute capability 8 on CUDA."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 8
    # These two probes have no public name in torch 2.11 to 2.13; where they are gone, fp32 is the safe answer.
    probes = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(bool(probe()) for probe in probes if probe is not None)


def autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """The dtype of matrix products under ``precision`` on ``device``; None for plain fp32.

    ``auto`` takes bf16 where it is fast.  ``bf16`` on hardware without it is obeyed, and slow.
    """
    require(precision in PRECISIONS, "precision", precision, f"one of {', '.join(PRECISIONS)}")
    wanted = precision == "bf16" or (precision == "auto" and has_fast_bf16(device))
    return torch.bfloat16 if wanted else None


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
