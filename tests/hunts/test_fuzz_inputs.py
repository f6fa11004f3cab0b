"""A share of the hunt in every run, and the proof that it can find something."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diloco.codec.entropy import EntropyCodec
from diloco.sync import journal
from tests.hunts.fuzz_inputs import main, readers, run_piece

pytestmark = pytest.mark.slow  # What a hunt is worth is tried where the hunts run, in .ci/run.


def test_a_share_of_the_hunt(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the thirty thousand that .ci/run takes."""
    assert main(["--n", "1000", "--seed", "9000", "--jobs", "1"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["hunt"], found["inputs"], found["violations"]) == ("fuzz_inputs", 1000, 0)
    assert found["taken"] > 50, "nothing gets through"
    assert found["refused"] > 500, "nothing is refused"


def test_every_reader_takes_what_is_good(tmp_path: Path) -> None:
    for name, reader in readers(tmp_path).items():
        for raw in reader.samples:
            try:
                reader.read(raw)
            except reader.words as error:
                raise AssertionError(f"{name} refuses what it wrote: {error}") from error


def test_a_chain_that_is_not_followed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(before: bytes, body: bytes) -> bytes:
        return bytes(32)

    monkeypatch.setattr(journal, "chain_after", forgetful)
    assert any("nobody wrote" in failure for failure in run_piece(1, 1500).failures)


def test_a_frame_that_lies_about_its_size_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def trusting(self: EntropyCodec, frame: memoryview, expected: int) -> bytes:
        import zstandard

        return zstandard.ZstdDecompressor().decompress(frame, max_output_size=expected)

    monkeypatch.setattr(EntropyCodec, "_decompress", trusting)
    failures = run_piece(3, 1000).failures
    assert any("zstd" in failure.lower() or "MemoryError" in failure for failure in failures), failures


def test_a_value_that_is_not_finite_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.codec.base.kernels", lambda *granules: None)  # They look for themselves.
    monkeypatch.setattr("diloco.codec.blocks.is_finite", lambda values: True)
    assert any("not finite" in failure for failure in run_piece(3, 1000).failures)
