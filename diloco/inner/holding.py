"""What the ranks of a site hold of a model, and the way between that and whole values on one rank.

A parameter lies whole on every rank (one process, DDP), or is a DTensor: cut along one dimension or several, over a
mesh of ranks of one dimension or two, with copies where the mesh has them (FSDP, HSDP, tensor parallel, both).  Under
pipeline parallelism it is that on the ranks of a stage, and the others have none of that name.  What a rank holds of it
is a product of index ranges in any case, so it is described by those, and compared and moved as boxes: no list of
indices is made, and nothing is gathered that is not asked for.

Nobody keeps a copy of a parameter.  It is read and written where it lies, between two steps.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Protocol

import torch

from diloco.inner.parallel import is_cut

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from diloco.inner.parallel import SiteGroup

Span = tuple[int, int]
Spans = tuple[tuple[Span, ...], ...]
"""For each dimension the ranges [start, stop) that are held, in the order in which they lie."""


class HoldingError(ValueError):
    """The ranks of this site hold a model in a way that cannot be exchanged; the message names the parameter."""


class Piece(Protocol):
    """The values ``[start, stop)`` of the flattened parameter ``name``."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def start(self) -> int: ...  # noqa: D102
    @property
    def stop(self) -> int: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Box:
    """A box of values: where it begins in a rank's own part of ``name``, and where in flat values.

    There it is a box of ``shape``, whose values are ``[offset, stop)`` and in which it begins at ``start``.
    """

    name: str
    at: tuple[int, ...]
    size: tuple[int, ...]
    offset: int
    stop: int
    shape: tuple[int, ...]
    start: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many values it has."""
        return prod(self.size)

    def of(self, values: Tensor) -> Tensor:
        """It in the flat ``values``, a view."""
        whole = values[self.offset : self.stop].view(self.shape)
        return whole if self.size == self.shape else _narrowed(whole, self.start, self.size)

    def here(self, part: Tensor) -> Tensor:
        """It in a rank's own part, a view."""
        return part if part.shape == self.size else _narrowed(part, self.at, self.size)


@dataclass(frozen=True, slots=True)
class Share:
    """What each of ``ranks`` holds alike of some pieces: the values of ``boxes``, one behind the other."""

    ranks: tuple[int, ...]
    boxes: tuple[Box, ...]
    numel: int


@dataclass(frozen=True, slots=True)
class Told:
    """What a rank says of a parameter that it has: the whole's shape, what of it is there, None for nothing, and the
    name of its type."""

    shape: tuple[int, ...]
    spans: Spans | None
    dtype: str


@dataclass(frozen=True, slots=True)
class Compared:
    """Parameters of which the ranks of each of ``ranks`` hold the same; ``digests`` are of every rank's part."""

    names: Sequence[str]
    ranks: tuple[tuple[int, ...], ...]
    digests: Sequence[str]

    @property
    def differs(self) -> bool:
        """Whether two ranks that hold the same have other bits there."""
        return any(len({self.digests[rank] for rank in alike}) > 1 for alike in self.ranks)


