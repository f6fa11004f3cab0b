"""The ranks of one site: lock-step data parallelism by torch.distributed, NCCL on CUDA and gloo on a CPU.

Boxes.  A ``Box`` says which part of a tensor this rank holds, from ``starts`` on and of ``sizes``.  A DTensor of the
layouts that ``sharding`` makes is cut along one or more of its dimensions, and along one of them by several sides of
the grid; either way what a rank holds is one box.

``SiteGroup`` is never used across sites.  The rendezvous is given as arguments; the program that started the ranks
(torchrun) knows it.

``PresentGroup`` is for ranks that another program has started: it takes torch's own process group as it is there
already.
"""

from __future__ import annotations

import inspect
import time
import weakref
from collections import deque
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from diloco.inner.checks import require

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor, nn
    from torch.distributed.tensor import DTensor


def is_cut(value: Tensor) -> TypeGuard[DTensor]:
    """Whether ``value`` is one of which ranks hold parts.

    Its class is not imported: that is 2 s of a processor at every start, and most sites have none.
    """
    return hasattr(value, "placements")


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        """Whether it holds nothing: there were more ranks than rows."""
        return 0 in self.sizes

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index by which it is taken out of the whole."""
        return tuple(slice(start, start + size) for start, size in zip(self.starts, self.sizes, strict=True))

    def within(self, other: Box) -> Box | None:
        """What of this box lies in ``other``; None where they do not meet.  Counted as ``starts`` are."""
        starts = tuple(max(here, there) for here, there in zip(self.starts, other.starts, strict=True))
        stops = (
            min(here + size, there + long)
            for here, size, there, long in zip(self.starts, self.sizes, other.starts, other.sizes, strict=True)
        )
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def seen_from(self, other: Box) -> Box:
        """The same box, counted from where ``other`` starts."""
        return Box(tuple(here - there for here, there in zip(self.starts, other.starts, strict=True)), self.sizes)


def box_of(value: Tensor) -> Box:
    """What this rank holds of ``value``; of a plain tensor, all."""
    starts, sizes = [0] * value.ndim, list(value.shape)
    if not is_cut(value):
        return Box(tuple(starts), tuple(sizes))
    place = value.device_mesh.get_coordinate()
    assert place is not None, "every rank of a site is in its grid"
    for side in sides_cut(value):
        dim = value.placements[side].dim  # type: ignore[attr-defined]
        count = value.device_mesh.size(side)
        # As torch.chunk cuts: parts of the same size, rounded up, so that the last ones may be shorter or empty.
        part = -(-sizes[dim] // count)
        begin = min(place[side] * part, sizes[dim])
        starts[dim], sizes[dim] = starts[dim] + begin, min(part, sizes[dim] - begin)
    box = Box(tuple(starts), tuple(sizes))
    assert tuple(value.to_local().shape) == box.sizes, f"torch cut {value.placements} otherwise"
    return box


def is_keeper(value: Tensor, place: Mapping[str, int]) -> bool:
    """Whether the rank at ``place`` of the grid is the one, of those that hold the same part, that speaks for it.

    A tensor may be of a part of the grid only: along the other sides it is the same.
    """
    cut: set[str] = set()
    if is_cut(value):
        names = value.device_mesh.mesh_dim_names
        assert names is not None, "the sides of a site's grid have names"
        cut = {names[side] for side in sides_cut(value)}
    return all(at == 0 for side, at in place.items() if side not in cut)


def local(value: Tensor) -> Tensor:
    """What this rank holds of ``value``, as a plain tensor on the same memory."""
    detached = value.detach()
    return detached.to_local() if is_cut(detached) else detached


@torch.no_grad()
def put(value: Tensor, whole: Tensor) -> None:
    """Write into ``value``, in place, this rank's part of the plain tensor ``whole``."""
    local(value).copy_(whole[box_of(value).slices])


def alike(value: Tensor, part: Tensor) -> Tensor:
    """``part``, of the size that this rank holds of ``value``, as a tensor that is sharded as ``value`` is."""
    if not is_cut(value):
        return part
    made: Tensor = type(value).from_local(
        part, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
    )
    return made


def sides_cut(value: DTensor) -> list[int]:
    """The sides of the grid along which ``value`` is cut, in the order of the cuts.

    Under tp+fsdp rows are cut for the products first and then for fully_shard, which torch marks as strided.
    """
    cut = [side for side, placement in enumerate(value.placements) if not placement.is_replicate()]
    return sorted(cut, key=lambda side: "Strided" in type(value.placements[side]).__name__)


DEVICES = ("auto", "cpu", "cuda")
SMALL_MAX = 63
"""Most integers in one small broadcast."""
LATEST_MAX = 8
"""Of the tensors that collectives were given so many are remembered: those that gloo's threads may still hold."""
SETTLE_S = 5.0


class OpenStore:
    """Where ranks that several processes start meet: served by this process, as long as somebody keeps the object."""

    def __init__(self) -> None:
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.port: int = self._store.port
        """The system has chosen it."""


