"""How the ranks of a site hold parameters: gather to one rank, scatter back, and the layouts of our own model.

A parameter is whole on every rank (one process, DDP), or is a DTensor: sharded along one dimension or several, over a
mesh of one dimension or two, with copies if the mesh has them (FSDP, HSDP, tensor parallel, both).  Under pipeline
parallelism only the ranks of its stage hold it, and the other ranks have no parameter of that name.  In all cases a
rank holds one box of it.  Boxes are compared and moved, without lists of indices, and only requested ones are gathered.

This module keeps no copy of a parameter.  It reads and writes the live parameters, between two steps.

``ddp``      every rank holds the whole model, with the same values (``parallel``).
``fsdp``     parameters, gradients and optimizer state are sharded, and gathered block by block for use (torch's
             ``fully_shard``; ZeRO stage 3, arXiv 1910.02054).
``hsdp``     as fsdp within each group of ``shard_ranks`` neighbours, with copies between the groups as under ddp.
``tp``       each matrix of a block is cut into parts, and each rank multiplies with its part, all on the same text (the
             plan of Megatron-LM, arXiv 1909.08053, section 3).
``tp+fsdp``  both: ``tensor_ranks`` neighbours multiply together, and their parts are sharded over the other ranks.

If the model was made on torch's meta device, each rank allocates memory for its part only, and for the whole of one
parameter at a time during initialisation.

A sharded parameter is a DTensor under its plain name, fp32, and may be written in place between two steps.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from diloco.inner import require
from diloco.inner.model import ModelOptions, Transformer
from diloco.inner.parallel import Box, HoldingError, box_of, local

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor, nn
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor.parallel import ParallelStyle

    from diloco.inner.parallel import SiteGroup


class Piece(Protocol):
    """The values ``[start, stop)`` of the flattened parameter ``name``."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def start(self) -> int: ...  # noqa: D102
    @property
    def stop(self) -> int: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Part:
    """A box of values of ``name``, of ``sizes``: ``held`` is its index in what a rank holds, ``flat`` in flat values.

    In the flat values, ``flat`` is an index into a tensor of ``shape`` whose first value is at ``offset``.
    """

    name: str
    sizes: tuple[int, ...]
    held: tuple[slice, ...]
    flat: tuple[slice, ...]
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of values."""
        return prod(self.sizes)

    def of(self, values: Tensor) -> Tensor:
        """Return this part of the flat ``values``, as a view."""
        return values[self.offset : self.offset + prod(self.shape)].view(self.shape)[self.flat]


@dataclass(frozen=True, slots=True)
class Share:
    """The ``parts`` of some pieces that each of ``ranks`` holds; ``numel`` is their number of values."""

    ranks: tuple[int, ...]
    parts: tuple[Part, ...]
    numel: int


@dataclass(frozen=True, slots=True)
class Plan:
    """How the ranks hold some pieces, whose number of values is ``numel``."""

    shares: tuple[Share, ...]
    own: tuple[Part, ...]
    """The parts that this rank holds."""
    whole_at: frozenset[int]
    """The ranks that hold all of the pieces."""
    numel: int


@dataclass(frozen=True, slots=True)
class Told:
    """A rank's description of a parameter that it has: the full shape, the rank's box, and the name of the dtype."""

    shape: tuple[int, ...]
    box: Box
    dtype: str


@dataclass(frozen=True, slots=True)
class Compared:
    """Parameters with copies: each group of ``ranks`` holds the same boxes.  ``digests`` (sha256 hex) are by rank."""

    names: Sequence[str]
    ranks: tuple[tuple[int, ...], ...]
    digests: Sequence[str]

    @property
    def differs(self) -> bool:
        """Whether two ranks that should hold the same values have different bits."""
        return any(len({self.digests[rank] for rank in alike}) > 1 for alike in self.ranks)


class Holding:
    """The parameters of a model, in the layout in which the ranks of a site hold them.

    The constructor, ``gather`` and ``scatter`` are collectives: all ranks call them, in the same order.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        group: SiteGroup,
        *,
        in_stages: bool = False,
        frozen: str = "",
        buffers: Sequence[str] = (),
    ) -> None:
        """``parameters`` are all that are exchanged, by canonical name; HoldingError if those of the ranks do not fit.

        With ``in_stages`` they are those of this rank's pipeline stage, and other ranks may have others.  ``frozen`` is
        the digest of the model's frozen parameters, which this object does not hold; ``buffers`` names those of all
        ranks' ``parameters`` that are buffers.
        """
        self.group, self.frozen, self.buffers = group, frozen, buffers
        self._parameters = dict(sorted(parameters.items()))
        told = _told(group, self._parameters)
        self.shapes, self._narrow = _agreed(told, in_stages)
        """Full shapes of the whole model's parameters, and the dtypes narrower than fp32, by name."""
        self._held: dict[str, dict[Box, tuple[int, ...]]] = {}
        """The ranks that hold each box of a parameter."""
        for name, shape in self.shapes.items():
            held = self._held[name] = {}
            for rank, each in enumerate(told):
                if name in each and not each[name].box.is_empty:
                    box = each[name].box
                    held[box] = (*held.get(box, ()), rank)
            there = sum(prod(box.sizes) for box in held)
            if there != prod(shape):
                raise HoldingError(f"parameter {name} has {prod(shape)} values, and the ranks hold {there} of them")
        self._plans: dict[tuple[Piece, ...], Plan] = {}  # One for each fragment.

    def parts(self) -> Iterator[Tensor]:
        """Yield what this rank holds of each parameter that it has."""
        return (self.part(name) for name in self._parameters)

    def part(self, name: str) -> Tensor:
        """Return what this rank holds of a parameter, as a view: writing to it writes to the model."""
        return local(self._parameters[name])

    def is_whole(self, pieces: Sequence[Piece]) -> bool:
        """Whether this rank holds all of ``pieces`` itself, so that it can read them without other ranks."""
        return self.group.rank in self._plan(pieces).whole_at

    def rounded(self, pieces: Sequence[Piece], values: Tensor) -> Tensor:
        """Return the flat fp32 ``values`` of ``pieces`` as rounded by the parameters' dtypes when they are written.

        Returns ``values`` itself if no parameter has a narrower dtype, else a new fp32 tensor.  Not a collective.
        """
        if not any(piece.name in self._narrow for piece in pieces):
            return values
        found, at = values.clone(), 0
        for piece in pieces:
            here = found[at : at + piece.stop - piece.start]
            if piece.name in self._narrow:
                here.copy_(here.to(self._narrow[piece.name]))
            at += piece.stop - piece.start
        return found

    def is_copied(self, pieces: Sequence[Piece]) -> bool:
        """Whether every rank holds all of ``pieces``."""
        return len(self._plan(pieces).whole_at) == self.group.world

    def gather(self, pieces: Sequence[Piece], into: Tensor | None, at: int = 0) -> None:
        """Fill the flat fp32 ``into`` of rank ``at`` with ``pieces``, concatenated; the other ranks pass None.

        Each value that ``at`` does not hold is sent once, by the first of the ranks that hold it.
        """
        plan = self._plan(pieces)
        _check(into, plan.numel, is_hub=self.group.rank == at)
        if into is not None:
            for part in plan.own:
                part.of(into).copy_(self._held_of(part))
        if at not in plan.whole_at:
            away = [share for share in plan.shares if at not in share.ranks]
            sent = [[share for share in away if share.ranks[0] == rank] for rank in range(self.group.world)]
            self._exchange(at, into, sent, to_hub=True)

    def scatter(self, pieces: Sequence[Piece], values: Tensor | None, of: int = 0, *, own: bool = True) -> None:
        """Write the flat fp32 ``values`` of rank ``of`` into every rank's part of ``pieces``; the others pass None.

        Without ``own``, rank ``of`` does not write its own part: it has these values already.
        """
        group, plan = self.group, self._plan(pieces)
        _check(values, plan.numel, is_hub=group.rank == of)
        if values is not None and own:
            for part in plan.own:
                self._held_of(part).copy_(part.of(values))
        if not self.is_copied(pieces):
            ranks = range(group.world)
            taken = [[share for share in plan.shares if rank in share.ranks and rank != of] for rank in ranks]
            if any(taken):
                self._exchange(of, values, taken, to_hub=False)
        elif group.world > 1:
            whole = values if values is not None else torch.empty(plan.numel, dtype=torch.float32, device=group.device)
            group.broadcast_(whole, of)
            if values is None:
                for part in plan.own:
                    self._held_of(part).copy_(part.of(whole))

    def _exchange(self, hub: int, flat: Tensor | None, shares: Sequence[Sequence[Share]], *, to_hub: bool) -> None:
        """Copy what the other ranks hold into the ``flat`` values of rank ``hub``, or, if not ``to_hub``, back.

        ``shares`` has for each rank what it sends to ``hub``, or receives.
        """
        group, sends = self.group, (flat is not None) != to_hub
        numels = [sum(share.numel for share in each) for each in shares]
        if flat is not None:
            place: Callable[[Part], Tensor] = partial(Part.of, values=flat)
            moved = [*itertools.chain(*shares)]
        else:
            place, moved = self._held_of, [*shares[group.rank]]
            numels = [numels[group.rank] if rank == hub else 0 for rank in range(group.world)]
        parts = [part for share in moved for part in share.parts]
        nothing = [0] * group.world
        message = torch.empty(sum(numels) if sends else 0, dtype=torch.float32, device=group.device)
        if sends:
            for part, values in _cut(message, parts):
                values.copy_(place(part))
        come = group.all_to_all(message, *((numels, nothing) if sends else (nothing, numels)))
        if not sends:
            for part, values in _cut(come, parts):
                place(part).copy_(values)

    def _held_of(self, part: Part) -> Tensor:
        """Return ``part`` of what this rank holds, as a view."""
        return self.part(part.name)[part.held]

    def compared(self) -> list[Compared]:
        """Return the parameters with copies on several ranks, with digests of what each rank holds, in fp32.

        A collective.
        """
        alike: dict[tuple[tuple[int, ...], ...], list[str]] = {}
        for name, shares in self._held.items():
            if any(len(ranks) > 1 for ranks in shares.values()):
                alike.setdefault(tuple(sorted(shares.values())), []).append(name)
        found = []
        for ranks, names in sorted(alike.items()):
            hashed = hashlib.sha256()
            for name in (each for each in names if each in self._parameters):
                hashed.update(self.part(name).to("cpu", torch.float32).contiguous().numpy().data)
            found.append(Compared(names, ranks, self.group.all_gather_json(hashed.hexdigest())))
        return found

    def _plan(self, pieces: Sequence[Piece]) -> Plan:
        """Return how the ranks hold ``pieces``; cached."""
        key = tuple(pieces)
        if (known := self._plans.get(key)) is not None:
            return known
        parts: dict[tuple[int, ...], list[Part]] = {}
        offset = 0
        for piece in key:
            name = piece.name
            for slab in _slabs(self.shapes[name], piece.start, piece.stop):
                for box, ranks in self._held[name].items():
                    meet = box.within(slab)
                    if meet is not None:
                        held, flat = meet.seen_from(box).slices, meet.seen_from(slab).slices
                        parts.setdefault(ranks, []).append(Part(name, meet.sizes, held, flat, slab.sizes, offset))
                offset += prod(slab.sizes)
        shares = [Share(ranks, tuple(each), sum(part.numel for part in each)) for ranks, each in sorted(parts.items())]
        assert sum(share.numel for share in shares) == offset, "the pieces are not those of this model"
        own = tuple(part for share in shares if self.group.rank in share.ranks for part in share.parts)
        whole_at = frozenset(range(self.group.world)).intersection(*(share.ranks for share in shares))
        self._plans[key] = Plan(tuple(shares), own, whole_at, offset)
        return self._plans[key]