class Holding:
    """The parameters of a model, as the ranks of a site hold them.

    Making one, ``gather`` and ``scatter`` are for all ranks at once, in the same order.
    """

    def __init__(self, parameters: Mapping[str, Tensor], group: SiteGroup, *, in_stages: bool = False) -> None:
        """``parameters`` are all of the model's, by canonical name; HoldingError where the ranks do not fit.

        ``in_stages``: they are those of this rank's part of the model, and other ranks may have others.
        """
        self.group = group
        self._parameters = dict(sorted(parameters.items()))
        told = _told(group, self._parameters)
        self.shapes = _shapes(told, in_stages)
        """Of the whole model's parameters."""
        self._narrow = _narrow(told)
        self._held = {
            name: _sharing(name, shape, [each[name].spans if name in each else None for each in told])
            for name, shape in self.shapes.items()
        }
        self._plans: dict[tuple[tuple[str, int, int], ...], tuple[Share, ...]] = {}  # One for each fragment.

    def parts(self) -> Iterator[Tensor]:
        """What this rank holds of each parameter that it has."""
        return (self.part(name) for name in self._parameters)

    def part(self, name: str) -> Tensor:
        """What this rank holds of a parameter, where it lies: what is written there is written to the model."""
        parameter = self._parameters[name]
        with torch.no_grad():
            return (parameter.to_local() if is_cut(parameter) else parameter).detach()

    def is_whole(self, pieces: Sequence[Piece], at: int = 0) -> bool:
        """Whether rank ``at`` holds all of ``pieces`` itself, so that it needs nobody to read them."""
        return all(at in share.ranks for share in self._plan(pieces))

    def rounded(self, pieces: Sequence[Piece], values: Tensor) -> Tensor:
        """Return what the model holds once the flat fp32 ``values`` of ``pieces`` are written to it: ``values`` itself
        where no parameter is of a narrower type, else a new fp32 tensor.  Needs no other rank."""
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
        return all(len(share.ranks) == self.group.world for share in self._plan(pieces))

    def gather(self, pieces: Sequence[Piece], into: Tensor | None, at: int = 0) -> None:
        """Fill the flat fp32 ``into`` of rank ``at`` with ``pieces``, one behind the other; the others give None.

        Each value is sent once, by one of those that hold it, and not at all where ``at`` does.
        """
        group, plan = self.group, self._plan(pieces)
        away = [share for share in plan if at not in share.ranks]
        if group.rank == at:
            assert into is not None
            _check(into, plan)
            for box in _boxes(share for share in plan if at in share.ranks):
                box.of(into).copy_(box.here(self.part(box.name)))
        if not away:
            return
        sent = [share for share in away if share.ranks[0] == group.rank]
        message = self._packed(sent)
        sizes = [0] * group.world
        if group.rank != at:
            sizes[at] = message.numel()
            group.all_to_all(message, sizes, [0] * group.world)
            return
        assert into is not None
        by_rank = [[share for share in away if share.ranks[0] == rank] for rank in range(group.world)]
        come = group.all_to_all(message, sizes, [_numel(shares) for shares in by_rank])
        offset = 0
        for box in _boxes(itertools.chain(*by_rank)):
            box.of(into).copy_(come[offset : offset + box.numel].view(box.size))
            offset += box.numel

    def scatter(self, pieces: Sequence[Piece], values: Tensor | None, of: int = 0, *, own: bool = True) -> None:
        """Write the flat fp32 ``values`` of rank ``of`` into what every rank holds of ``pieces``; the others give None.

        Without ``own`` that rank holds them already.
        """
        group, plan = self.group, self._plan(pieces)
        is_source = group.rank == of
        if is_source:
            assert values is not None
            _check(values, plan)
            if own:
                for box in _boxes(share for share in plan if of in share.ranks):
                    box.here(self.part(box.name)).copy_(box.of(values))
        if self.is_copied(pieces):
            if group.world > 1:
                whole = values if values is not None else torch.empty(_numel(plan), device=group.device)
                group.broadcast_(whole, of)
                if not is_source:
                    for box in _boxes(plan):
                        box.here(self.part(box.name)).copy_(box.of(whole))
            return
        taken = [[share for share in plan if rank in share.ranks and rank != of] for rank in range(group.world)]
        if not any(taken):
            return
        sizes = [_numel(shares) for shares in taken]
        if is_source:
            assert values is not None
            message, offset = torch.empty(sum(sizes), device=group.device), 0
            for box in _boxes(itertools.chain(*taken)):
                message[offset : offset + box.numel].view(box.size).copy_(box.of(values))
                offset += box.numel
            group.all_to_all(message, sizes, [0] * group.world)
            return
        come_sizes = [0] * group.world
        come_sizes[of] = sizes[group.rank]
        come = group.all_to_all(torch.empty(0, device=group.device), [0] * group.world, come_sizes)
        offset = 0
        for box in _boxes(taken[group.rank]):
            box.here(self.part(box.name)).copy_(come[offset : offset + box.numel].view(box.size))
            offset += box.numel

    def compared(self) -> list[Compared]:
        """The parameters of which several ranks hold the same, with what each holds; for all ranks at once."""
        alike: dict[tuple[tuple[int, ...], ...], list[str]] = {}
        for name, shares in self._held.items():
            if any(len(ranks) > 1 for ranks in shares.values()):
                alike.setdefault(tuple(sorted(shares.values())), []).append(name)
        return [Compared(names, ranks, self._digests(names)) for ranks, names in sorted(alike.items())]

    def _digests(self, names: Sequence[str]) -> list[str]:
        """Of every rank, that of all that it holds of ``names``."""
        hashed = hashlib.sha256()
        for name in (each for each in names if each in self._parameters):
            hashed.update(self.part(name).to("cpu", torch.float32).contiguous().numpy().data)
        mine = torch.frombuffer(bytearray(hashed.digest()), dtype=torch.uint8)
        return [bytes(digest.tolist()).hex() for digest in self.group.all_gather(mine)]

    def _packed(self, shares: Sequence[Share]) -> Tensor:
        message, offset = torch.empty(_numel(shares), device=self.group.device), 0
        for box in _boxes(shares):
            message[offset : offset + box.numel].view(box.size).copy_(box.here(self.part(box.name)))
            offset += box.numel
        return message

    def _plan(self, pieces: Sequence[Piece]) -> tuple[Share, ...]:
        """Who holds what of ``pieces``."""
        key = tuple((piece.name, piece.start, piece.stop) for piece in pieces)
        if key not in self._plans:
            self._plans[key] = self._planned(key)
        return self._plans[key]

    def _planned(self, pieces: Sequence[tuple[str, int, int]]) -> tuple[Share, ...]:
        boxes: dict[tuple[int, ...], list[Box]] = {}
        offset = 0
        for name, start, stop in pieces:
            for spans, ranks in self._held[name].items():
                found = boxes.setdefault(ranks, [])
                found += _boxes_of(name, self.shapes[name], spans, start, stop, offset)
            offset += stop - start
        shares = [Share(ranks, tuple(each), sum(box.numel for box in each)) for ranks, each in sorted(boxes.items())]
        assert sum(share.numel for share in shares) == offset, "the pieces are not those of this model"
        return tuple(share for share in shares if share.numel)