def device_of(device: str, local_rank: int = 0) -> torch.device:
    """Where a rank computes; ValueError where ``device`` cannot be on this machine."""
    require(device in DEVICES, "device", device, f"one of {', '.join(DEVICES)}")
    cuda = torch.cuda.is_available()
    require(device != "cuda" or cuda, "device", device, "torch finds no CUDA device here")
    return torch.device("cuda", local_rank) if cuda and device != "cpu" else torch.device("cpu")


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
        start: int = 0,
    ) -> None:
        """``start`` counts how often the same ranks were started at the same rendezvous before."""
        self.device = device_of(device, local_rank)
        require(world >= 1, "world", world, "at least 1")
        require(0 <= rank < world, "rank", rank, f"0 to world-1={world - 1}")
        require(timeout_s > 0, "timeout_s", timeout_s, "positive")
        self.rank, self.local_rank, self.world, self.timeout_s = rank, local_rank, world, timeout_s
        self.master_addr = master_addr
        """Where the rendezvous is, as this machine reaches it."""
        self._latest: deque[weakref.ref[Tensor]] = deque(maxlen=LATEST_MAX)
        on_cuda = self.device.type == "cuda"
        self.backend = ("nccl" if on_cuda else "gloo") if world > 1 else ""
        if on_cuda:
            torch.cuda.set_device(self.device)
        if world > 1:
            require(master_port > 0, "master_port", master_port, "the rendezvous port, for more than one rank")
            with self.bounded("the rendezvous"):
                bound = timedelta(seconds=timeout_s)
                where = f"tcp://{master_addr}:{master_port}?rank={rank}&world_size={world}"
                store, _, _ = next(rendezvous(where, timeout=bound))
                # Ranks that were started again meet in the same store as those before them, whose addresses it still
                # has: who reads one of them tries to reach a process that is no more.
                dist.init_process_group(
                    self.backend,
                    store=PrefixStore(f"start-{start}", store),
                    rank=rank,
                    world_size=world,
                    timeout=bound,
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
        with self.bounded("wrapping the model"):
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
            return cast("AbstractContextManager[None]", wrapped.no_sync())
        return nullcontext()

    def broadcast_(self, tensor: Tensor, src: int = 0) -> None:
        """Overwrite ``tensor`` on every rank, in place, with that of ``src``; any device and dtype, same shape."""
        if self.world == 1:
            return
        with self.bounded("a broadcast"), torch.no_grad():
            on_device = self._given(tensor.detach().to(self.device).contiguous())
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
        with self.bounded("a sum over the ranks"):
            summed = self._given(torch.tensor(list(values), dtype=torch.float64, device=self.device))
            dist.all_reduce(summed)
            return [float(value) for value in summed.tolist()]

    def all_reduce_mean(self, value: float) -> float:
        """Mean over the ranks, in fp64; the same bits on every rank."""
        return self.all_reduce_sum([value])[0] / self.world

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's ``tensor`` (same shape and dtype) as CPU tensors in rank order."""
        if self.world == 1:
            return [tensor.detach().cpu()]
        with self.bounded("a gather"):
            mine = self._given(tensor.detach().to(self.device).contiguous())
            parts = [self._given(torch.empty_like(mine)) for _ in range(self.world)]
            dist.all_gather(parts, mine)
            return [part.cpu() for part in parts]

    def all_gather_bytes(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes, of any length, in rank order."""
        sizes = [int(size) for size in self.all_gather(torch.tensor([len(mine)]))]
        room = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        if mine:  # torch makes no tensor of nothing.
            room[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        return [bytes(part[:size].numpy()) for part, size in zip(self.all_gather(room), sizes, strict=True)]

    def all_to_all(self, message: Tensor, to: Sequence[int], of: Sequence[int]) -> Tensor:
        """Send each rank its part of the flat ``message``, which has ``to`` values for them in rank order.

        Returns what comes, ``of`` values from each rank, in rank order; on this rank's device.
        """
        if self.world == 1:
            return message
        with self.bounded("an exchange between the ranks"), torch.no_grad():
            come = self._given(torch.empty(sum(of), dtype=message.dtype, device=self.device))
            dist.all_to_all_single(come, self._given(message.detach().to(self.device)), list(of), list(to))
            return come

    def barrier(self) -> None:
        """Return when every rank is here."""
        self.all_reduce_sum([0.0])

    def close(self) -> None:
        """Leave the group; it cannot be used any more.

        With gloo that is left to the end of the process: torch takes such a group apart while it holds the
        interpreter's lock, and waits for a thread which may need that lock to let go of the last collective's tensors.
        Soon after a collective the two would wait for each other for ever.  The same thread would abort a process that
        ends before that: it is waited for here.
        """
        if self.backend == "gloo":
            self.settle()
        elif self.backend == "nccl" and dist.is_initialized():
            dist.destroy_process_group()

    def _given(self, tensor: Tensor) -> Tensor:
        """``tensor``, as one that a collective is given, and that ``settle`` asks about."""
        if self.backend == "gloo":
            self._latest.append(weakref.ref(tensor))
        return tensor

    def settle(self) -> None:
        """Wait, for a bounded time, until gloo's threads have let go of what the latest collectives were given: then
        whoever owns the process group may end it (``close``)."""
        until = time.monotonic() + SETTLE_S
        while self._latest and time.monotonic() < until:
            tensor = self._latest[0]()
            if tensor is None or tensor._use_count() <= 1:  # type: ignore[attr-defined]
                self._latest.popleft()
            else:
                time.sleep(0.001)

    @contextmanager
    def bounded(self, what: str) -> Iterator[None]:
        """Turn torch's several ways of telling of a lost or late rank into one sentence."""
        try:
            yield
        except RuntimeError as error:
            raise GroupError(
                f"rank {self.rank} of {self.world} failed in {what} (bound {self.timeout_s:g} s): {error}"
            ) from error


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
