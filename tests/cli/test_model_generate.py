"""``diloco generate``: the text, and what it says of nonsense."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from diloco.cli.main import main
from diloco.cli.model import texts
from diloco.inner.evaluate import SamplingOptions, generate
from diloco.inner.tokenizer import make_tokenizer
from diloco.models.read import take
from tests.models.pasts import Hand, configured, with_a_past


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_a_past(tmp_path_factory.mktemp("generated"))


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())


def wanted(run: Path, prompt: bytes, version: int | None = None, **options: float) -> str:
    """The text by the parts that the verb is made of."""
    tokens = list(generate(take(str(run), version=version).model(), list(prompt), SamplingOptions(**options), 256))  # type: ignore[arg-type]
    return prompt.decode() + make_tokenizer("bytes").decode(tokens) + "\n"


@pytest.mark.slow
def test_it_goes_on_with_the_prompt(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(run), "x=1 the sites", "--tokens", "30", "--seed", "4", "--top-k", "3"]) == 0
    assert capsys.readouterr().out == wanted(run, b"x=1 the sites", tokens=30, seed=4, top_k=3)
    asked = ["generate", str(run), "--version", "2", "--tokens", "9", "--temperature", "0", "x=1 the sites"]
    assert main(asked) == 0
    assert capsys.readouterr().out == wanted(run, b"x=1 the sites", 2, tokens=9, temperature=0)


def test_without_a_prompt_a_text_begins(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(run), ""]) == 0
    assert len(capsys.readouterr().out) > 1
    assert main(["generate", str(run), "data.end_of_file=false", "model.vocab_size=257", ""]) == 2
    assert "prompt is '': at least one token" in capsys.readouterr().err


def test_a_running_syncer_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hand = Hand(configured(tmp_path))
    try:
        assert main(["generate", "--syncer", hand.address, "--tokens", "3", "a"]) == 0
    finally:
        hand.stop()
    assert capsys.readouterr().out == wanted(tmp_path / "past", b"a", tokens=3)


def test_letters_come_whole_and_nothing_is_held_for_ever() -> None:
    tokenizer = make_tokenizer("bytes")
    whole = "é日\U0001f600x"
    assert list(texts(whole.encode(), tokenizer)) == list(whole)
    assert list(texts(whole.encode()[:-2], tokenizer)) == ["é", "日", "�"]
    assert "".join(texts(b"\xff" * 9 + b"end", tokenizer)) == "�" * 9 + "end"
    bpe = make_tokenizer("bpe1024")
    ids = [int(token) for token in bpe.encode_batch(["def f(x):\n    return é + x\n"])[0]]
    parts = list(texts(iter(ids), bpe))
    assert "".join(parts) == "def f(x):\n    return é + x\n"
    assert len(parts) >= len(ids) - 1


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("give a run, a checkpoint or a model's folder, a prompt", []),
        ("give a run, a checkpoint or a model's folder, a prompt", ["RUN"]),
        ("give a run, a checkpoint or a model's folder, a prompt", ["RUN", "def", "f"]),
        ("give a syncer's HOST:PORT and a prompt", ["--syncer", "127.0.0.1:1"]),
        ("--tokens is 0: at least 1", ["RUN", "a", "--tokens", "0"]),
        ("--temperature is -1.0", ["RUN", "a", "--temperature", "-1"]),
        ("--top-k is -1", ["RUN", "a", "--top-k", "-1"]),
        ("--seed is -1", ["RUN", "a", "--seed", "-1"]),
        ("invalid int value: 'x'", ["RUN", "a", "--seed", "x"]),
        ("--version is 'old'", ["RUN", "a", "--version", "old"]),
        ("'nowhere' is no run folder", ["nowhere", "a"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(
    words: str, arguments: list[str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *(text.replace("RUN", str(run)) for text in arguments)]) == 2
    told = capsys.readouterr()
    assert words in told.err
    assert told.err.count("\n") == 1
