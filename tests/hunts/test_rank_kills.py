from __future__ import annotations

from pathlib import Path

import pytest

from tests.hunts.rank_kills import RankKills


@pytest.mark.hunt
@pytest.mark.parametrize(("parallel", "memory"), [("ddp", 0), ("fsdp", 0), ("fsdp", 3)])
def test_a_site_comes_back_when_one_of_its_ranks_is_killed(parallel: str, memory: int, tmp_path: Path) -> None:
    found = RankKills(tmp_path, 1, 2, parallel, memory).run()
    assert sum(found["killed"]) == 2  # type: ignore[call-overload]