def _check(values: Tensor | None, numel: int, *, is_hub: bool) -> None:
    """Assert that the hub, and no other rank, passes ``numel`` flat fp32 values."""
    assert (values is not None) == is_hub, "only the hub passes values"
    if values is not None:
        assert values.shape == (numel,), f"values have shape {tuple(values.shape)}, the pieces {numel}"
        assert values.dtype == torch.float32


def _cut(message: Tensor, parts: Iterable[Part]) -> Iterator[tuple[Part, Tensor]]:
    """Yield each part with a view of its values in the flat ``message``, where the parts are concatenated."""
    offset = 0
    for part in parts:
        yield part, message[offset : offset + part.numel].view(part.sizes)
        offset += part.numel


def _told(group: SiteGroup, parameters: Mapping[str, Tensor]) -> list[dict[str, Told]]:
    """Return every rank's parameters by name, in the order of the names.  A collective."""
    mine = []
    for name, each in parameters.items():
        box = box_of(each, f"parameter {name}")
        mine.append([name, each.shape, box.starts, box.sizes, str(each.dtype).removeprefix("torch.")])
    return [
        {
            name: Told(tuple(shape), Box(tuple(starts), tuple(sizes)), dtype)
            for name, shape, starts, sizes, dtype in each
        }
        for each in group.all_gather_json(mine)
    ]


