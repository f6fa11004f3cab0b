"""The loss of a model on text that it does not train on."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import torch

from diloco.inner.checks import require
from diloco.inner.model import next_token_loss
from diloco.inner.precision import autocast_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor, nn

    from diloco.inner.sharding import Spread


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    precision: str = "auto",
    device: torch.device | None = None,
    together: Spread | None = None,
) -> float:
    """Mean loss of ``model`` over all tokens of ``batches``, nats per token; ValueError without a batch.

    A model that ranks hold in parts needs them ``together``: each takes its share of the batches, and all get the mean.
    """
    where = device or (together.group.device if together else next(model.parameters()).device)
    dtype = autocast_dtype(precision, where)
    was_training = model.training
    model.eval()
    summed, tokens = 0.0, 0
    try:
        for counts, inputs, targets in _mine(list(batches), together):
            with torch.autocast(where.type, dtype=dtype, enabled=dtype is not None):
                loss = _loss(model, inputs.to(where), targets.to(where), together is not None)
            if counts:
                summed += float(loss) * targets.numel()
                tokens += targets.numel()
    finally:
        model.train(was_training)
        if together is not None:
            together.put_away()
    if together is not None:
        summed, all_tokens = together.group.all_reduce_sum([summed, float(tokens)])
        tokens = round(all_tokens)
    require(tokens > 0, "batches", tokens, "at least one batch to evaluate")
    return summed / tokens


def _loss(model: nn.Module, inputs: Tensor, targets: Tensor, in_parts: bool) -> Tensor:
    """Of any model that makes logits of tokens; one that ranks hold in parts makes the loss itself."""
    if in_parts:
        return cast("Tensor", model(inputs, targets))
    return next_token_loss(model(inputs), targets)


def _mine(batches: list[tuple[Tensor, Tensor]], together: Spread | None) -> Iterator[tuple[bool, Tensor, Tensor]]:
    """This rank's share, and whether each counts: all ranks call the model equally often, be it with a batch again."""
    rank, world = (together.data_rank, together.data_world) if together else (0, 1)
    for first in range(0, len(batches), world):
        mine = first + rank
        yield mine < len(batches), *batches[min(mine, len(batches) - 1)]


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """Loss in bits per byte of UTF-8, comparable between tokenizers."""
    return nats_per_token / math.log(2.0) / bytes_per_token
