"""How likely a model finds a text behind another: what multiple-choice tasks ask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from diloco.inner.checks import require
from diloco.inner.precision import autocast_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from diloco.inner.model import Transformer

LOGITS_MAX = 1 << 28
"""That exist at the same time, unless one text has more: a gigabyte in fp32."""
Pair = tuple[list[int], list[int]]
"""Tokens that are there, and those that are to be found behind them; at least one of each."""


@dataclass(frozen=True, slots=True)
class Likelihood:
    """``nats`` is the logarithm of the second part's chance; ``is_likeliest``: no token of it had a likelier one."""

    nats: float
    is_likeliest: bool


@torch.no_grad()
def likelihoods(
    model: Transformer, pairs: Sequence[Pair], *, batch: int = 16, precision: str = "auto"
) -> Iterator[tuple[int, Likelihood]]:
    """The place and the likelihood of each of ``pairs``, the longest first, at most ``batch`` at once.

    What does not fit the model's context is forgotten from the beginning of the first part.  ValueError names a part
    that cannot be.
    """
    require(batch >= 1, "batch", batch, "at least 1")
    model.eval()
    rows = [_row(model, *pair) for pair in pairs]
    order = sorted(range(len(rows)), key=lambda place: -len(rows[place][0]))
    while order:
        logits_each = len(rows[order[0]][0]) * model.options.vocab_size
        count = max(1, min(batch, LOGITS_MAX // logits_each))
        places, order = order[:count], order[count:]
        yield from zip(places, _read(model, [rows[place] for place in places], precision), strict=True)


def _row(model: Transformer, before: Sequence[int], behind: Sequence[int]) -> Pair:
    """What the model reads, and what it should say at the last places of it."""
    options = model.options
    require(len(before) > 0, "before", "", "at least one token to begin with")
    wanted = f"from 1 to the context of {options.context}"
    require(1 <= len(behind) <= options.context, "tokens behind it", len(behind), wanted)
    highest = max(max(before), max(behind))
    require(highest < options.vocab_size, "token", highest, f"below the model's {options.vocab_size}")
    return [*before, *behind][-options.context - 1 : -1], list(behind)


def _read(model: Transformer, rows: Sequence[Pair], precision: str) -> list[Likelihood]:
    """What follows a text changes nothing before it, so shorter ones are filled up behind their end."""
    device = model.cosines.device
    longest = max(len(inputs) for inputs, _ in rows)
    tokens = torch.tensor([[*inputs, *[0] * (longest - len(inputs))] for inputs, _ in rows], device=device)
    dtype = autocast_dtype(precision, device)
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
        logits = model(tokens)
    found = []
    for row, (inputs, wanted) in zip(logits, rows, strict=True):
        said = functional.log_softmax(row[len(inputs) - len(wanted) : len(inputs)].float(), dim=-1)
        behind = torch.tensor(wanted, device=device)
        nats = float(said.gather(1, behind[:, None]).double().sum())
        found.append(Likelihood(nats, bool((said.argmax(dim=-1) == behind).all())))
    return found
