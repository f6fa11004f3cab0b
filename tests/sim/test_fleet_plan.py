"""What is told of a fleet as a whole."""

from __future__ import annotations

import pytest

from diloco.sim.fleet_plan import FleetResult, SiteAccount


def test_goodput_and_rounds_are_of_all_sites_together() -> None:
    sites = (SiteAccount(trained_s=80.0, rounds=3), SiteAccount(trained_s=40.0, rounds=1))
    found = FleetResult(sites, (4,), 100.0, 1.0)
    assert found.goodput == pytest.approx(0.6)
    assert found.site_rounds == 4
