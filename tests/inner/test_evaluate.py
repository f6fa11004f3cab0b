from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from diloco.inner.data import CorpusManifest, validation_batches
from diloco.inner.evaluate import Reader, SamplingOptions, bits_per_byte, draw, evaluate, generate
from diloco.inner.model import ModelOptions, Transformer


def test_evaluation_leaves_the_model_as_it_was(manifest: CorpusManifest) -> None:
    model = Transformer(ModelOptions(vocab_size=257, layers=1, dim=16, heads=2, context=16))
    model.train()
    batches = validation_batches(manifest, 16, 4, 2)
    both = evaluate(model, batches, precision="fp32")
    apart = [evaluate(model, [batch], precision="fp32") for batch in batches]
    assert both == pytest.approx(sum(apart) / 2)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(ValueError, match="batches is 0"):
        evaluate(model, [])
    assert bits_per_byte(math.log(2.0) * 3.0, 1.5) == pytest.approx(2.0)


def small(**other: Any) -> Transformer:
    shape: dict[str, Any] = {"vocab_size": 50, "layers": 2, "dim": 16, "heads": 4, "context": 24}
    model = Transformer(ModelOptions(**{**shape, **other}), seed=2)
    with torch.no_grad():
        model.head.weight.mul_(20)  # Far from equal chances.
    return model


@pytest.mark.parametrize("kv_heads", [0, 2, 1])
@pytest.mark.parametrize("parts", [[24], [1] * 24, [7, 1, 1, 10, 5]])
def test_what_is_kept_gives_the_logits_of_reading_all(kv_heads: int, parts: list[int]) -> None:
    model = small(kv_heads=kv_heads)
    tokens = torch.randint(0, 50, (24,), generator=torch.Generator().manual_seed(1)).tolist()
    reader, at = Reader(model), 0
    for size in parts:
        logits = reader.read(tokens[at : at + size])
        at += size
        with torch.no_grad():
            whole = model(torch.tensor([tokens[:at]]))[0, -1]
        torch.testing.assert_close(logits, whole, atol=1e-5, rtol=1e-5)  # fp32, summed in another order.
    assert reader.room == 0
    with pytest.raises(ValueError, match="tokens is 1: from 1 to the room of 0"):
        reader.read([1])
    reader.forget()
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


def test_a_seed_means_one_text_and_another_another() -> None:
    model = small()
    texts = [list(generate(model, [1, 2], SamplingOptions(tokens=20, seed=seed))) for seed in (0, 0, 1, 2)]
    assert texts[0] == texts[1]
    assert all(one != other for one, other in pairwise(texts[1:]))


def test_it_ends_where_the_text_does() -> None:
    model = small()
    whole = list(generate(model, [1], SamplingOptions(tokens=30, seed=5)))
    assert len(whole) == 30
    end = whole[7]
    assert list(generate(model, [1], SamplingOptions(tokens=30, seed=5), end)) == whole[: whole.index(end)]


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


@pytest.mark.parametrize(
    ("field", "value"),
    [("tokens", 0), ("temperature", -0.1), ("temperature", float("nan")), ("top_k", -1), ("seed", -1)],
)
def test_options_that_cannot_be_are_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        SamplingOptions(**{field: value})  # type: ignore[arg-type]


def test_a_prompt_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt is '': at least one token"):
        list(generate(small(), [], SamplingOptions()))
    with pytest.raises(ValueError, match="prompt is 50: tokens below the model's 50"):
        list(generate(small(), [1, 50], SamplingOptions()))
