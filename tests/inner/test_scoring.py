"""Likelihoods of one text behind another, beside the formula written out."""

from __future__ import annotations

import random

import pytest
import torch

from diloco.inner import evaluate
from diloco.inner.evaluate import Likelihood, Pair, likelihoods
from diloco.inner.model import ModelOptions, Transformer

CONTEXT = 16


@pytest.fixture
def model() -> Transformer:
    return Transformer(ModelOptions(vocab_size=40, layers=2, dim=16, heads=2, kv_heads=1, context=CONTEXT), seed=3)


def scored(model: Transformer, pairs: list[Pair], batch: int = 4) -> list[Likelihood]:
    found = dict(likelihoods(model, pairs, batch=batch, precision="fp32"))
    return [found[place] for place in range(len(pairs))]


@torch.no_grad()
def plain(model: Transformer, before: list[int], behind: list[int]) -> tuple[float, bool]:
    """One token after the other, each from all that is before it."""
    nats, likeliest = 0.0, True
    for place, token in enumerate(behind):
        chances = torch.log_softmax(model(torch.tensor([[*before, *behind[:place]]]))[0, -1].double(), dim=0)
        nats += float(chances[token])
        likeliest &= int(chances.argmax()) == token
    return nats, likeliest


def some(draw: random.Random, most: int) -> list[int]:
    return [draw.randrange(40) for _ in range(draw.randint(1, most))]


def test_it_is_the_sum_of_each_tokens_own_whatever_it_is_read_with(model: Transformer) -> None:
    draw = random.Random(5)
    pairs = [(some(draw, 9), some(draw, 7)) for _ in range(11)]
    for batch in (1, 4, 64):
        for found, pair in zip(scored(model, pairs, batch), pairs, strict=True):
            nats, likeliest = plain(model, *pair)
            assert found.nats == pytest.approx(nats, abs=1e-4)
            assert found.is_likeliest == likeliest


def test_no_more_logits_exist_than_may(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(5)
    pairs = [(some(draw, 9), some(draw, 7)) for _ in range(11)]
    sizes: list[int] = []
    model.register_forward_hook(lambda module, told, logits: sizes.append(logits.numel()))
    whole = scored(model, pairs, 11)
    assert sizes == [11 * max(len(before) + len(behind) - 1 for before, behind in pairs) * 40]
    most = 2 * CONTEXT * 40
    monkeypatch.setattr(evaluate, "LOGITS_MAX", most)
    assert [each.nats for each in scored(model, pairs, 11)] == pytest.approx([each.nats for each in whole], abs=1e-4)
    assert max(sizes[1:]) <= most
    monkeypatch.setattr(evaluate, "LOGITS_MAX", 1)
    sizes.clear()
    scored(model, pairs, 11)
    assert len(sizes) == 11, "one at a time, however long"


@torch.no_grad()
def test_the_likeliest_text_is_known_as_such(model: Transformer) -> None:
    text = [7]
    for _ in range(5):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    other = [*text[:-1], (text[-1] + 1) % 40]
    found = scored(model, [([7], text[1:]), ([7], other[1:])])
    assert [each.is_likeliest for each in found] == [True, False]
    assert found[0].nats > found[1].nats


def test_what_does_not_fit_is_forgotten_from_the_beginning(model: Transformer) -> None:
    draw = random.Random(6)
    before, behind = [draw.randrange(40) for _ in range(30)], [1, 2, 3]
    long, kept, whole = scored(model, [(before, behind), (before[-CONTEXT - 1 + 3 :], behind), ([5], before[:CONTEXT])])
    assert long.nats == pytest.approx(kept.nats, abs=1e-5)
    assert whole.nats == pytest.approx(plain(model, [5], before[:CONTEXT])[0], abs=1e-4)


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (([], [1]), "at least one token to begin with"),
        (([1], []), "tokens behind it is 0: from 1 to the context of 16"),
        (([1], [1] * 17), "tokens behind it is 17: from 1 to the context of 16"),
        (([1], [40]), "token is 40: below the model's 40"),
    ],
)
def test_what_cannot_be_scored_is_named(model: Transformer, pair: Pair, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        scored(model, [pair])
