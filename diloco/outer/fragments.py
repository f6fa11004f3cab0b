"""Fragments: fixed lists of (parameter, start, stop) that partition a model's parameters, and their syncers.

Layout.  Every site and the syncer compute the same layout from the same names and shapes, on any machine; they compare
its fingerprint before they exchange the first byte of a tensor.  Canonical order is the order of the parameter names by
code point, so that it does not depend on the order in which a model lists its parameters.  Frozen parameters are in no
fragment; the layout has their digest, so that two sites with different ones have different fingerprints.

Buffers that a run publishes (running statistics) are a fragment of their own, the last, which is averaged.  Its update
is the site's values, negated, as if measured from 0; its version is the mean of the values, or a step towards it; and a
site takes a version as it is.  So each version lies between values that sites had, whatever is late or comes alone.  A
momentum, a sum of differences or a codec's rounding could make a variance negative.

Placement.  Where a run has several syncers, :func:`place` assigns fragments to syncers, and :func:`part_of` returns the
layout of each syncer.  Every syncer is complete and knows only its own fragments: each fragment is synchronised on its
own, so fragments lose nothing by being in different places.  All sites and all syncers compute the same placement from
the same sizes and rates, and compare it when a site joins.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, chain, pairwise
from math import inf, prod
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch.nn.parallel import DistributedDataParallel

from diloco.sync.journal import canonical, from_plain, parse_json

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor, nn

EXCHANGE_DTYPE = "float32"
WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Names that only wrappers use.  ``module`` is not among them: a model may use it, so it is removed only under DDP."""
FROZEN, BUFFERS = "frozen", "buffers"
"""The keys of ``Layout.frozen``, and of the names of buffers as JSON, in the metadata of a file of exchanged values."""


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


@dataclass(frozen=True, slots=True)
class _Stored:
    """A layout in the form of its canonical JSON."""

    dtype: str
    fragments: list[list[tuple[str, int, int]]]
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    frozen: str = ""
    buffers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layout:
    """All exchanged parameters, (name, shape) in canonical order, and the fragments that partition their values.

    ``frozen`` is the digest of the model's frozen parameters, which are not exchanged; empty where it has none.
    ``buffers`` are the names of those ``parameters`` that are buffers, in order.

    A layout may come from another machine, so the constructor checks it: ``ValueError`` names the fault.
    """

    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    fragments: tuple[Fragment, ...]
    frozen: str = ""
    buffers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.parameters:
            raise ValueError("layout has no parameters")
        for (name, _), (next_name, _) in pairwise(self.parameters):
            if name == next_name:
                raise ValueError(f"parameter {name} appears twice")
            if name > next_name:
                raise ValueError(f"parameter {next_name} stands after {name}: must be in order of names")
        for name, shape in self.parameters:
            if min(shape, default=1) < 1:
                raise ValueError(f"parameter {name} has shape {shape}: every size must be at least 1")
        for index, fragment in enumerate(self.fragments):
            if not fragment.pieces:
                raise ValueError(f"fragment {index} has no pieces")
            for piece, following in pairwise(fragment.pieces):
                if (piece.name, piece.start) >= (following.name, following.start):
                    raise ValueError(f"fragment {index} lists {following} after {piece}: must be in canonical order")
        covered = {name: 0 for name, _ in self.parameters}  # Up to where the pieces so far cover each parameter.
        pieces = chain.from_iterable(fragment.pieces for fragment in self.fragments)
        for piece in sorted(pieces, key=attrgetter("name", "start", "stop")):
            if piece.name not in covered:
                raise ValueError(f"{piece} names no parameter")
            if piece.start >= piece.stop:
                raise ValueError(f"{piece} is empty")
            if piece.start != covered[piece.name]:
                what = "overlaps" if piece.start < covered[piece.name] else "leaves a gap after"
                raise ValueError(f"{piece} {what} the pieces up to {covered[piece.name]}")
            covered[piece.name] = piece.stop
        for name, shape in self.parameters:
            if covered[name] != prod(shape):
                raise ValueError(f"the pieces of parameter {name} end at {covered[name]}, it has {prod(shape)} values")

    @property
    def numel(self) -> int:
        """Number of values in all fragments together."""
        return sum(fragment.numel for fragment in self.fragments)

    @cached_property
    def averaged(self) -> frozenset[int]:
        """The fragments of buffers, which are averaged (see the module)."""
        return frozenset(each.index for each in self.fragments if each.pieces[0].name in self.buffers)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of :meth:`to_json`."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Return the canonical JSON: the same layout gives the same text, byte for byte."""
        fragments = [[(p.name, p.start, p.stop) for p in fragment.pieces] for fragment in self.fragments]
        stored = {"dtype": EXCHANGE_DTYPE, "fragments": fragments, "parameters": self.parameters}
        # Without frozen parameters and buffers, the text and so the fingerprint are those of earlier releases.
        also = {FROZEN: self.frozen, BUFFERS: self.buffers}
        return canonical(stored | {key: value for key, value in also.items() if value}).decode()

    @staticmethod
    def from_json(text: str) -> Layout:
        """Return the layout of :meth:`to_json`'s text, which is checked as untrusted; ``ValueError`` if invalid."""
        try:
            plain = parse_json(text)
        except ValueError as error:
            raise ValueError(f"layout is not JSON: {error}") from None
        stored: _Stored = from_plain(_Stored, plain, "layout")
        if stored.dtype != EXCHANGE_DTYPE:
            raise ValueError(f"layout's exchange dtype is {stored.dtype!r}: must be {EXCHANGE_DTYPE!r}")
        cut = enumerate(tuple(Piece(*piece) for piece in pieces) for pieces in stored.fragments)
        fragments = [Fragment(at, pieces, sum(each.stop - each.start for each in pieces)) for at, pieces in cut]
        return Layout(stored.parameters, tuple(fragments), stored.frozen, stored.buffers)

    def first_difference(self, other: Layout) -> str | None:
        """Return the first difference of ``other`` (there) from this layout (here) as text; None if equal."""
        frozen = None
        if self.frozen != other.frozen:
            mine, theirs = (f"of digest {each.frozen[:12]}" if each.frozen else "none" for each in (self, other))
            frozen = (
                f"the frozen parameters are {mine} here and {theirs} there: they are not exchanged, so every site must "
                "load the same base model, in a type that keeps its values, and version 0 must be made with "
                "diloco.save_version0(model, FILE); a parameter that changes without being trained must be a buffer"
            )
            if not (self.frozen and other.frozen):
                return frozen  # For this reason the other parameters differ as well.
        here, there = dict(self.parameters), dict(other.parameters)
        for name in sorted({*here, *there}):
            if name not in there:
                return f"parameter {name} is here and not there"
            if name not in here:
                return f"parameter {name} is there and not here"
            if here[name] != there[name]:
                return f"parameter {name} has shape {here[name]} here and {there[name]} there"
        if frozen:
            return frozen
        if len(self.fragments) != len(other.fragments):
            return f"there are {len(self.fragments)} fragments here and {len(other.fragments)} there"
        for pair in zip(self.fragments, other.fragments, strict=True):
            if pair[0] != pair[1]:
                mine, theirs = (f"{f.numel} values in {len(f.pieces)} pieces from {f.pieces[0].name}" for f in pair)
                return f"fragment {pair[0].index} has {mine} here and {theirs} there"
        return None


