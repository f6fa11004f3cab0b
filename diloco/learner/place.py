"""Where a site's values lie, and the ways there and back that its training does not wait for.

On a host everything has happened when a call returns.  On an accelerator the threads beside training work on a stream
of their own, by one rule that keeps memory safe between the streams: every tensor is allocated for training's stream,
the side stream begins behind what that one has been given so far, and the thread waits for the side stream before it
lets anything go or hands it on.  Training's stream never waits for the other.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor


class Place:
    """The device of a model, ``device``, for training's thread and those beside it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._mirrors = WeakTensorKeyDictionary()
        self._streams = threading.local()

    @property
    def is_host(self) -> bool:
        """Whether the values lie where the other threads have them too, so that nothing is copied."""
        return self.device.type == "cpu"

    def __str__(self) -> str:
        return str(self.device)

    def of(self, here: Tensor) -> Tensor:
        """``here``, a tensor of the host that is never written to, as it is on the device; copied there once."""
        if self.is_host:
            return here
        found: Tensor | None = self._mirrors.get(here)  # type: ignore[no-untyped-call]
        if found is None:
            found = torch.empty_like(here, device=self.device)
            with self.beside():
                found.copy_(here, non_blocking=True)
            self._mirrors[here] = found
        return found

    def begin_thread(self) -> None:
        """What the calling thread makes without naming a device is on this one, and not on the machine's first."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host that the device writes to without anybody's help."""
        return torch.empty(numel, dtype=dtype, pin_memory=self.device.type == "cuda")

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Inside, work is given to a stream beside training's; the end waits until it is done, in this thread only."""
        if self.device.type != "cuda":
            yield
            return
        stream = self._stream()
        stream.wait_stream(torch.cuda.default_stream(self.device))
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()

    def _stream(self) -> Any:
        """The calling thread's own: torch keeps the memory of each stream apart, so there should be few."""
        if not hasattr(self._streams, "own"):
            self._streams.own = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self._streams.own


HOST = torch.device("cpu")


def place_of(parameters: Iterable[Tensor]) -> Place:
    """The accelerator on which all of a model's ``parameters`` lie; the host for any other model."""
    devices = {each.device for each in parameters}
    device = devices.pop() if len(devices) == 1 else HOST
    return Place(device if device.type == "cuda" else HOST)
