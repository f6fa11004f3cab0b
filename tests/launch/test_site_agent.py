"""What a rank puts beside its trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.durable import PLAIN_DISK
from diloco.inner.parallel import SiteGroup
from diloco.launch import build
from diloco.launch.config import compose
from diloco.launch.errors import ConfigError
from diloco.launch.run_dir import SiteDir
from diloco.launch.schema import RunConfig
from diloco.launch.site_agent import agent_of, follower_of
from diloco.learner.agent import Agent
from diloco.learner.agents import Agents
from diloco.learner.follower import Follower, Followers

SMALL = ["model=tiny", "run.name=x", "outer.num_fragments=2"]


def made(config: RunConfig, folder: Path) -> Agent | Agents:
    model, group = build.build_model(config), SiteGroup()
    agent = agent_of(config, SiteDir(folder), model, lambda what, fields: None, group, None, PLAIN_DISK)
    agent.close()
    return agent


def test_one_syncer_has_one_agent(tmp_path: Path) -> None:
    config = compose(SMALL)
    assert isinstance(made(config, tmp_path), Agent)
    assert (tmp_path / "agent/odometer").is_file()
    assert isinstance(follower_of(config, build.build_model(config), SiteGroup()), Follower)


def test_two_have_one_each_with_a_folder_of_its_own(tmp_path: Path) -> None:
    config = compose([*SMALL, "outer.num_syncers=2", "site.syncer=127.0.0.1:1/127.0.0.1:2"])
    agents = made(config, tmp_path)
    assert isinstance(agents, Agents)
    assert [each._client.address for each in agents._agents] == ["127.0.0.1:1", "127.0.0.1:2"]
    assert [len(each._layout.fragments) for each in agents._agents] == [1, 1]
    for index in range(2):
        assert (tmp_path / f"agent/syncer-{index}/odometer").is_file()
    assert isinstance(follower_of(config, build.build_model(config), SiteGroup()), Followers)


def test_an_address_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="site: syncer is 'nowhere'"):
        made(compose([*SMALL, "site.syncer=nowhere"]), tmp_path)
