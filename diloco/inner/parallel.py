"""The ranks of one site: lock-step data parallelism by torch.distributed, NCCL on CUDA and gloo on a CPU.

What a rank holds.  A DTensor is sharded along one or more of its dimensions.  Several dimensions of the device mesh may
cut the same one, one after the other.  A rank holds one ``Box`` of it, which begins at ``starts`` and has ``sizes``.

``SiteGroup`` is never used across sites.  It gets the rendezvous as arguments, from the program that started the ranks
(torchrun).

``PresentGroup`` is for ranks that another program has started: it uses torch's existing default process group.
"""

from __future__ import annotations

import inspect
import json
import time
import weakref
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from diloco.inner import GroupError, require

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor, nn
    from torch.distributed.tensor import DTensor


def is_cut(value: Tensor) -> TypeGuard[DTensor]:
    """Whether ``value`` is a DTensor.

    The check does not import the class: that takes 2 s of processor time at every start, and most sites have none.
    """
    return hasattr(value, "placements")


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        """Whether it has no values, as on some ranks if there are more ranks than rows."""
        return 0 in self.sizes

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that selects it from the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.starts, self.sizes, strict=True))

    def within(self, other: Box) -> Box | None:
        """Return the intersection with ``other``, in coordinates of the whole tensor; None if it is empty."""
        starts = tuple(max(here, there) for here, there in zip(self.starts, other.starts, strict=True))
        stops = (
            min(here + size, there + long)
            for here, size, there, long in zip(self.starts, self.sizes, other.starts, other.sizes, strict=True)
        )
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def seen_from(self, other: Box) -> Box:
        """Return the same box in coordinates relative to the start of ``other``."""
        return Box(tuple(here - there for here, there in zip(self.starts, other.starts, strict=True)), self.sizes)


def whole_box(shape: tuple[int, ...]) -> Box:
    """Return the box that is all of a tensor of ``shape``."""
    return Box((0,) * len(shape), shape)


class HoldingError(ValueError):
    """This site's layout of the model does not support exchange; the message names the parameter."""


