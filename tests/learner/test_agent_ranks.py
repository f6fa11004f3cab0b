"""Rank 0 of a site that has lost a rank which owns fragments."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.inner.checks import GroupError
from tests.learner.direct import DirectClient, Site, started
from tests.learner.test_agent import ALONE
from tests.syncer.building import serving


def test_a_rank_that_is_lost_ends_the_loop_in_words(tmp_path: Path) -> None:
    with serving(tmp_path / "syncer", **ALONE) as syncer, started(tmp_path / "a", syncer) as site:
        site.train(2)
        site.agent._lose("rank 3 of this site is gone: killed")
        with pytest.raises(GroupError, match="rank 3 of this site is gone"):
            site.step()


def test_a_rank_that_is_lost_before_the_site_has_joined_is_not_forgotten(tmp_path: Path) -> None:
    with serving(tmp_path / "syncer", **ALONE) as syncer:
        site = Site(tmp_path / "a", DirectClient(syncer))
        site.agent._lose("rank 3 of this site is gone: killed")
        with pytest.raises(GroupError, match="rank 3 of this site is gone"):
            site.start()
        site.close()


def test_a_rank_that_is_lost_is_not_forgotten_when_the_site_joins_again(tmp_path: Path) -> None:
    with serving(tmp_path / "syncer", **ALONE) as syncer, started(tmp_path / "a", syncer) as site:
        site.train(2)
        site.agent._lose("rank 3 of this site is gone: killed")
        site.client.training = None
        site.agent.join()
        with pytest.raises(GroupError, match="rank 3 of this site is gone"):
            site.step()
