from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch

from diloco.inner import evaluate as evaluation
from diloco.inner.data import CorpusManifest, validation_batches
from diloco.inner.evaluate import (
    Likelihood,
    Pair,
    Reader,
    SamplingOptions,
    draw,
    evaluate,
    generate,
    likelihoods,
)
from diloco.inner.model import ModelOptions, Transformer

VOCABULARY, CONTEXT = 50, 24


def small(**other: Any) -> Transformer:
    shape: dict[str, Any] = {"vocab_size": VOCABULARY, "layers": 2, "dim": 16, "heads": 4, "context": CONTEXT}
    model = Transformer(ModelOptions(**{**shape, **other}), seed=2)
    with torch.no_grad():
        model.head.weight.mul_(20)  # Far from equal chances.
    return model


def test_evaluation_leaves_the_model_as_it_was(manifest: CorpusManifest) -> None:
    model = Transformer(ModelOptions(vocab_size=257, layers=1, dim=16, heads=2, context=16))
    model.train()
    batches = list(validation_batches(manifest, 16, 4, 2))
    both = evaluate(model, batches, precision="fp32")
    apart = [evaluate(model, [batch], precision="fp32") for batch in batches]
    assert both == pytest.approx(sum(apart) / 2)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(ValueError, match="batches is 0"):
        evaluate(model, [], "fp32")


@pytest.mark.parametrize("kv_heads", [0, 2])
def test_what_is_kept_gives_the_logits_of_reading_all(kv_heads: int) -> None:
    model = small(kv_heads=kv_heads)
    tokens = torch.randint(0, 50, (24,), generator=torch.Generator().manual_seed(1)).tolist()
    reader, at = Reader(model), 0
    for size in (4, 4, 1, 10, 5):  # Also as many as there are heads.
        logits = reader.read(tokens[at : at + size])
        at += size
        with torch.no_grad():
            whole = model(torch.tensor([tokens[:at]]))[0, -1]
        torch.testing.assert_close(logits, whole, atol=1e-5, rtol=1e-5)  # fp32, summed in another order.
    assert reader.room == 0
    reader.length = 0
    assert reader.room == 24


