"""Fragments: fixed lists of (parameter, start, stop) that partition a model's parameters, and their syncers.

Layout.  Every site and the syncer compute the same layout from the same names and shapes, on any machine; they compare
its fingerprint before the first byte of a tensor crosses the wire.  Canonical order is the order of the parameter names
by code point, so that it does not depend on how a model happens to list its parameters.

Placement.  Where a run has several syncers, :func:`place` says which of them holds which fragments, and :func:`part_of`
gives the layout that each works on.  Every syncer is a whole one that knows its own fragments only: fragments are
synchronised on their own, so that nothing is lost by their being in different places.  All sites and all syncers
compute the same placement from the same sizes and rates, and compare it when a site joins.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from diloco.sync.plain import parse_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

EXCHANGE_DTYPE = "float32"
WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Names that no model gives to a part of its own.  ``module`` is one that it may, and DDP's only where DDP is."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The values ``[start, stop)`` of the flattened parameter ``name``."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Fragment:
    """A part of the parameters that is synchronised on its own; ``numel`` values, its pieces in canonical order."""

    index: int
    pieces: tuple[Piece, ...]
    numel: int


@dataclass(frozen=True)
class Layout:
    """All parameters, (name, shape) in canonical order, and the fragments that partition their values exactly.

    A layout may come from another machine, so building one checks it: ``ValueError`` says what does not fit.
    """

    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    fragments: tuple[Fragment, ...]

    def __post_init__(self) -> None:
        _check_parameters(self.parameters)
        _check_fragments(self.fragments)
        _check_cover(self.parameters, self.fragments)

    @property
    def numel(self) -> int:
        """Number of values in all fragments together."""
        return sum(fragment.numel for fragment in self.fragments)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over the canonical JSON of names, shapes, the exchange dtype and the fragments."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Return the canonical JSON: the same layout gives the same text, byte for byte."""
        plain = {
            "dtype": EXCHANGE_DTYPE,
            "fragments": [[[p.name, p.start, p.stop] for p in fragment.pieces] for fragment in self.fragments],
            "parameters": [[name, list(shape)] for name, shape in self.parameters],
        }
        return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    @staticmethod
    def from_json(text: str) -> Layout:
        """Build a layout from :meth:`to_json`'s text, trusting nothing in it; ``ValueError`` where it is not one."""
        try:
            plain = parse_json(text)
        except ValueError as error:
            raise ValueError(f"layout is not JSON: {error}") from None
        if not isinstance(plain, dict) or set(plain) != {"dtype", "fragments", "parameters"}:
            raise ValueError("layout must be an object of dtype, fragments and parameters")
        if plain["dtype"] != EXCHANGE_DTYPE:
            raise ValueError(f"layout's exchange dtype is {plain['dtype']!r}: must be {EXCHANGE_DTYPE!r}")
        parameters = tuple(_parameter_from(entry) for entry in _list(plain["parameters"], "parameters"))
        fragments = tuple(_fragment_from(i, entry) for i, entry in enumerate(_list(plain["fragments"], "fragments")))
        return Layout(parameters, fragments)

    def describe(self) -> str:
        """Return one line for a person: how many values, in how many fragments, how even."""
        sizes = [fragment.numel for fragment in self.fragments]
        largest = max(sizes) * len(sizes) / self.numel
        return (
            f"{self.numel:,} values of {len(self.parameters)} parameters in {len(sizes)} fragments of "
            f"{min(sizes):,} to {max(sizes):,} (largest {largest:.2f} of the mean), fingerprint {self.fingerprint[:12]}"
        )

    def first_difference(self, other: Layout) -> str | None:
        """Return in words the first thing in which ``other`` (there) differs from this one (here), None if equal."""
        here, there = dict(self.parameters), dict(other.parameters)
        for name in sorted({*here, *there}):
            if name not in there:
                return f"parameter {name} is here and not there"
            if name not in here:
                return f"parameter {name} is there and not here"
            if here[name] != there[name]:
                return f"parameter {name} has shape {here[name]} here and {there[name]} there"
        if len(self.fragments) != len(other.fragments):
            return f"there are {len(self.fragments)} fragments here and {len(other.fragments)} there"
        for mine, theirs in zip(self.fragments, other.fragments, strict=True):
            if mine != theirs:
                return f"fragment {mine.index} has {_pieces_text(mine)} here and {_pieces_text(theirs)} there"
        return None


