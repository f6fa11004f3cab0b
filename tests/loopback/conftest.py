from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs.processes import Place, place_in


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A folder with text in which verbs run, whose processes end with the test."""
    with place_in(tmp_path) as made:
        yield made
