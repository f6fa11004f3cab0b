"""The ranks of one site: lock-step data parallelism by torch.distributed, NCCL on CUDA and gloo on a CPU.

Never used across sites.  The rendezvous is given as arguments; whoever started the ranks (torchrun) knows it.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from diloco.inner.checks import require

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

DEVICES = ("auto", "cpu", "cuda")
SMALL_MAX = 63
"""Most integers in one small broadcast."""


class GroupError(RuntimeError):
    """A rank of this site did not answer in time, or went away; the message says during what."""


class SiteGroup:
    """The ranks of one site as one object.  With ``world`` 1 every method works and nothing is sent.

    Each collective must be called by all ranks in the same order, and ends within ``timeout_s`` or raises GroupError.
    """

    def __init__(
        self,
        rank: int = 0,
        local_rank: int = 0,
        world: int = 1,
        master_addr: str = "127.0.0.1",
        master_port: int = 0,
        device: str = "auto",
        timeout_s: float = 120.0,
    ) -> None:
        require(device in DEVICES, "device", device, f"one of {', '.join(DEVICES)}")
        require(world >= 1, "world", world, "at least 1")
        require(0 <= rank < world, "rank", rank, f"0 to world-1={world - 1}")
        require(timeout_s > 0, "timeout_s", timeout_s, "positive")
        cuda = torch.cuda.is_available()
        require(device != "cuda" or cuda, "device", device, "torch finds no CUDA device here")
        self.rank, self.local_rank, self.world, self.timeout_s = rank, local_rank, world, timeout_s
        on_cuda = cuda and device != "cpu"
        self.device = torch.device("cuda", local_rank) if on_cuda else torch.device("cpu")
        self.backend = ("nccl" if on_cuda else "gloo") if world > 1 else ""
        if on_cuda:
            torch.cuda.set_device(self.device)
        if world > 1:
            require(master_port > 0, "master_port", master_port, "the rendezvous port, for more than one rank")
            with self._bounded("the rendezvous"):
                dist.init_process_group(
                    self.backend,
                    init_method=f"tcp://{master_addr}:{master_port}",
                    rank=rank,
                    world_size=world,
                    timeout=timedelta(seconds=timeout_s),
                    device_id=self.device if on_cuda else None,
                )

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the one that speaks for the site."""
        return self.rank == 0

    def wrap(self, model: nn.Module) -> nn.Module:
        """``model`` on this rank's device, under DDP when there are several ranks (which then start from rank 0's).

        The parameters stay those of ``model``: they may be written in place between two steps, on all ranks alike.
        """
        model.to(self.device)
        if self.world == 1:
            return model
        with self._bounded("wrapping the model"):
            ids = [self.device] if self.device.type == "cuda" else None
            # Buffers are tables that every rank computes, so nothing is sent for them; gradients share memory with the
            # buckets that are sent.  torch 2.13 has renamed the first option, 2.11 knows only its old name.
            arguments = inspect.signature(DistributedDataParallel).parameters
            buffers = "forward_sync_buffers" if "forward_sync_buffers" in arguments else "broadcast_buffers"
            options: dict[str, Any] = {buffers: False, "gradient_as_bucket_view": True}
            return DistributedDataParallel(model, device_ids=ids, **options)

    def without_sync(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        """Inside, backward passes only add up gradients on each rank (all micro-batches of a step but the last)."""
        if isinstance(wrapped, DistributedDataParallel):
            return cast(AbstractContextManager[None], wrapped.no_sync())
        return nullcontext()

    def broadcast_(self, tensor: Tensor, src: int = 0) -> None:
        """Overwrite ``tensor`` on every rank, in place, with that of ``src``; any device and dtype, same shape."""
        if self.world == 1:
            return
        with self._bounded("a broadcast"), torch.no_grad():
            on_device = tensor.detach().to(self.device).contiguous()
            dist.broadcast(on_device, src=src)
            if on_device.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(on_device)

    def broadcast_small(self, values: Sequence[int], src: int = 0) -> list[int]:
        """The integers (int64, at most 63) of ``src``, on every rank; what the others give is not looked at."""
        if self.world == 1:
            return list(values)
        packed = torch.zeros(SMALL_MAX + 1, dtype=torch.int64)
        if self.rank == src:
            require(len(values) <= SMALL_MAX, "values", len(values), f"at most {SMALL_MAX} of them")
            packed[: len(values) + 1] = torch.tensor([len(values), *values], dtype=torch.int64)
        self.broadcast_(packed, src)
        told: list[int] = packed.tolist()
        return told[1 : told[0] + 1]

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        """Elementwise sum over the ranks, in fp64; the same bits on every rank."""
        if self.world == 1:
            return list(values)
        with self._bounded("a sum over the ranks"):
            summed = torch.tensor(list(values), dtype=torch.float64, device=self.device)
            dist.all_reduce(summed)
            return [float(value) for value in summed.tolist()]

    def all_reduce_mean(self, value: float) -> float:
        """Mean over the ranks, in fp64; the same bits on every rank."""
        return self.all_reduce_sum([value])[0] / self.world

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's ``tensor`` (same shape and dtype) as CPU tensors in rank order."""
        if self.world == 1:
            return [tensor.detach().cpu()]
        with self._bounded("a gather"):
            mine = tensor.detach().to(self.device).contiguous()
            parts = [torch.empty_like(mine) for _ in range(self.world)]
            dist.all_gather(parts, mine)
            return [part.cpu() for part in parts]

    def barrier(self) -> None:
        """Return when every rank is here."""
        self.all_reduce_sum([0.0])

    def close(self) -> None:
        """Leave the group; further collectives are an error."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def _bounded(self, what: str) -> Iterator[None]:
        """Turn torch's several ways of telling of a lost or late rank into one sentence."""
        try:
            yield
        except RuntimeError as error:
            raise GroupError(
                f"rank {self.rank} of {self.world} failed in {what} (bound {self.timeout_s:g} s): {error}"
            ) from error