def one_by_one(model: Transformer, prompt: list[int], count: int) -> list[int]:
    """The likeliest tokens, everything read again each time; the later half of the context from where it is full."""
    begin, text = 0, list(prompt)
    for _ in range(count):
        if len(text) - begin > model.options.context:
            begin = len(text) - model.options.context // 2
        with torch.no_grad():
            text.append(int(model(torch.tensor([text[begin:]]))[0, -1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("prompt", [[3], list(range(20)), list(range(24)), list(range(40))])
def test_the_text_is_that_of_a_model_that_reads_everything_again(prompt: list[int]) -> None:
    model = small()
    likeliest = SamplingOptions(tokens=60, temperature=0.0)
    assert list(generate(model, prompt, likeliest)) == one_by_one(model, prompt, 60)


def test_a_seed_means_one_text_and_another_another_and_it_ends_where_the_text_does() -> None:
    model = small()
    texts = [list(generate(model, [1, 2], SamplingOptions(tokens=20, seed=seed))) for seed in (0, 0, 1, 2)]
    assert texts[0] == texts[1]
    assert all(one != other for one, other in pairwise(texts[1:]))
    end = texts[3][7]
    assert list(generate(model, [1, 2], SamplingOptions(tokens=20, seed=2), end)) == texts[3][: texts[3].index(end)]


def test_tokens_are_drawn_by_their_chances() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    generator = torch.Generator().manual_seed(3)

    def shares(**options: Any) -> list[float]:
        counts = torch.bincount(
            torch.tensor([draw(logits, SamplingOptions(**options), generator) for _ in range(3000)]), minlength=4
        )
        return [float(count) / 3000 for count in counts]

    assert shares(temperature=1.0) == pytest.approx(torch.softmax(logits, 0).tolist(), abs=0.04)
    assert shares(temperature=0.5) == pytest.approx(torch.softmax(logits * 2, 0).tolist(), abs=0.04)
    two = shares(temperature=1.0, top_k=2)
    assert two[0] == two[3] == 0
    assert two[2] == pytest.approx(float(torch.sigmoid(torch.tensor(1.0))), abs=0.04)
    assert shares(temperature=0.0) == [0, 0, 1, 0]


def test_a_prompt_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt is 50: tokens below the model's 50"):
        list(generate(small(), [1, 50], SamplingOptions()))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_whose_training_diverged_gives_no_text(temperature: float) -> None:
    model = small()
    with torch.no_grad():
        next(model.parameters())[3] = torch.nan
    with pytest.raises(ValueError, match="logits are not finite"):
        list(generate(model, [3], SamplingOptions(temperature=temperature)))


# --- Likelihoods of one text behind another, beside the formula written out -------------------------------------------


def scored(model: Transformer, pairs: list[Pair], batch: int = 4) -> list[Likelihood]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "BATCH", batch)
        return likelihoods(model, pairs, "fp32")


@torch.no_grad()
def plain(model: Transformer, before: list[int], behind: list[int]) -> tuple[float, bool]:
    """One token after the other, each from all that is before it."""
    nats, likeliest = 0.0, True
    for place, token in enumerate(behind):
        chances = torch.log_softmax(model(torch.tensor([[*before, *behind[:place]]]))[0, -1].double(), dim=0)
        nats += float(chances[token])
        likeliest &= int(chances.argmax()) == token
    return nats, likeliest


def pairs() -> list[Pair]:
    draw = random.Random(5)
    return [
        tuple([draw.randrange(VOCABULARY) for _ in range(draw.randint(1, most))] for most in (9, 7))  # type: ignore
        for _ in range(11)
    ]


@pytest.mark.parametrize("batch", [1, 4, 64])
def test_it_is_the_sum_of_each_tokens_own_whatever_it_is_read_with(batch: int) -> None:
    model = small(kv_heads=1)
    likeliest = one_by_one(model, [7], 5)
    long = list(range(20, 50))
    tried = [*pairs(), ([7], likeliest), ([5], long[:CONTEXT])]
    found = scored(model, [*tried, (long, [1, 2, 3]), (long[-CONTEXT - 1 + 3 :], [1, 2, 3])], batch)
    for each, pair in zip(found, tried, strict=False):
        nats, is_likeliest = plain(model, *pair)
        assert each.nats == pytest.approx(nats, abs=1e-4)
        assert each.is_likeliest == is_likeliest == (pair[1] is likeliest)
    assert found[-2].nats == pytest.approx(found[-1].nats, abs=1e-5), "what does not fit is forgotten"


def test_no_more_logits_exist_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes = small(), list[int]()
    model.register_forward_hook(lambda module, told, logits: sizes.append(logits.numel()))
    whole = scored(model, pairs(), 11)
    assert sizes == [11 * max(len(before) + len(behind) - 1 for before, behind in pairs()) * VOCABULARY]
    most = 2 * CONTEXT * VOCABULARY
    monkeypatch.setattr(evaluation, "LOGITS_MAX", most)
    assert [each.nats for each in scored(model, pairs(), 11)] == pytest.approx([each.nats for each in whole], abs=1e-4)
    assert max(sizes[1:]) <= most
    monkeypatch.setattr(evaluation, "LOGITS_MAX", 1)
    sizes.clear()
    scored(model, pairs(), 11)
    assert len(sizes) == 11, "one at a time, however long"


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (([], [1]), "at least one token to begin with"),
        (([1], []), "tokens behind it is 0: from 1 to the context of 24"),
        (([1], [1] * 25), "tokens behind it is 25: from 1 to the context of 24"),
        (([1], [50]), "token is 50: below the model's 50"),
    ],
)
def test_what_cannot_be_scored_is_named(pair: Pair, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        scored(small(), [pair])
