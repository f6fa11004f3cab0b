from __future__ import annotations

from pathlib import Path

import pytest

from tests.hunts.rank_kills import RankKills


@pytest.mark.parametrize(
    ("parallel", "memory"),
    [
        pytest.param("ddp", 0, marks=pytest.mark.hunt),
        pytest.param("fsdp", 0, marks=pytest.mark.slow),
        pytest.param("fsdp", 3, marks=pytest.mark.hunt),
    ],
)
def test_a_site_comes_back_when_one_of_its_ranks_is_killed(parallel: str, memory: int, tmp_path: Path) -> None:
    found = RankKills(tmp_path, 1, 2, parallel, memory).run()
    assert sum(found["killed"]) == 2  # type: ignore[call-overload]