def _check(values: Tensor, plan: Sequence[Share]) -> None:
    assert values.shape == (_numel(plan),), f"values have shape {tuple(values.shape)}, the pieces {_numel(plan)}"
    assert values.dtype == torch.float32


def _numel(shares: Sequence[Share]) -> int:
    return sum(share.numel for share in shares)


def _boxes(shares: Iterator[Share] | Sequence[Share]) -> Iterator[Box]:
    return (box for share in shares for box in share.boxes)


def _narrowed(tensor: Tensor, start: Sequence[int], size: Sequence[int]) -> Tensor:
    for dim, (begin, length) in enumerate(zip(start, size, strict=True)):
        if length != tensor.size(dim):
            tensor = tensor.narrow(dim, begin, length)
    return tensor


# --- what a rank holds ------------------------------------------------------------------------------------------------


def _spans(name: str, parameter: Tensor) -> Spans | None:
    """What this rank holds of ``parameter``; None where that is nothing.

    A mesh cuts by its dimensions from left to right, each what the one before has left.
    """
    held: list[list[Span]] = [[(0, size)] for size in parameter.shape]
    if is_cut(parameter):
        coordinate = parameter.device_mesh.get_coordinate()
        if coordinate is None:
            return None
        for at, parts, placement in zip(coordinate, parameter.device_mesh.shape, parameter.placements, strict=True):
            if placement.is_replicate():
                continue
            dim = getattr(placement, "dim", None)
            if dim is None or placement.is_partial():
                raise HoldingError(f"parameter {name} is {placement}: its values are nowhere")
            # FSDP over tensor parallel cuts what the other has cut: strided, of each of so many parts one.
            cuts = getattr(placement, "split_factor", 1)
            length = sum(stop - start for start, stop in held[dim])
            mine = (_chunks(start, stop, parts)[at] for start, stop in _chunks(0, length, cuts))
            held[dim] = _joined(span for each in mine for span in _within(held[dim], *each))
        shape = tuple(sum(stop - start for start, stop in spans) for spans in held)
        with torch.no_grad():
            local = tuple(parameter.to_local().shape)
        if shape != local:
            raise HoldingError(
                f"parameter {name} is {parameter.placements} with a part of {local} here, not of {shape}"
            )
    spans = tuple(tuple(each) for each in held)
    return spans if all(spans) else None