def plan_layout(
    parameters: Sequence[tuple[str, tuple[int, ...]]],
    num_fragments: int,
    frozen: str = "",
    buffers: Collection[str] = (),
) -> Layout:
    """Assign whole parameters to ``num_fragments`` fragments so that the largest is small.

    Longest processing time first (Graham 1969): assign the parameters from large to small, each to the fragment that is
    smallest so far.  The largest fragment is then at most 4/3 - 1/(3 ``num_fragments``) times the best possible; this
    is the "balanced tensor" fragmentation of Decoupled DiLoCo (arXiv 2604.21428).  Ties of sizes are broken by name,
    ties of fragments by index, so nothing depends on the order of ``parameters`` or on a hash seed.

    Those of ``parameters`` that ``buffers`` names are one more fragment, the last.
    """
    canonical = tuple(sorted((name, tuple(shape)) for name, shape in parameters))
    sizes = {name: prod(shape) for name, shape in canonical}
    apart = sorted(sizes.keys() & buffers)
    trained = sorted(sizes.keys() - buffers)
    if not trained:
        raise ValueError("layout has no parameters")
    if not 1 <= num_fragments <= len(trained):
        raise ValueError(f"num_fragments is {num_fragments!r}: must be from 1 to the {len(trained)} parameters")
    placed = balanced([sizes[name] for name in trained], [1] * num_fragments)
    names = [[trained[index] for index in indices] for indices in placed]
    if apart:
        names.append(apart)
    pieces = [tuple(Piece(name, 0, sizes[name]) for name in mine) for mine in names]
    numels = [sum(sizes[name] for name in mine) for mine in names]
    return Layout(canonical, tuple(map(Fragment, range(len(names)), pieces, numels)), frozen, tuple(apart))


def balanced(sizes: Sequence[int], costs: Sequence[int | Fraction]) -> list[list[int]]:
    """Assign the indices of ``sizes`` from large to small, each to the place that would finish it first.

    A place takes its cost for each value.  Ties of sizes and of times are broken by index; no time is rounded.  Returns
    the indices at each place, ascending.
    """
    loads = [0] * len(costs)
    placed: list[list[int]] = [[] for _ in costs]
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        _, at = min(((loads[at] + sizes[index]) * cost, at) for at, cost in enumerate(costs))
        placed[at].append(index)
        loads[at] += sizes[index]
    return [sorted(indices) for indices in placed]