def plan_layout(parameters: Sequence[tuple[str, tuple[int, ...]]], num_fragments: int) -> Layout:
    """Deal whole parameters to ``num_fragments`` fragments so that the largest is small.

    Longest processing time first (Graham 1969): the parameters from large to small, each to the fragment that is
    smallest so far.  The largest fragment is then at most 4/3 - 1/(3 ``num_fragments``) of the best possible; as
    "balanced tensor" fragmentation this is Decoupled DiLoCo's choice (arXiv 2604.21428).  Equal sizes go by name,
    equally small fragments by index, so nothing depends on the order of ``parameters`` or on a hash seed.
    """
    canonical = tuple(sorted((name, tuple(shape)) for name, shape in parameters))
    _check_parameters(canonical)
    if not 1 <= num_fragments <= len(canonical):
        raise ValueError(f"num_fragments is {num_fragments!r}: must be from 1 to the {len(canonical)} parameters")
    smallest_first = [(0, index) for index in range(num_fragments)]
    names: list[list[str]] = [[] for _ in range(num_fragments)]
    sizes = {name: prod(shape) for name, shape in canonical}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, index = heapq.heappop(smallest_first)
        names[index].append(name)
        heapq.heappush(smallest_first, (load + sizes[name], index))
    fragments = tuple(
        Fragment(index, tuple(Piece(name, 0, sizes[name]) for name in sorted(mine)), sum(sizes[name] for name in mine))
        for index, mine in enumerate(names)
    )
    return Layout(canonical, fragments)