def _chunks(start: int, stop: int, parts: int) -> list[Span]:
    """``[start, stop)`` in ``parts``, as torch cuts: the last ones may be short or empty."""
    size = -(-(stop - start) // parts)
    return [(min(start + at * size, stop), min(start + (at + 1) * size, stop)) for at in range(parts)]


def _within(spans: Sequence[Span], start: int, stop: int) -> Iterator[Span]:
    """The values from the ``start``-th to before the ``stop``-th of those that ``spans`` hold together."""
    before = 0
    for first, last in spans:
        low, high = max(first, first + start - before), min(last, first + stop - before)
        if low < high:
            yield low, high
        before += last - first


def _joined(spans: Iterator[Span]) -> list[Span]:
    """The same values, those that lie one behind the other in one."""
    found: list[Span] = []
    for start, stop in spans:
        if found and found[-1][1] == start:
            start, _ = found.pop()
        found.append((start, stop))
    return found


def _told(group: SiteGroup, parameters: Mapping[str, Tensor]) -> list[dict[str, Told]]:
    """What every rank has, by parameter, in the order of the names."""
    mine = [
        [name, tuple(each.shape), _spans(name, each), str(each.dtype).removeprefix("torch.")]
        for name, each in parameters.items()
    ]
    return [
        {
            name: Told(tuple(shape), None if spans is None else _frozen(spans), dtype)
            for name, shape, spans, dtype in json.loads(each)
        }
        for each in group.all_gather_bytes(json.dumps(mine).encode())
    ]


def _narrow(told: Sequence[Mapping[str, Told]]) -> dict[str, torch.dtype]:
    """The parameters whose type rounds off part of an fp32 value; HoldingError where two ranks have other types."""
    found: dict[str, str] = {}
    for rank, here in enumerate(told):
        for name, each in here.items():
            if found.setdefault(name, each.dtype) != each.dtype:
                raise HoldingError(f"parameter {name} is {each.dtype} on rank {rank} and {found[name]} on another")
    dtypes = {name: getattr(torch, each) for name, each in found.items()}
    return {name: dtype for name, dtype in dtypes.items() if dtype not in (torch.float32, torch.float64)}


def _shapes(told: Sequence[Mapping[str, Told]], in_stages: bool) -> dict[str, tuple[int, ...]]:
    """Of all parameters, in the order of the names; HoldingError where ranks that should have the same have not."""
    found: dict[str, tuple[int, ...]] = {}
    first = [[name, list(each.shape)] for name, each in told[0].items()]
    for rank, here in enumerate(told):
        named = [[name, list(each.shape)] for name, each in here.items()]
        if not in_stages and named != first:
            other = next(pair for pair in itertools.zip_longest(named, first) if pair[0] != pair[1])
            raise HoldingError(f"rank {rank} has the parameter {other[0]} where rank 0 has {other[1]}")
        for name, each in here.items():
            if found.setdefault(name, each.shape) != each.shape:
                shapes = f"{list(each.shape)} on rank {rank} and {list(found[name])} on another"
                raise HoldingError(f"parameter {name} is of shape {shapes}")
    return dict(sorted(found.items()))


def _frozen(spans: Sequence[Sequence[Sequence[int]]]) -> Spans:
    return tuple(tuple((start, stop) for start, stop in each) for each in spans)


def _sharing(name: str, shape: tuple[int, ...], held: Sequence[Spans | None]) -> dict[Spans, tuple[int, ...]]:
    """The ranks that hold the same, by what they hold; HoldingError unless that is each value once."""
    found: dict[Spans, tuple[int, ...]] = {}
    for rank, spans in enumerate(held):
        if spans is not None:
            found[spans] = (*found.get(spans, ()), rank)
    there = sum(prod(sum(stop - start for start, stop in each) for each in spans) for spans in found)
    if there != prod(shape):
        raise HoldingError(f"parameter {name} has {prod(shape)} values, and the ranks hold {there} of them")
    return found


# --- what of it belongs to a piece ------------------------------------------------------------------------------------


def _boxes_of(name: str, shape: tuple[int, ...], spans: Spans, start: int, stop: int, offset: int) -> Iterator[Box]:
    """The boxes in which what is held as ``spans`` and the values ``[start, stop)`` meet; those begin at ``offset``."""
    for first, size in _slabs(shape, start, stop):
        for corner in itertools.product(*(_placed(each) for each in spans)):
            low = tuple(max(begin, at) for begin, (at, _, _) in zip(first, corner, strict=True))
            ends = ((begin + length, end) for begin, length, (_, end, _) in zip(first, size, corner, strict=True))
            high = tuple(min(pair) for pair in ends)
            if any(begin >= end for begin, end in zip(low, high, strict=True)):
                continue
            yield Box(
                name,
                tuple(place + begin - at for begin, (at, _, place) in zip(low, corner, strict=True)),
                tuple(end - begin for begin, end in zip(low, high, strict=True)),
                offset,
                offset + prod(size),
                size,
                tuple(begin - at for begin, at in zip(low, first, strict=True)),
            )
        offset += prod(size)


def _placed(spans: Sequence[Span]) -> Iterator[tuple[int, int, int]]:
    """Each with the place at which it begins where all lie one behind the other."""
    place = 0
    for start, stop in spans:
        yield start, stop, place
        place += stop - start


def _slabs(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The values ``[start, stop)`` of a flattened tensor as boxes of it, (first corner, size), one behind the other."""
    if len(shape) < 2:
        if start < stop:
            yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = prod(shape[1:])
    begin, end = -(-start // row), stop // row  # The rows that are whole.
    if begin > end:
        yield from _in_row(shape, end, start, stop)
        return
    yield from _in_row(shape, begin - 1, start, begin * row)
    if begin < end:
        yield (begin, *(0 for _ in shape[1:])), (end - begin, *shape[1:])
    yield from _in_row(shape, end, end * row, stop)


def _in_row(
    shape: tuple[int, ...], row: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    first = row * prod(shape[1:])
    for corner, size in _slabs(shape[1:], start - first, stop - first):
        yield (row, *corner), (1, *size)
