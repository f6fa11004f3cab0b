from __future__ import annotations

from pathlib import Path

import pytest

from diloco.durable import PLAIN_DISK, Step
from diloco.inner.checkpoint import CheckpointError, digest_of_file, read_sealed, write_sealed


def test_what_is_sealed_comes_back_and_any_change_is_seen(tmp_path: Path) -> None:
    file, told = tmp_path / "a.json", {"step": 3, "names": ["a"], "none": None, "share": 0.1 + 0.2}
    write_sealed(file, told, PLAIN_DISK, Step.CHECKPOINT_FILE)
    assert read_sealed(file) == told
    assert len(digest_of_file(file)) == 64
    file.write_text(file.read_text().replace("3", "4", 1))
    with pytest.raises(CheckpointError, match=r"a\.json is damaged: its own sha256 does not match"):
        read_sealed(file)
    file.write_text("[]")
    with pytest.raises(CheckpointError, match=r"a\.json cannot be read"):
        read_sealed(file)


def test_a_number_that_json_has_no_word_for_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Out of range"):
        write_sealed(tmp_path / "a.json", {"x": float("nan")}, PLAIN_DISK, Step.CHECKPOINT_FILE)
