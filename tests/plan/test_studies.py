"""The published tables are found again within what is promised of them."""

from __future__ import annotations

import pytest

from diloco.plan.studies import GBPS, MODELS, SHARES, STUDIES, bandwidths


@pytest.mark.slow
def test_the_published_bandwidths_within_two_steps_of_the_grid() -> None:
    cells = list(bandwidths(0))
    assert len(cells) == len(GBPS) * len(MODELS) * len(SHARES)
    assert [cell for cell in cells if cell.off > 2] == []


def test_a_study_goes_by_its_name() -> None:
    assert all(study.name == name for name, study in STUDIES.items())
