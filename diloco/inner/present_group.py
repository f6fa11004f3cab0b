"""The ranks of a site that somebody else has started: torch's own process group, as it is there already."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from diloco.inner.parallel import GroupError, SiteGroup

if TYPE_CHECKING:
    from collections.abc import Iterator


class PresentGroup(SiteGroup):
    """All ranks of the default process group, which remains its owner's: it is neither made nor ended here.  Without
    one, this process alone.

    How long a collective may take is what that group was made with.
    """

    def __init__(self) -> None:
        super().__init__(device="cpu")
        if not (dist.is_available() and dist.is_initialized()):
            return
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.backend = str(dist.get_backend())
        if "nccl" in self.backend:
            self.device = torch.device("cuda", torch.cuda.current_device())
            self.local_rank = torch.cuda.current_device()

    def broadcast_bytes(self, told: bytes) -> bytes:
        """The bytes of rank 0, of any length, on every rank."""
        (size,) = self.broadcast_small([len(told)])
        room = torch.zeros(size, dtype=torch.uint8)
        if self.is_first:
            room = torch.frombuffer(bytearray(told), dtype=torch.uint8)
        self.broadcast_(room)
        return bytes(room.numpy())

    def close(self) -> None:
        """Leave it to its owner."""

    @contextmanager
    def bounded(self, what: str) -> Iterator[None]:
        """As ``SiteGroup``'s, but for the bound, which is not ours."""
        try:
            yield
        except RuntimeError as error:
            raise GroupError(f"rank {self.rank} of {self.world} failed in {what}: {error}") from error
