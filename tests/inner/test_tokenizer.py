"""Our tokenizers, and those of the field from a file."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers

from diloco.inner import tokenizer
from diloco.inner.corpus import prepare_corpus
from diloco.inner.data import TokenStream, load_manifest
from diloco.inner.tokenizer import END, make_tokenizer
from tests.inner.conftest import options, write_text

TEXTS = [
    "",
    "def f(x):\n\treturn x  # héllo\r\n",
    f"日本語 \x00 \U0001f600 {END} <s>",
    "    " * 9 + "end",
]


@pytest.mark.parametrize(("name", "size", "without"), [("bytes", 257, 256), ("bpe1024", 1024, 1024)])
def test_text_comes_back_exactly_and_the_last_id_is_the_end_if_there_is_one(name: str, size: int, without: int) -> None:
    made, endless = make_tokenizer(name), make_tokenizer(name, False)
    assert (made.vocab_size, made.end_of_file) == (size, size - 1)
    assert (endless.vocab_size, endless.end_of_file) == (without, None)
    draw = random.Random(11)
    noise = ["".join(chr(draw.choice([draw.randrange(32, 127), draw.randrange(0x3000)])) for _ in range(200))]
    for text, ids in zip(TEXTS + noise, made.encode_batch(TEXTS + noise), strict=True):
        assert ids.dtype == np.uint16
        assert made.end_of_file not in ids.tolist()
        assert made.decode([*ids.tolist(), made.end_of_file or 0]) == text, "seed 11"


def test_the_shipped_merges_shorten_python_sources() -> None:
    source = "def handle(self, event: Event) -> None:\n    return self.value\n" * 20
    (ids,) = make_tokenizer("bpe1024").encode_batch([source])
    assert len(source) / len(ids) > 2.2
    assert int(ids.max()) < 1023


def file_of(folder: Path, name: str = "bpe1024", **beside: object) -> str:
    path = folder / "tokenizer.json"
    path.write_text(make_tokenizer(name).field_form().to_str())
    for file, told in beside.items():
        (folder / f"{file}.json").write_text(json.dumps(told))
    return str(path)


@pytest.mark.parametrize("name", ["bytes", "bpe1024"])
def test_the_fields_form_gives_the_same_ids(name: str, tmp_path: Path) -> None:
    ours = make_tokenizer(name)
    theirs = make_tokenizer(file_of(tmp_path, name, tokenizer_config={"eos_token": END}))
    assert (theirs.vocab_size, theirs.end_of_file) == (ours.vocab_size, ours.end_of_file)
    for text, one, other in zip(TEXTS, ours.encode_batch(TEXTS), theirs.encode_batch(TEXTS), strict=True):
        assert other.dtype == np.uint16
        assert one.tolist() == other.tolist(), "what the text spells is text, also where it spells the end"
        assert theirs.decode([*other.tolist(), ours.end_of_file or 0]) == text
    again = theirs.field_form().encode(TEXTS[1], add_special_tokens=False)
    assert again.ids == ours.encode_batch([TEXTS[1]])[0].tolist()


def with_beginnings_marked(folder: Path) -> str:
    """A tokenizer that has no place to cut: each text that it is given begins with a mark."""
    vocab = {letter: number for number, letter in enumerate("\u2581 ab\n.")}
    own = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    own.normalizer = tokenizers.normalizers.Prepend("\u2581")
    own.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


@pytest.mark.parametrize("cut", ["\n", " "])
@pytest.mark.parametrize("marked", [False, True])
def test_a_long_text_is_encoded_by_pieces_into_the_same_ids(
    cut: str, marked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_tokenizer(with_beginnings_marked(tmp_path) if marked else "bpe1024", not marked)
    texts = [cut.join(["ab.", "a b", "  a\n\n b", "b.a"] * 40), "a" * 500, "a"]
    whole = [ids.tolist() for ids in made.encode_batch(texts)]
    encoded: list[int] = []

    def noted(batch: list[str], **_: object) -> list[tokenizers.Encoding]:
        encoded.extend(map(len, batch))
        return own.encode_batch_fast(batch, add_special_tokens=False)

    own = made._own
    made._own = SimpleNamespace(encode_batch_fast=noted)  # type: ignore[assignment]
    monkeypatch.setattr(tokenizer, "PIECE_CHARACTERS", 100)
    monkeypatch.setattr(tokenizer, "WINDOW_CHARACTERS", 20)
    assert [ids.tolist() for ids in made.encode_batch(texts)] == whole
    longest = max(encoded[: encoded.index(500)])
    assert longest == len(texts[0]) if marked else longest < 130, encoded


@pytest.mark.parametrize(
    "beside",
    [
        {"tokenizer_config": {"eos_token": END}},
        {"tokenizer_config": {"eos_token": {"content": END, "lstrip": False}}},
        {"config": {"eos_token_id": 1023}},
        {"tokenizer_config": {}, "generation_config": {"eos_token_id": [1023, 4]}},
    ],
)
def test_the_end_is_what_the_files_beside_say(beside: dict[str, object], tmp_path: Path) -> None:
    path = file_of(tmp_path, **beside)
    assert make_tokenizer(path).end_of_file == 1023
    assert make_tokenizer(path, False).end_of_file is None


def test_an_end_of_a_file_with_a_text_of_its_own_gets_no_other(tmp_path: Path) -> None:
    made = make_tokenizer(file_of(tmp_path, config={"eos_token_id": 5}))
    assert (made.end_of_file, made.field_form().get_vocab_size()) == (5, made.vocab_size)


def test_the_name_is_that_of_the_content_and_text_is_prepared_with_it(tmp_path: Path) -> None:
    for folder in ("here", "there", "other"):
        (tmp_path / folder).mkdir()
    one, same = (make_tokenizer(file_of(tmp_path / folder), False) for folder in ("here", "there"))
    other = make_tokenizer(file_of(tmp_path / "other", "bytes"), False)
    assert one.name == same.name != other.name
    path = file_of(tmp_path / "here", config={"eos_token_id": 1023})
    assert one.digest != make_tokenizer(path).digest
    text, cache = write_text(tmp_path / "text", 4), tmp_path / "cache"
    theirs, ours = (prepare_corpus(options(text, tokenizer=each), cache) for each in (path, "bpe1024"))
    assert theirs.directory != ours.directory
    assert [shard.sha256 for shard in theirs.train.shards] == [shard.sha256 for shard in ours.train.shards]


def test_more_ids_than_16_bits_hold_are_kept_in_32(tmp_path: Path) -> None:
    words = {f"w{number}": number for number in range(70_000)}
    many = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    many.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    many.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text").mkdir()
    for number in range(4):
        (tmp_path / f"text/{number}").write_text(" ".join(f"w{69_000 + number * 200 + word}" for word in range(150)))
    wanted = options(tmp_path / "text", tokenizer=str(tmp_path / "tokenizer.json"), end_of_file=False)
    manifest = prepare_corpus(wanted, tmp_path / "cache")
    assert load_manifest(manifest.directory) == manifest
    assert (manifest.directory / manifest.train.shards[0].file).stat().st_size == 4 * manifest.train.tokens
    inputs, _ = TokenStream(manifest, "train", 20, 4).batch(0)
    assert int(inputs.min()) >= 69_000
    assert int(inputs.max()) > 1 << 16


def test_what_is_wrong_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file_of(tmp_path)

    def refuses(words: str, end: bool = False, name: str = path) -> None:
        with pytest.raises(ValueError, match=words):
            make_tokenizer(name, end)

    refuses("tokenizer is 'gpt2': one of bytes, bpe1024, or the path of a tokenizer.json", name="gpt2")
    refuses(r"tokenizer is 'nowhere\.json': No such file", name="nowhere.json")
    refuses(r"end_of_file is True: no file beside .* names the token that ends a text", end=True)
    (tmp_path / "config.json").write_text('{"eos_token_id": -1}')
    refuses(r"end_of_file is True: no file beside .* names the token that ends a text", end=True)
    (tmp_path / "tokenizer_config.json").write_text("{")
    refuses(r"tokenizer_config\.json beside it is not JSON", end=True)
    (tmp_path / "tokenizer_config.json").unlink()
    monkeypatch.setattr(tokenizer, "VOCAB_SIZE_MAX", 1024)
    assert make_tokenizer(path, False).vocab_size == 1024
    monkeypatch.setattr(tokenizer, "VOCAB_SIZE_MAX", 1000)
    refuses("1024 ids, at most 1000")
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    refuses(r"not a tokenizer\.json")
    monkeypatch.setattr(tokenizer, "FILE_BYTES_MAX", 3)
    refuses("12 bytes, at most 3")
