from __future__ import annotations

import random

import numpy as np
import pytest

from diloco.inner.tokenizer import make_tokenizer, train_bpe1024

TEXTS = ["", "def f(x):\n\treturn x  # héllo\r\n", "日本語 \x00 \U0001f600 <|endoffile|> <s>", "    " * 9 + "end"]


@pytest.mark.parametrize("name", ["bytes", "bpe1024"])
def test_text_comes_back_exactly(name: str) -> None:
    tokenizer = make_tokenizer(name)
    draw = random.Random(11)
    noise = ["".join(chr(draw.choice([draw.randrange(32, 127), draw.randrange(0x3000)])) for _ in range(200))]
    for text, ids in zip(TEXTS + noise, tokenizer.encode_batch(TEXTS + noise), strict=True):
        assert ids.dtype == np.uint16
        assert tokenizer.end_of_file not in ids.tolist()
        assert tokenizer.decode([*ids.tolist(), tokenizer.end_of_file or 0]) == text, "seed 11"


def test_sizes_and_ends_of_files() -> None:
    with_end, without = make_tokenizer("bytes", True), make_tokenizer("bytes", False)
    assert (with_end.vocab_size, with_end.end_of_file) == (257, 256)
    assert (without.vocab_size, without.end_of_file) == (256, None)
    bpe = make_tokenizer("bpe1024")
    assert (bpe.vocab_size, bpe.end_of_file) == (1024, 1023)
    assert make_tokenizer("bpe1024", False).end_of_file is None


def test_the_shipped_merges_shorten_python_sources() -> None:
    source = "def handle(self, event: Event) -> None:\n    return self.value\n" * 20
    (ids,) = make_tokenizer("bpe1024").encode_batch([source])
    assert len(source) / len(ids) > 2.2
    assert int(ids.max()) < 1023


def test_training_gives_the_same_merges_twice_and_leaves_an_id_free() -> None:
    texts = [f"value_{number} = compute(number, {number})\n" * 5 for number in range(300)]
    first = train_bpe1024(texts)
    assert first == train_bpe1024(texts)
    assert '"vocab"' in first


def test_an_unknown_tokenizer_is_named() -> None:
    with pytest.raises(ValueError, match="tokenizer is 'gpt2'"):
        make_tokenizer("gpt2")