def gather(fragment: Fragment, parameters: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
    """Copy the fragment's values out of ``parameters`` (any dtype and device) into one flat fp32 CPU tensor.

    ``out``, fp32 of shape (``fragment.numel``,) on any device, is filled and returned where it is given.
    """
    values = torch.empty(fragment.numel, dtype=torch.float32) if out is None else out
    assert values.shape == (fragment.numel,), f"out has shape {tuple(values.shape)}, fragment has {fragment.numel}"
    assert values.dtype == torch.float32
    at = 0
    for piece in fragment.pieces:
        size = piece.stop - piece.start
        values[at : at + size].copy_(parameters[piece.name].detach().reshape(-1)[piece.start : piece.stop])
        at += size
    return values


def scatter(fragment: Fragment, values: Tensor, parameters: Mapping[str, Tensor]) -> None:
    """Write the flat ``values`` of shape (``fragment.numel``,) into ``parameters`` in place, cast to their dtype."""
    assert values.shape == (fragment.numel,), f"values has shape {tuple(values.shape)}, fragment has {fragment.numel}"
    at = 0
    with torch.no_grad():
        for piece in fragment.pieces:
            size = piece.stop - piece.start
            parameter = parameters[piece.name].detach()
            # A transposed parameter has no flat view: then reshape made a copy, which goes back as a whole.
            flat = parameter.reshape(-1)
            flat[piece.start : piece.stop].copy_(values[at : at + size])
            if not parameter.is_contiguous():
                parameter.copy_(flat.view(parameter.shape))
            at += size


def named_parameters_once(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters under their canonical names, tied ones once (under their first name), no buffers.

    The names are those of the bare model: what DDP, ``torch.compile``, FSDP and activation checkpointing put in front
    is taken off, so that sites which wrap the model differently agree.  A parameter of which each rank holds a part (a
    DTensor) is here with the shape of the whole.
    """
    inside = {f"{name}.module".lstrip(".") for name, each in module.named_modules() if _is_replicated(each)}
    return {_bare(name, inside): parameter for name, parameter in module.named_parameters()}


def _is_replicated(module: nn.Module) -> bool:
    return isinstance(module, DistributedDataParallel)


def _bare(name: str, inside: set[str]) -> str:
    """``name`` without what wrappers have put in; ``inside`` are the paths of what DDP has wrapped."""
    parts = name.split(".")
    kept = [
        part for at, part in enumerate(parts, start=1) if part not in WRAPPERS and ".".join(parts[:at]) not in inside
    ]
    return ".".join(kept)


def _check_parameters(parameters: tuple[tuple[str, tuple[int, ...]], ...]) -> None:
    if not parameters:
        raise ValueError("layout has no parameters")
    for (name, _), (following, _) in pairwise(parameters):
        if name == following:
            raise ValueError(f"parameter {name} appears twice")
        if name > following:
            raise ValueError(f"parameter {following} stands after {name}: must be in order of names")
    for name, shape in parameters:
        if any(size < 1 for size in shape):
            raise ValueError(f"parameter {name} has shape {shape}: every size must be at least 1")


def _check_fragments(fragments: tuple[Fragment, ...]) -> None:
    for index, fragment in enumerate(fragments):
        if fragment.index != index:
            raise ValueError(f"fragment {fragment.index} stands at place {index}")
        if fragment.numel != sum(piece.stop - piece.start for piece in fragment.pieces):
            raise ValueError(f"fragment {index} says {fragment.numel} values, its pieces hold another number")
        if not fragment.pieces:
            raise ValueError(f"fragment {index} has no pieces")
        for piece, following in pairwise(fragment.pieces):
            if (piece.name, piece.start) >= (following.name, following.start):
                raise ValueError(f"fragment {index} lists {following} after {piece}: must be in canonical order")


def _check_cover(parameters: tuple[tuple[str, tuple[int, ...]], ...], fragments: tuple[Fragment, ...]) -> None:
    """Raise ``ValueError`` unless the pieces cover each parameter from 0 to its end, once."""
    covered = {name: 0 for name, _ in parameters}
    pieces = (piece for fragment in fragments for piece in fragment.pieces)
    for piece in sorted(pieces, key=lambda piece: (piece.name, piece.start, piece.stop)):
        if piece.name not in covered:
            raise ValueError(f"{piece} names no parameter")
        if piece.start >= piece.stop:
            raise ValueError(f"{piece} is empty")
        if piece.start != covered[piece.name]:
            what = "overlaps" if piece.start < covered[piece.name] else "leaves a gap after"
            raise ValueError(f"{piece} {what} the pieces up to {covered[piece.name]}")
        covered[piece.name] = piece.stop
    for name, shape in parameters:
        if covered[name] != prod(shape):
            raise ValueError(f"the pieces of parameter {name} end at {covered[name]}, it has {prod(shape)} values")


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"layout's {what} must be a list")
    return value


def _int(value: Any, what: str) -> int:
    # bool is an int in Python, and JSON's true would pass for 1 and change the fingerprint.
    if type(value) is not int:
        raise ValueError(f"layout's {what} must be a whole number")
    return value


def _parameter_from(entry: Any) -> tuple[str, tuple[int, ...]]:
    if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)):
        raise ValueError("layout's parameters must be pairs of a name and a shape")
    return entry[0], tuple(_int(size, "shape") for size in _list(entry[1], "shape"))


def _fragment_from(index: int, entry: Any) -> Fragment:
    pieces = []
    for piece in _list(entry, "fragment"):
        if not (isinstance(piece, list) and len(piece) == 3 and isinstance(piece[0], str)):
            raise ValueError("layout's pieces must be triples of a name, a start and a stop")
        pieces.append(Piece(piece[0], _int(piece[1], "start"), _int(piece[2], "stop")))
    return Fragment(index, tuple(pieces), sum(piece.stop - piece.start for piece in pieces))


def _pieces_text(fragment: Fragment) -> str:
    return f"{fragment.numel} values in {len(fragment.pieces)} pieces from {fragment.pieces[0].name}"


def place(numels: Sequence[int], rates: Sequence[float]) -> tuple[tuple[int, ...], ...]:
    """Deal fragments of ``numels`` values to as many syncers as there are ``rates``; the indices of each, rising.

    The fragments from large to small, each to the syncer whose link would have carried all of its own first (Graham
    1969; Gonzalez, Ibarra and Sahni 1977 for rates that differ).  The last link is then done after at most
    4/3 - 1/(3n) of the best possible time where the n rates are equal, and less than twice that where they are not.
    Equal sizes and equal times go by index; times are compared as fractions, so that no rounding decides.
    """
    if not rates:
        raise ValueError("rates is empty: one for each syncer")
    for rate in rates:
        if not 0 < rate < float("inf"):
            raise ValueError(f"rates has {rate!r}: positive and finite")
    speeds = [Fraction(rate) for rate in rates]
    loads = [0] * len(rates)
    placed: list[list[int]] = [[] for _ in rates]
    for index in sorted(range(len(numels)), key=lambda index: (-numels[index], index)):
        times = [
            ((load + numels[index]) / speed, at) for at, (load, speed) in enumerate(zip(loads, speeds, strict=True))
        ]
        _, at = min(times)
        placed[at].append(index)
        loads[at] += numels[index]
    for at, indices in enumerate(placed):
        if not indices:
            raise ValueError(
                f"syncer {at} of {len(rates)} would hold none of {len(numels)} fragments, with a rate of {rates[at]:g} "
                f"among {', '.join(f'{rate:g}' for rate in rates)}"
            )
    return tuple(tuple(sorted(indices)) for indices in placed)


def part_of(layout: Layout, indices: Sequence[int]) -> Layout:
    """The layout of a syncer that holds the fragments ``indices``: their parameters and no others, counted from 0.

    ``ValueError`` where a parameter lies partly in another syncer's fragments, which no layout of ``plan_layout`` has.
    """
    fragments = tuple(replace(layout.fragments[index], index=at) for at, index in enumerate(indices))
    names = {piece.name for fragment in fragments for piece in fragment.pieces}
    return Layout(tuple(each for each in layout.parameters if each[0] in names), fragments)


def described(placement: Sequence[Sequence[int]]) -> str:
    """The placement in words that two ends can compare: ``0 2 / 1 3``."""
    return " / ".join(" ".join(map(str, indices)) for indices in placement)
