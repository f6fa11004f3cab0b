"""Text from a model, token by token, with the keys and values of what was read kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from diloco.inner.checks import require
from diloco.inner.kernels import rotate

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from diloco.inner.model import Attention, Transformer


@dataclass(kw_only=True, slots=True)
class SamplingOptions:
    """How the next token is drawn.  A value that cannot work raises ``ValueError`` with field and value."""

    tokens: int = 100
    """Tokens to make, fewer where the text ends by itself."""
    temperature: float = 0.8
    """What logits are divided by; 0: always the likeliest token."""
    top_k: int = 0
    """How many of the likeliest tokens are drawn from; 0: all."""
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.tokens >= 1, "tokens", self.tokens, "at least 1")
        require(0 <= self.temperature < float("inf"), "temperature", self.temperature, "0 or more")
        require(self.top_k >= 0, "top_k", self.top_k, "0 (all) or more")
        require(0 <= self.seed < 1 << 63, "seed", self.seed, "0 or more")


class Reader:
    """What a model has read, at most its context: one more token costs one position, not all of them again."""

    def __init__(self, model: Transformer) -> None:
        options = model.options
        shape = (1, options.kv_heads_used, options.context, options.head_dim)
        like = model.embedding.weight
        self._model = model
        self._kept = [(like.new_zeros(shape), like.new_zeros(shape)) for _ in model.blocks]
        self.length = 0

    @property
    def room(self) -> int:
        """How many more tokens it can read."""
        return self._model.options.context - self.length

    def forget(self) -> None:
        """Begin anew at the first position."""
        self.length = 0

    @torch.no_grad()
    def read(self, tokens: Sequence[int]) -> Tensor:
        """Read ``tokens``, at least one and at most as many as there is room for; the logits [vocab] after the last."""
        require(1 <= len(tokens) <= self.room, "tokens", len(tokens), f"from 1 to the room of {self.room}")
        model, begin = self._model, self.length
        end = begin + len(tokens)
        x = model.embedding(torch.tensor([list(tokens)], device=model.cosines.device))
        cosines, sines = model.cosines[begin:end], model.sines[begin:end]
        for block, kept in zip(model.blocks, self._kept, strict=True):
            x = x + self._attend(block.attention, block.attention_norm(x), kept, cosines, sines)  # type: ignore[arg-type, operator]
            x = x + block.feed_forward(block.feed_forward_norm(x))  # type: ignore[operator]
        self.length = end
        logits: Tensor = model.head(model.norm(x[0, -1]))
        return logits

    def _attend(
        self, attention: Attention, x: Tensor, kept: tuple[Tensor, Tensor], cosines: Tensor, sines: Tensor
    ) -> Tensor:
        """What ``attention`` makes of ``x`` [1, T, dim] behind what was read before."""
        begin, end = self.length, self.length + x.shape[1]
        query, key, value = (
            part.view(1, end - begin, -1, attention.head_dim).transpose(1, 2)
            for part in (attention.query(x), attention.key(x), attention.value(x))
        )
        kept[0][:, :, begin:end] = rotate(key, cosines, sines)
        kept[1][:, :, begin:end] = value
        keys, values = kept[0][:, :, :end], kept[1][:, :, :end]
        seen = torch.ones(end - begin, end, dtype=torch.bool, device=x.device).tril(begin)
        mixed = functional.scaled_dot_product_attention(
            rotate(query, cosines, sines), keys, values, attn_mask=seen, enable_gqa=keys.shape[1] != query.shape[1]
        )
        projected: Tensor = attention.output(mixed.transpose(1, 2).reshape(1, end - begin, -1))
        return projected


def generate(
    model: Transformer, prompt: Sequence[int], options: SamplingOptions, end_of_file: int | None = None
) -> Iterator[int]:
    """Tokens that go on behind ``prompt``, one at a time; ends before ``end_of_file``.

    What does not fit the model's context is forgotten from its beginning: when that is full, half of it is read again.
    ValueError for a prompt without a token, or with one that the model does not have.
    """
    vocab_size, half = model.options.vocab_size, max(1, model.options.context // 2)
    require(len(prompt) > 0, "prompt", "", "at least one token to begin with")
    require(max(prompt) < vocab_size, "prompt", max(prompt), f"tokens below the model's {vocab_size}")
    generator = torch.Generator().manual_seed(options.seed)
    reader, text = Reader(model), list(prompt)
    logits = reader.read(text if len(text) <= reader.room else text[-half:])
    for made in range(1, options.tokens + 1):
        token = draw(logits, options, generator)
        if token == end_of_file:
            return
        yield token
        text.append(token)
        if made == options.tokens:
            return
        if reader.room:
            logits = reader.read([token])
        else:
            reader.forget()
            logits = reader.read(text[-half:])


def draw(logits: Tensor, options: SamplingOptions, generator: torch.Generator) -> int:
    """The next token by ``logits`` [vocab], computed in fp64 on the CPU, so that a seed means one text."""
    values = logits.detach().to("cpu", torch.float64)
    if options.temperature == 0:
        return int(values.argmax())
    values = values / options.temperature
    if 0 < options.top_k < len(values):
        least = values.topk(options.top_k).values[-1]
        values = values.masked_fill(values < least, -torch.inf)
    chances = torch.softmax(values, dim=0)
    return int(torch.multinomial(chances, 1, generator=generator))