def gather(fragment: Fragment, parameters: Mapping[str, Tensor]) -> Tensor:
    """Copy the fragment's values out of ``parameters`` (any dtype and device) into one flat fp32 CPU tensor."""
    values = torch.empty(fragment.numel, dtype=torch.float32)
    parts = torch.split(values, [piece.stop - piece.start for piece in fragment.pieces])
    for piece, part in zip(fragment.pieces, parts, strict=True):
        part.copy_(parameters[piece.name].detach().reshape(-1)[piece.start : piece.stop])
    return values


def scatter(fragment: Fragment, values: Tensor, parameters: Mapping[str, Tensor]) -> None:
    """Write the flat ``values`` of shape (``fragment.numel``,) into ``parameters`` in place, cast to their dtype."""
    assert values.shape == (fragment.numel,), f"values has shape {tuple(values.shape)}, fragment has {fragment.numel}"
    parts = torch.split(values, [piece.stop - piece.start for piece in fragment.pieces])
    with torch.no_grad():
        for piece, part in zip(fragment.pieces, parts, strict=True):
            parameter = parameters[piece.name].detach()
            # A transposed parameter has no flat view: reshape made a copy, which is copied back whole.
            flat = parameter.reshape(-1)
            flat[piece.start : piece.stop].copy_(part)
            if not parameter.is_contiguous():
                parameter.copy_(flat.view(parameter.shape))


def named_parameters_once(module: nn.Module, *, buffers: bool = False) -> dict[str, Tensor]:
    """Return the parameters under their canonical names, tied ones once (under their first name), no buffers.

    With ``buffers`` return the buffers that a state dict holds, those of floating point, and no parameters.

    The names are those of the bare model, without the prefixes of DDP, ``torch.compile``, FSDP and activation
    checkpointing, so that sites that wrap the model differently agree.  A parameter of which each rank holds a part (a
    DTensor) has the shape of the whole.
    """
    modules = dict(module.named_modules())
    wrapped = (name for name, each in modules.items() if isinstance(each, DistributedDataParallel))
    inside = {f"{name}.module".lstrip(".") for name in wrapped}
    found: dict[str, Tensor] = {}
    for name, parameter in module.named_buffers() if buffers else module.named_parameters():
        path, _, own = name.rpartition(".")
        if buffers and (own in modules[path]._non_persistent_buffers_set or not parameter.is_floating_point()):
            continue
        paths = accumulate(name.split("."), "{}.{}".format)
        kept = [part for path in paths if (part := path.split(".")[-1]) not in WRAPPERS and path not in inside]
        found[".".join(kept)] = parameter
    return found


def place(numels: Sequence[int], rates: Sequence[float]) -> tuple[tuple[int, ...], ...]:
    """Assign fragments of ``numels`` values to one syncer for each of ``rates``; return each one's indices, ascending.

    It assigns the fragments from large to small, each to the syncer whose link would finish it first (Graham 1969;
    Gonzalez, Ibarra and Sahni 1977 for different rates).  The last link then finishes after at most 4/3 - 1/(3n) times
    the best possible time where the n rates are equal, and less than twice the best where they differ.  Ties of sizes
    and times are broken by index; times are compared as fractions, so that no rounding decides.  ``ValueError`` for
    invalid rates, and where a syncer would get no fragment.
    """
    for rate in rates:
        if not 0 < rate < inf:
            raise ValueError(f"rates has {rate!r}: positive and finite")
    placed = balanced(numels, [1 / Fraction(rate) for rate in rates])
    for at, indices in enumerate(placed):
        if not indices:
            raise ValueError(
                f"syncer {at} of {len(rates)} would hold none of {len(numels)} fragments, with a rate of {rates[at]:g} "
                f"among {', '.join(f'{rate:g}' for rate in rates)}"
            )
    return tuple(map(tuple, placed))


def part_of(layout: Layout, indices: Sequence[int]) -> Layout:
    """Return the layout of a syncer with the fragments ``indices``, renumbered from 0: their parameters and no others.

    ``ValueError`` where a parameter lies partly in another syncer's fragments, which no layout of ``plan_layout`` has.
    """
    fragments = tuple(replace(layout.fragments[index], index=at) for at, index in enumerate(indices))
    names = {piece.name for fragment in fragments for piece in fragment.pieces}
    buffers = tuple(name for name in layout.buffers if name in names)
    return Layout(tuple(each for each in layout.parameters if each[0] in names), fragments, layout.frozen, buffers)
