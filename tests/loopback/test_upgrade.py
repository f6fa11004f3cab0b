"""Every part of a run can be replaced while it goes on, and nothing is lost by it."""

from __future__ import annotations

import pytest

from tests.loopback.upgrading import SITES, Upgrade
from tests.runs.processes import ROOT, Place


@pytest.mark.slow
def test_syncer_and_sites_are_replaced_one_by_one_and_nothing_is_lost(place: Place) -> None:
    told = Upgrade(place, ROOT, ROOT).run()
    assert told["stages"] == 3 + len(SITES)
    assert told["drain_s"] < 20 + 20, "promise P10 says 20 s; the machine may be busy"
    assert all(told[site]["merged"] > 0 for site in SITES)
