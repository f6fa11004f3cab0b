from __future__ import annotations

import math

import pytest

from diloco.inner.data import CorpusManifest, validation_batches
from diloco.inner.evaluate import bits_per_byte, evaluate
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
