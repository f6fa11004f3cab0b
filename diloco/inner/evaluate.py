"""Using a model: its loss on held-out text, the likelihood of a text, and text generation.

``evaluate`` returns the mean loss, in nats per token.

``likelihoods`` returns the likelihood of a continuation of a text, which multiple-choice tasks need.

``generate`` makes text token by token, with a cache of keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from diloco.inner import require
from diloco.inner.holding import Spread
from diloco.inner.model import rotate
from diloco.inner.parallel import SiteGroup
from diloco.inner.precision import autocast_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

    from diloco.inner.model import Transformer


@torch.no_grad()
def evaluate(
    model: Transformer, batches: Iterable[tuple[Tensor, Tensor]], precision: str, together: Spread | None = None
) -> float:
    """Return the mean loss of ``model`` over all tokens of ``batches``, nats per token; ValueError without a batch.

    With ``together`` (required for a sharded model) it is a collective: ranks share the batches, and all get the mean.
    """
    if together is None:
        here = next(model.parameters()).device
        together = Spread(model, SiteGroup(device=here.type, local_rank=here.index or 0))
    group, where, rank = together.group, together.group.device, together.data_rank
    dtype = autocast_dtype(precision, where, group)
    was_training, left = model.training, iter(batches)
    model.eval()
    summed = tokens = 0.0
    try:
        while shared := list(islice(left, together.data_world)):
            # Repeats of the last batch, which do not count, make the number of calls equal on all ranks.
            inputs, targets = shared[min(rank, len(shared) - 1)]
            with torch.autocast(where.type, dtype=dtype, enabled=dtype is not None):
                loss = model(inputs.to(where), targets.to(where))
            if rank < len(shared):
                summed += float(loss) * targets.numel()
                tokens += targets.numel()
    finally:
        model.train(was_training)
        together.put_away()
    summed, tokens = group.all_reduce_sum([summed, tokens])
    require(tokens > 0, "batches", round(tokens), "at least one batch to evaluate")
    return summed / tokens


BATCH = 16
"""Most texts that are read at once."""
LOGITS_MAX = 1 << 28
"""Most logits that exist at the same time, unless a single text has more: a gigabyte in fp32."""
Pair = tuple[list[int], list[int]]
"""Tokens of a text and of its continuation; at least one of each."""


class Likelihood(NamedTuple):
    """The continuation's log-probability in ``nats``, and whether each of its tokens is the likeliest one there."""

    nats: float
    is_likeliest: bool


