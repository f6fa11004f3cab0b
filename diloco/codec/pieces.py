"""A site's passes over a fragment that lies in pieces in the model: what it sends, and taking a version.

Each reads the values where they lie, and the site's own updates in flight out of their payloads, so that no tensor of
the fragment's size is made.  The bits are those of ``outer.pseudo_gradient`` and ``outer.adopt``.
"""

from __future__ import annotations

from ctypes import c_int64
from dataclasses import dataclass
from itertools import accumulate
from math import sqrt
from typing import TYPE_CHECKING

import torch

from diloco.codec.contract import NonFiniteError, bytes_of, check_values
from diloco.codec.digests import hasher
from diloco.codec.fused import ranges
from diloco.codec.kernel_digest import kernel_digest
from diloco.codec.native import address, kernels, pointers, refuse, tile
from diloco.codec.structures import SUM_BLOCK, Pieces, SealJob, Status, TakeJob, Update
from diloco.codec.sums import sum_of_products
from diloco.outer.adopt import rebase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from diloco.codec.coded import Coded
    from diloco.codec.contract import Codec
    from diloco.codec.native import Kernels
    from diloco.codec.structures import Layout


@dataclass(frozen=True, slots=True)
class Measured:
    """Of what was encoded, as it is decoded: the digest of the values and their L2 norm."""

    digest: str
    norm: float


def seal_pieces(
    pieces: Sequence[Tensor],
    base: Tensor,
    sent: Sequence[Coded],
    codec: Codec,
    payload: Tensor,
    fast: Callable[[], Kernels | None] = kernels,
) -> Measured:
    """Encode ``base - local - sent[0] - ...`` into ``payload``, with ``local`` in ``pieces`` one behind the other.

    ``codec`` has no entropy stage.  ``NonFiniteError`` when that is not finite.
    """
    numel = _checked(pieces, base, sent)
    assert payload.numel() == codec.payload_bytes(numel), (payload.numel(), numel)
    found, made = fast(), kernel_digest(4 * numel)
    if found is None or made is None or not found.fits(codec.layout, *_layouts(sent), granule=SUM_BLOCK):
        return _seal_plain(pieces, base, sent, codec, payload)
    assert codec.layout is not None
    job = SealJob(
        codec.layout.format(numel),
        0,
        numel,
        tile(SUM_BLOCK, codec.granule, *(each.codec.granule for each in sent)),
        pieces_of(pieces),
        base.data_ptr(),
        updates(sent),
        len(sent),
        payload.data_ptr(),
        made.address,
    )
    status = found.seal(job)
    if status is Status.NOT_FINITE:
        raise NonFiniteError(f"{codec.name} was to encode a NaN or an infinity")
    _check(status, sent)
    return Measured(made.text(), sqrt(job.squares))


def rebase_pieces(
    pieces: Sequence[Tensor],
    old_base: Tensor,
    new_base: Tensor,
    merged: Sequence[Coded],
    fast: Callable[[], Kernels | None] = kernels,
) -> None:
    """Replace the values in ``pieces``, one behind the other, by what ``outer.adopt.rebase`` returns for them."""
    numel = _checked(pieces, old_base, merged)
    check_values(new_base)
    assert new_base.numel() == numel, (new_base.numel(), numel)
    found = fast()
    if found is None or not found.fits(*_layouts(merged), granule=SUM_BLOCK):
        _rebase_plain(pieces, old_base, new_base, merged)
        return
    job = TakeJob(
        0,
        numel,
        tile(SUM_BLOCK, *(each.codec.granule for each in merged)),
        pieces_of(pieces),
        old_base.data_ptr(),
        new_base.data_ptr(),
        updates(merged),
        len(merged),
    )
    _check(found.take(job), merged)


def updates(held: Sequence[Coded]) -> object:
    """The payloads as the kernels take them, which must live as long as that."""
    found = (Update * max(1, len(held)))()
    for update, each in zip(found, held, strict=False):
        assert each.codec.layout is not None
        update.format, update.payload = each.codec.layout.format(each.numel), address(each.payload)
    return found


def _seal_plain(
    pieces: Sequence[Tensor], base: Tensor, sent: Sequence[Coded], codec: Codec, payload: Tensor
) -> Measured:
    """The same by ranges on torch or by its kernels, each hashed and measured while it lies in the cache."""
    numel, found, squares = base.numel(), hasher(), 0.0
    for start, stop in ranges(numel, [codec, *(each.codec for each in sent)]):
        local = _gathered(pieces, start, stop)
        in_flight = [_decoded(each, start, stop) for each in sent]
        codec.encode_difference(base[start:stop], local, payload, local, in_flight=in_flight, start=start, numel=numel)
        found.update(bytes_of(local))
        squares += sum_of_products(local, local)
    return Measured(found.text(), sqrt(squares))


def _rebase_plain(pieces: Sequence[Tensor], old_base: Tensor, new_base: Tensor, merged: Sequence[Coded]) -> None:
    for start, stop in ranges(old_base.numel(), [each.codec for each in merged]):
        local, own = _gathered(pieces, start, stop), [_decoded(each, start, stop) for each in merged]
        values = rebase(local, old_base[start:stop], new_base[start:stop], own)
        parts = _parts(pieces, start, stop)
        for here, part in zip(parts, torch.split(values, [each.numel() for each in parts]), strict=True):
            here.copy_(part)


def _checked(pieces: Sequence[Tensor], base: Tensor, held: Sequence[Coded]) -> int:
    """Assert what the kernels cannot see; returns how many values there are."""
    for each in (*pieces, base):
        check_values(each)
    numel = base.numel()
    assert sum(each.numel() for each in pieces) == numel, ([each.numel() for each in pieces], numel)
    for coded in held:
        assert coded.codec.plain is coded.codec, coded.codec.name
        assert (coded.numel, len(coded.payload)) == (numel, coded.codec.payload_bytes(numel))
    return numel


def _layouts(held: Sequence[Coded]) -> Iterator[Layout | None]:
    return (each.codec.layout for each in held)


def pieces_of(pieces: Sequence[Tensor]) -> Pieces:
    """The memory of flat tensors, as the kernels take it."""
    ends = list(accumulate(each.numel() for each in pieces))
    return Pieces(pointers(pieces), (c_int64 * max(1, len(ends)))(*ends), len(ends))


def _check(status: Status, held: Sequence[Coded]) -> None:
    """What a site holds of its own updates was made by its own codecs."""
    for each in held:
        assert each.codec.layout is not None
        refuse(status, f"an update in flight: {each.codec.name}", each.codec.layout)
    assert status is Status.DONE, status


def _parts(pieces: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
    """What lies between ``start`` and ``stop``, where it lies."""
    found, at = [], 0
    for each in pieces:
        first, last = max(start - at, 0), min(stop - at, each.numel())
        if first < last:
            found.append(each[first:last])
        at += each.numel()
    return found


def _gathered(pieces: Sequence[Tensor], start: int, stop: int) -> Tensor:
    """A copy of that."""
    return torch.cat(_parts(pieces, start, stop))


def _decoded(held: Coded, start: int, stop: int) -> Tensor:
    values = torch.empty(stop - start)
    held.codec.decode_into(held.payload, held.numel, values, start)
    return values