def _agreed(
    told: Sequence[Mapping[str, Told]], in_stages: bool
) -> tuple[dict[str, tuple[int, ...]], dict[str, torch.dtype]]:
    """Return all parameters' shapes, in the order of the names, and the dtypes that are narrower than fp32.

    HoldingError if ranks differ that should not.
    """
    found: dict[str, Told] = {}
    first = [[name, list(each.shape)] for name, each in told[0].items()]
    for rank, here in enumerate(told):
        named = [[name, list(each.shape)] for name, each in here.items()]
        if not in_stages and named != first:
            other = next(pair for pair in itertools.zip_longest(named, first) if pair[0] != pair[1])
            raise HoldingError(f"rank {rank} has the parameter {other[0]} where rank 0 has {other[1]}")
        for name, each in here.items():
            known = found.setdefault(name, each)
            if known.shape != each.shape:
                shapes = f"{list(each.shape)} on rank {rank} and {list(known.shape)} on another"
                raise HoldingError(f"parameter {name} is of shape {shapes}")
            if known.dtype != each.dtype:
                raise HoldingError(f"parameter {name} is {each.dtype} on rank {rank} and {known.dtype} on another")
    dtypes = {name: getattr(torch, each.dtype) for name, each in found.items()}
    for name, dtype in dtypes.items():
        if dtype.is_complex:
            raise HoldingError(f"parameter {name} is {dtype}: its values must be real numbers")
        if 0 in (shape := found[name].shape):
            raise HoldingError(f"parameter {name} is of shape {shape}: it has no values to exchange; freeze it")
    narrow = {name: dtype for name, dtype in dtypes.items() if dtype not in (torch.float32, torch.float64)}
    return {name: found[name].shape for name in sorted(found)}, narrow