def box_of(value: Tensor, name: str = "a tensor") -> Box:
    """Return the box of ``value`` that this rank holds; of a plain tensor, all of it.

    HoldingError, with ``name`` in its message, if what the rank holds is not one box of values.
    """
    if not is_cut(value):
        return whole_box(value.shape)
    mesh, placements = value.device_mesh, value.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return whole_box((0,) * value.ndim)
    starts, sizes, cuts = [0] * value.ndim, list(value.shape), [1] * value.ndim
    for side in sides_cut(value):
        dim = getattr(placements[side], "dim", None)
        if dim is None:
            raise HoldingError(f"{name} is {placements[side]}: no rank holds its values")
        if getattr(placements[side], "split_factor", cuts[dim]) != cuts[dim]:
            raise HoldingError(f"{name} is {placements} on {tuple(mesh.shape)} ranks: a rank's part is not one box")
        cuts[dim] *= mesh.shape[side]
        # As in torch's sharding, the last ranks' parts may be shorter or empty.
        size = -(-sizes[dim] // mesh.shape[side])
        start = min(coordinate[side] * size, sizes[dim])
        starts[dim], sizes[dim] = starts[dim] + start, min(size, sizes[dim] - start)
    box = Box(tuple(starts), tuple(sizes))
    if box.sizes != tuple(local(value).shape):
        raise HoldingError(
            f"{name} is {placements} with a part of {tuple(local(value).shape)} here, not of {box.sizes}"
        )
    return box


def is_keeper(value: Tensor, place: Mapping[str, int]) -> bool:
    """Whether the rank at ``place`` of the grid is the first of those that hold the same part, which writes it.

    A tensor may be sharded along some sides of the grid only; along the others its parts are copies.
    """
    cut: set[str] = set()
    if is_cut(value):
        names = value.device_mesh.mesh_dim_names
        assert names is not None, "the sides of a site's grid have names"
        cut = {names[side] for side in sides_cut(value)}
    return all(at == 0 for side, at in place.items() if side not in cut)


def local(value: Tensor) -> Tensor:
    """Return what this rank holds of ``value``, as a plain tensor that shares its memory."""
    detached = value.detach()
    return detached.to_local() if is_cut(detached) else detached


@torch.no_grad()
def put(value: Tensor, whole: Tensor) -> None:
    """Write into ``value``, in place, this rank's part of the plain tensor ``whole``."""
    local(value).copy_(whole[box_of(value).slices])


def alike(value: Tensor, part: Tensor) -> Tensor:
    """Return ``part``, of the size that this rank holds of ``value``, as a tensor sharded like ``value``."""
    if not is_cut(value):
        return part
    made: Tensor = type(value).from_local(
        part, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
    )
    return made


def sides_cut(value: DTensor) -> list[int]:
    """Return the mesh dimensions along which ``value`` is sharded, in the order of the cuts.

    A mesh cuts by its dimensions from left to right.  Under tp+fsdp rows are cut for tensor parallelism first and then
    for fully_shard.  torch marks the latter as strided: such a dimension cuts what those on its right have left.
    """
    placements = value.placements
    strided = [side for side in range(len(placements)) if hasattr(placements[side], "split_factor")]
    plain = (side for side in range(len(placements)) if side not in strided and not placements[side].is_replicate())
    return [*plain, *reversed(strided)]


DEVICES = ("auto", "cpu", "cuda")
SMALL_MAX = 63
"""Most integers in one small broadcast."""
LATEST_MAX = 8
"""How many tensors of the latest collectives ``SiteGroup`` remembers, because gloo's threads may still hold them."""
SETTLE_S = 5.0


class OpenStore(TCPStore):
    """The rendezvous for ranks that several processes start; this process serves it while the object lives.

    The operating system chooses its ``port``.
    """

    def __init__(self) -> None:
        super().__init__("localhost", 0, is_master=True, wait_for_workers=False)


def device_of(device: str, local_rank: int = 0) -> torch.device:
    """Return the device of a rank; ValueError if this machine does not have ``device``."""
    require(device in DEVICES, "device", device, f"one of {', '.join(DEVICES)}")
    cuda = torch.cuda.is_available()
    require(device != "cuda" or cuda, "device", device, "torch finds no CUDA device here")
    return torch.device("cuda", local_rank) if cuda and device != "cpu" else torch.device("cpu")


class SiteGroup:
    """The ranks of one site.  With ``world`` 1 every method works and sends nothing.

    All ranks must call the collectives in the same order.  Each ends within ``timeout_s`` or raises GroupError.
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
        """``start`` is the number of earlier starts of these ranks at the same rendezvous."""
        self.device = device_of(device, local_rank)
        require(world >= 1, "world", world, "at least 1")
        require(0 <= rank < world, "rank", rank, f"0 to world-1={world - 1}")
        require(timeout_s > 0, "timeout_s", timeout_s, "positive")
        self.rank, self.local_rank, self.world, self.timeout_s = rank, local_rank, world, timeout_s
        self.master_addr = master_addr
        """The address at which this machine reaches the rendezvous."""
        self._bound = f" (bound {timeout_s:g} s)"
        """The timeout as error messages show it."""
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
                # Restarted ranks use the same store as the earlier ones, whose addresses it still has.  Without a
                # prefix for each start, a rank would read the address of a dead process and try to reach it.
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
        """Whether this is rank 0, which acts for the site."""
        return self.rank == 0

    def wrap(self, model: nn.Module) -> nn.Module:
        """Move ``model`` to this rank's device; with several ranks wrap it in DDP, which copies rank 0's values to all.

        The parameters stay those of ``model``: they may be written in place between two steps, on all ranks alike.
        """
        model.to(self.device)
        if self.world == 1:
            return model
        with self.bounded("wrapping the model"):
            ids = [self.device] if self.device.type == "cuda" else None
            # Every rank computes the buffers itself, so they are not sent; gradients share memory with the buckets that
            # are sent.  torch 2.13 has renamed the first option, 2.11 knows only its old name.
            arguments = inspect.signature(DistributedDataParallel).parameters
            buffers = "forward_sync_buffers" if "forward_sync_buffers" in arguments else "broadcast_buffers"
            options: dict[str, Any] = {buffers: False, "gradient_as_bucket_view": True}
            return DistributedDataParallel(model, device_ids=ids, **options)

    def broadcast_(self, tensor: Tensor, src: int = 0) -> None:
        """Overwrite ``tensor`` on every rank, in place, with that of rank ``src``; any device and dtype, same shape."""
        if self.world == 1:
            return
        with self.bounded("a broadcast"), torch.no_grad():
            on_device = self._given(tensor.detach().to(self.device).contiguous())
            dist.broadcast(on_device, src=src)
            if on_device.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(on_device)

    def broadcast_small(self, values: Sequence[int]) -> list[int]:
        """Return the integers (int64, at most 63) of rank 0 on every rank; ``values`` of others are ignored."""
        if self.world == 1:
            return list(values)
        packed = torch.zeros(SMALL_MAX + 1, dtype=torch.int64)
        if self.is_first:
            require(len(values) <= SMALL_MAX, "values", len(values), f"at most {SMALL_MAX} of them")
            packed[: len(values) + 1] = torch.tensor([len(values), *values], dtype=torch.int64)
        self.broadcast_(packed)
        told: list[int] = packed.tolist()
        return told[1 : told[0] + 1]

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        """Return the elementwise sum over the ranks, in fp64; the same bits on every rank."""
        if self.world == 1:
            return list(values)
        with self.bounded("a sum over the ranks"):
            summed = self._given(torch.tensor(list(values), dtype=torch.float64, device=self.device))
            dist.all_reduce(summed)
            return [float(value) for value in summed.tolist()]

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's ``tensor`` (same shape and dtype) as CPU tensors in rank order."""
        if self.world == 1:
            return [tensor.detach().cpu()]
        with self.bounded("a gather"):
            mine = self._given(tensor.detach().to(self.device).contiguous())
            parts = [self._given(torch.empty_like(mine)) for _ in range(self.world)]
            dist.all_gather(parts, mine)
            return [part.cpu() for part in parts]

    def all_gather_bytes(self, mine: bytes) -> list[bytes]:
        """Return every rank's bytes, of any length, in rank order."""
        sizes = [int(size) for size in self.all_gather(torch.tensor([len(mine)]))]
        room = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        if mine:  # torch.frombuffer refuses an empty buffer.
            room[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        return [bytes(part[:size].numpy()) for part, size in zip(self.all_gather(room), sizes, strict=True)]

    def all_gather_json(self, mine: Any) -> list[Any]:
        """Return every rank's value ``mine``, of types that JSON has, in rank order."""
        return [json.loads(each) for each in self.all_gather_bytes(json.dumps(mine, allow_nan=False).encode())]

    def all_to_all(self, message: Tensor, to: Sequence[int], of: Sequence[int]) -> Tensor:
        """Send ``to[rank]`` values of the flat ``message``, which holds them in rank order, to each rank.

        Returns the received values, ``of[rank]`` from each rank, in rank order; on this rank's device.
        """
        if self.world == 1:
            return message
        with self.bounded("an exchange between the ranks"), torch.no_grad():
            come = self._given(torch.empty(sum(of), dtype=message.dtype, device=self.device))
            dist.all_to_all_single(come, self._given(message.detach().to(self.device)), list(of), list(to))
            return come

    def close(self) -> None:
        """Leave the group; it cannot be used afterwards.

        A gloo group is not destroyed here, but at the end of the process.  torch holds the interpreter's lock while it
        destroys one and waits for a thread, which may need that lock to release the last collective's tensors.  Soon
        after a collective that is a deadlock.  The same thread would abort a process that ends before it has released
        them, so this method waits for it (``settle``).
        """
        if self.backend == "gloo":
            self.settle()
        elif self.backend == "nccl" and dist.is_initialized():
            dist.destroy_process_group()

    def _given(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, and remember it for ``settle`` as an argument of a collective."""
        if self.backend == "gloo":
            self._latest.append(weakref.ref(tensor))
        return tensor

    def settle(self) -> None:
        """Wait at most ``SETTLE_S`` until gloo's threads have released the tensors of the latest collectives.

        After that the owner of the process group may destroy it (see ``close``).
        """
        until = time.monotonic() + SETTLE_S
        while self._latest and time.monotonic() < until:
            tensor = self._latest[0]()
            if tensor is None or tensor._use_count() <= 1:  # type: ignore[attr-defined]
                self._latest.popleft()
            else:
                time.sleep(0.001)

    @contextmanager
    def bounded(self, what: str) -> Iterator[None]:
        """Turn torch's various errors about a lost or late rank during ``what`` into GroupError."""
        try:
            yield
        except RuntimeError as error:
            raise GroupError(f"rank {self.rank} of {self.world} failed in {what}{self._bound}: {error}") from error


class PresentGroup(SiteGroup):
    """All ranks of torch's default process group, which this class neither makes nor destroys.

    Without a process group it has a single rank.  The timeout of a collective is the process group's.
    """

    def __init__(self) -> None:
        super().__init__(device="cpu")
        if not (dist.is_available() and dist.is_initialized()):
            return
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._bound = ""  # The timeout is the process group's.
        self.backend = str(dist.get_backend())
        if "nccl" in self.backend:
            self.device = torch.device("cuda", torch.cuda.current_device())
            self.local_rank = torch.cuda.current_device()

    def close(self) -> None:
        """Do nothing: the process group is its owner's to destroy."""
