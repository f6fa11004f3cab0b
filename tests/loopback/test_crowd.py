"""Many whole updates at once, and the memory that they cost a real syncer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hunts.crowd import measured
from tests.hunts.reporting import Hunt


@pytest.mark.slow
def test_64_updates_of_32_mib_at_once_stay_under_the_stated_bound(tmp_path: Path) -> None:
    hunt = Hunt("crowd", None)
    found = measured(hunt, tmp_path, 64, 32)
    assert hunt.violations == []
    assert int(str(found["taken_mib"])) < 2 * int(str(found["pushed_mib"])) // 3, found