def _slabs(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the values ``[start, stop)`` of a flattened tensor as consecutive boxes of the tensor."""
    if len(shape) < 2:
        if start < stop:
            yield Box((start,), (stop - start,)) if shape else Box((), ())
        return
    row = prod(shape[1:])
    begin, end = -(-start // row), stop // row  # The whole rows.
    if begin > end:
        yield from _in_row(shape, end, start, stop)
        return
    yield from _in_row(shape, begin - 1, start, begin * row)
    if begin < end:
        yield Box((begin, *(0 for _ in shape[1:])), (end - begin, *shape[1:]))
    yield from _in_row(shape, end, end * row, stop)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Box]:
    first = row * prod(shape[1:])
    for box in _slabs(shape[1:], start - first, stop - first):
        yield Box((row, *box.starts), (1, *box.sizes))


# --- How the ranks of one site hold one model ------------------------------------------------------------------------

KINDS = ("ddp", "fsdp", "hsdp", "tp", "tp+fsdp")
DIMENSIONS = ("replicate", "shard", "tensor")


@dataclass(kw_only=True, slots=True)
class ParallelOptions:
    """How a site's ranks hold the model.  A size of 0 is derived if only one value is possible."""

    parallel: str = "ddp"
    tensor_ranks: int = 0
    """Ranks that multiply one matrix together; 0 under ``tp``: all."""
    shard_ranks: int = 0
    """Ranks over which a parameter is sharded; 0 under ``fsdp`` and ``tp+fsdp``: all that are available."""

    def __post_init__(self) -> None:
        require(self.parallel in KINDS, "parallel", self.parallel, f"one of {', '.join(KINDS)}")
        for name, where in (("tensor_ranks", ("tp", "tp+fsdp")), ("shard_ranks", ("fsdp", "hsdp", "tp+fsdp"))):
            value = getattr(self, name)
            require(value >= 0, name, value, "0 (derived) or more")
            require(value == 0 or self.parallel in where, name, value, f"only under {', '.join(where)}")
        for parallel, name in (("hsdp", "shard_ranks"), ("tp+fsdp", "tensor_ranks")):
            value = getattr(self, name)
            require(self.parallel != parallel or value > 0, name, value, f"at least 1 for {parallel}")

    def sizes(self, world: int) -> tuple[int, int, int]:
        """Return (copies, shards, tensor ranks) for ``world`` ranks; ValueError if they do not divide evenly."""
        if self.parallel == "ddp":
            return world, 1, 1
        tensor = (self.tensor_ranks or world) if "tp" in self.parallel else 1
        require(world % tensor == 0, "tensor_ranks", tensor, f"a divisor of the site's {world} rank(s)")
        left = world // tensor
        require(self.parallel != "tp" or left == 1, "tensor_ranks", tensor, f"all {world} ranks, or tp+fsdp")
        shards = self.shard_ranks or left
        require(left % shards == 0, "shard_ranks", shards, f"a divisor of {left} (the ranks by tensor_ranks={tensor})")
        require(
            left == shards or self.parallel != "fsdp", "shard_ranks", shards, f"all {world} ranks, or hsdp for copies"
        )
        require(shards > 1 or left == 1, "shard_ranks", shards, "at least 2; copies alone are ddp")
        return left // shards, shards, tensor


def check_cut(options: ModelOptions, tensor: int) -> None:
    """Raise ValueError unless ``tensor`` ranks can each take an equal part of every block's matrices."""
    parts = {"heads": options.heads, "kv_heads": options.kv_heads_used, "ffn_dim": options.ffn_dim_used}
    for name, value in parts.items():
        require(value % tensor == 0, "tensor_ranks", tensor, f"a divisor of the model's {name}={value}")
    require(tensor <= options.vocab_size, "tensor_ranks", tensor, f"at most vocab_size={options.vocab_size}")


class Spread:
    """One model, held by the ranks of a site.  Make it before the optimizers, because it may replace parameters."""

    def __init__(self, model: nn.Module, group: SiteGroup, options: ParallelOptions | None = None) -> None:
        self.group, self.sizes = group, (options or ParallelOptions()).sizes(group.world)
        copies, shards, tensor = self.sizes
        self.is_sharded = shards > 1 or tensor > 1
        self.data_rank, self.data_world = group.rank // tensor, copies * shards
        """This rank's index among the groups that draw different text: ranks that multiply together draw the same."""
        at = (group.rank // (shards * tensor), group.rank // tensor % shards, group.rank % tensor)
        self.place = dict(zip(DIMENSIONS, at, strict=True))
        """This rank's coordinates in the grid of the site's ranks, by the names in ``DIMENSIONS``."""
        if not self.is_sharded:
            self.module = group.wrap(model)
            return
        assert isinstance(model, Transformer), "only our own model has a sharding plan"
        check_cut(model.options, tensor)
        is_empty = model.cosines.is_meta
        if not is_empty:
            model.to(group.device)
        with group.bounded("sharding the model"):
            mesh = _mesh(group, self.sizes)
            if tensor > 1:
                cut_by_tensor(model, mesh["tensor"])
            if shards > 1:
                cut_by_shard(model, mesh["replicate", "shard"] if copies > 1 else mesh["shard"])
        if is_empty:  # It was made on torch's meta device, without memory.
            model.to_empty(device=group.device)
            if model.options.tied:
                model.head.weight = model.embedding.weight
            model.fill()
        self.module = model
        """The module that the trainer calls."""

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Inside, a backward pass reduces gradients between copies of the model only if it is the ``last`` one.

        Between shards it reduces every time: to wait, every rank would have to keep a whole model's gradients, and a
        model is sharded because those do not fit.
        """
        if self.is_sharded and self.sizes[0] > 1:
            cast("FSDPModule", self.module).set_requires_all_reduce(last)
        if last or not isinstance(self.module, DistributedDataParallel):
            return nullcontext()
        return cast("AbstractContextManager[None]", self.module.no_sync())

    def put_away(self) -> None:
        """Free the parameters gathered for a forward pass that no backward pass followed."""
        if self.sizes[1] > 1:
            cast("FSDPModule", self.module).reshard()


def _mesh(group: SiteGroup, sizes: tuple[int, int, int]) -> DeviceMesh:
    """Return the ranks as a mesh without dimensions of size 1; its groups have the site's timeout, not torch's."""
    kept = [(size, name) for size, name in zip(sizes, DIMENSIONS, strict=True) if size > 1]
    grid = torch.arange(group.world).reshape([size for size, _ in kept])
    groups = []
    for side, (size, _) in enumerate(kept):
        rows = grid.movedim(side, -1).reshape(-1, size).tolist()
        bound = timedelta(seconds=group.timeout_s)
        mine, _ = dist.new_subgroups_by_enumeration(rows, timeout=bound)  # type: ignore[no-untyped-call]
        groups.append(mine)
    names = tuple(name for _, name in kept)
    # torch derives a mesh of one dimension from its group; with more it needs the grid of ranks.
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], group.device.type, mesh_dim_names=names)
    return DeviceMesh.from_group(groups, group.device.type, mesh=grid, mesh_dim_names=names)


def cut_by_tensor(model: Transformer, mesh: DeviceMesh) -> None:
    """Shard a layer's input matrices by columns and its output matrices by rows: one sum over the ranks per half block.

    The embedding and the head are both cut by vocabulary, so that a tied pair is cut alike and stays one matrix.
    """
    # These import torch's DTensor, which takes 2 s, as in ``parallel.is_cut``.
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    whole = Replicate()
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=whole),
        "head": ColwiseParallel(output_layouts=whole),
    }
    for index in range(len(model.blocks)):
        attention, feed_forward = f"blocks.{index}.attention", f"blocks.{index}.feed_forward"
        # Declared once for a whole layer, so that the gradients of its input are summed once, not once per matrix.
        plan[attention] = PrepareModuleInput(
            input_layouts=(whole, None, None), desired_input_layouts=(whole, None, None)
        )
        plan[feed_forward] = PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,))
        for name in ("query", "key", "value"):
            plan[f"{attention}.{name}"] = ColwiseParallel()
        for name in ("gate", "up"):
            plan[f"{feed_forward}.{name}"] = ColwiseParallel()
        plan[f"{attention}.output"] = plan[f"{feed_forward}.down"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    if model.options.tied:
        model.head.weight = model.embedding.weight


def cut_by_shard(model: Transformer, mesh: DeviceMesh) -> None:
    """Shard each block on its own and the rest together, so that a rank gathers one block at a time."""
    from torch.distributed.fsdp import fully_shard  # Takes 2 s too.

    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