@torch.no_grad()
def likelihoods(model: Transformer, pairs: Sequence[Pair], precision: str) -> list[Likelihood]:
    """Return the likelihood of each of ``pairs``.

    Text beyond the model's context is cut off at the beginning of the first part.  ValueError names an invalid part.
    """
    model.eval()
    options, rows = model.options, []
    for before, behind in pairs:
        require(len(before) > 0, "before", "", "at least one token to begin with")
        wanted = f"from 1 to the context of {options.context}"
        require(1 <= len(behind) <= options.context, "tokens behind it", len(behind), wanted)
        highest = max(max(before), max(behind))
        require(highest < options.vocab_size, "token", highest, f"below the model's {options.vocab_size}")
        rows.append(([*before, *behind][-options.context - 1 : -1], list(behind)))
    found: dict[int, Likelihood] = {}
    order = sorted(range(len(rows)), key=lambda place: -len(rows[place][0]))
    while order:
        logits_each = len(rows[order[0]][0]) * options.vocab_size
        count = max(1, min(BATCH, LOGITS_MAX // logits_each))
        places, order = order[:count], order[count:]
        found |= zip(places, _read(model, [rows[place] for place in places], precision), strict=True)
    return [found[place] for place in range(len(rows))]


def _read(model: Transformer, rows: Sequence[Pair], precision: str) -> list[Likelihood]:
    """Compute the likelihoods of ``rows``, each the model's input and the tokens to predict at its last places.

    They are one batch; padding at a row's end does not change what precedes it.
    """
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


@dataclass(kw_only=True, slots=True)
class SamplingOptions:
    """How the next token is drawn.  A value that cannot work raises ``ValueError`` with field and value."""

    tokens: int = 100
    """Most tokens to generate; the text may end before."""
    temperature: float = 0.8
    """Divisor of the logits; 0: always the likeliest token."""
    top_k: int = 0
    """Draw from this many of the likeliest tokens; 0: all."""
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.tokens >= 1, "tokens", self.tokens, "at least 1")
        require(0 <= self.temperature < float("inf"), "temperature", self.temperature, "0 or more")
        require(self.top_k >= 0, "top_k", self.top_k, "0 (all) or more")
        require(0 <= self.seed < 1 << 63, "seed", self.seed, "0 or more")


class Reader:
    """A model with a cache of keys and values, for at most its context: each new token costs one position only."""

    def __init__(self, model: Transformer) -> None:
        options = model.options
        shape = (1, options.kv_heads_used, options.context, options.head_dim)
        like = model.embedding.weight
        self._model = model
        self._kept = [(like.new_zeros(shape), like.new_zeros(shape)) for _ in model.blocks]
        self.length = 0
        """Number of tokens read; 0 starts again at the first position, with an empty cache."""

    @property
    def room(self) -> int:
        """Number of tokens that still fit into the context."""
        return self._model.options.context - self.length

    @torch.no_grad()
    def read(self, tokens: Sequence[int]) -> Tensor:
        """Read ``tokens``, from one to ``room`` of them, and return the logits [vocab] after the last."""
        model, begin = self._model, self.length
        end = begin + len(tokens)
        x = model.embedding(torch.tensor([list(tokens)], device=model.cosines.device))
        cosines, sines = model.cosines[begin:end], model.sines[begin:end]
        seen = torch.ones(len(tokens), end, dtype=torch.bool, device=x.device).tril(begin)
        for block, (keys, values) in zip(model.blocks, self._kept, strict=True):
            query, key, value = block.attention.split(block.attention_norm(x))
            query = rotate(query, cosines, sines)
            keys[:, :, begin:end] = rotate(key, cosines, sines)
            values[:, :, begin:end] = value
            mixed = functional.scaled_dot_product_attention(
                query, keys[:, :, :end], values[:, :, :end], attn_mask=seen, enable_gqa=keys.shape[1] != query.shape[1]
            )
            x = x + block.attention.join(mixed)
            x = x + block.feed_forward(block.feed_forward_norm(x), kernels=model.kernels)
        self.length = end
        logits: Tensor = model.head(model.norm(x[0, -1]))
        return logits


def generate(
    model: Transformer, prompt: Sequence[int], options: SamplingOptions, end_of_file: int | None = None
) -> Iterator[int]:
    """Yield the tokens that continue ``prompt``, one at a time; stop before ``end_of_file``.

    When the model's context is full, or the prompt exceeds it, only the last half context of the text is read (again).
    ValueError for a prompt without a token, or with one that the model does not have.
    """
    vocab_size, half = model.options.vocab_size, max(1, model.options.context // 2)
    require(len(prompt) > 0, "prompt", "", "at least one token to begin with")
    require(max(prompt) < vocab_size, "prompt", max(prompt), f"tokens below the model's {vocab_size}")
    generator = torch.Generator().manual_seed(options.seed)
    reader, text = Reader(model), list(prompt)
    unread = text if len(text) <= reader.room else text[-half:]
    for _ in range(options.tokens):
        token = draw(reader.read(unread), options, generator)
        if token == end_of_file:
            return
        yield token
        text.append(token)
        unread = [token]
        if not reader.room:
            reader.length, unread = 0, text[-half:]


def draw(logits: Tensor, options: SamplingOptions, generator: torch.Generator) -> int:
    """Draw the next token from ``logits`` [vocab], in fp64 on the CPU, so that a seed always gives the same text.

    ValueError where they are not finite.
    """
    values = logits.detach().to("cpu", torch.float64)
    if not values.isfinite().all():
        raise ValueError("the model's logits are not finite: its training diverged, or its file is damaged")
    if options.temperature == 0:
        return int(values.argmax())
    values = values / options.temperature
    if 0 < options.top_k < len(values):
        least = values.topk(options.top_k).values[-1]
        values = values.masked_fill(values < least, -torch.inf)
    chances = torch.softmax(values, dim=0)
    return int(torch.multinomial(chances, 1, generator=generator))
