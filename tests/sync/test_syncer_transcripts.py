"""The stories in ``transcripts/syncer``; ``--rewrite`` writes down what the machine does, to be read and committed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sync.stories import tell

STORIES = sorted((Path(__file__).parent / "transcripts" / "syncer").glob("*.txt"))


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_story(path: Path, request: pytest.FixtureRequest) -> None:
    text = path.read_text("utf-8")
    told = tell(text)
    if request.config.getoption("--rewrite"):
        path.write_text(told, "utf-8")
    else:
        assert told == text, (
            f"{path.name} tells another story now; if it is right: pytest {Path(__file__).name} --rewrite"
        )
