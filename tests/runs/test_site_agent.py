"""What a rank puts beside its trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from diloco.config import build
from diloco.config.compose import compose
from diloco.config.errors import ConfigError
from diloco.config.run_dir import SiteDir
from diloco.config.schema import RunConfig
from diloco.durable import PLAIN_DISK
from diloco.inner.holding import Holding
from diloco.inner.parallel import SiteGroup
from diloco.inner.trainer import Resumed
from diloco.learner.agent import Agent
from diloco.learner.exchange import Follower
from diloco.learner.ranks import Dealt
from diloco.learner.several_syncers import Agents
from diloco.outer.fragments import Layout, named_parameters_once
from diloco.runs import site_agent
from diloco.runs.site_agent import _client, agent_of, follower_of, owning_follower_of
from diloco.wire.options import MBPS_MIN

SMALL = ["model=tiny", "run.name=x", "outer.num_fragments=2"]


def made(config: RunConfig, folder: Path) -> Agent | Agents:
    agent = agent_of(config, SiteDir(folder), held(config), lambda what, fields: None, None, PLAIN_DISK)
    agent.close()
    return agent


def held(config: RunConfig) -> Holding:
    return Holding(named_parameters_once(build.build_model(config)), SiteGroup())


def test_one_syncer_has_one_agent(tmp_path: Path) -> None:
    config = compose(SMALL)
    assert isinstance(made(config, tmp_path), Agent)
    assert (tmp_path / "agent/odometer").is_file()
    assert isinstance(follower_of(config, held(config)), Follower)


def test_where_every_rank_has_all_no_rank_but_the_first_owns_anything(tmp_path: Path) -> None:
    config = compose(SMALL)
    follower = owning_follower_of(config, SiteDir(tmp_path), held(config), None, PLAIN_DISK)
    assert follower.state() == ({}, {})
    two = compose([*SMALL, "outer.num_syncers=2", "site.syncer=127.0.0.1:1/127.0.0.1:2"])
    restored = Resumed(1, {}, {"parts": [{}, {}]}, (), None)
    assert len(owning_follower_of(two, SiteDir(tmp_path), held(two), restored, PLAIN_DISK)._layouts) == 2


def test_what_a_rank_owns_is_of_the_syncer_that_has_it_also_where_it_owns_nothing_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Owned:
        def __init__(self, *_: object) -> None: ...

        def state(self) -> dict[str, Tensor]:
            return {"base.1": torch.ones(1)}

    def deal(layout: Layout, holding: Holding) -> Dealt:
        return Dealt((0, 1), {0: None}) if len(layout.fragments) == 2 else Dealt((0,), {})  # type: ignore[dict-item]

    monkeypatch.setattr(site_agent, "deal", deal)
    monkeypatch.setattr(site_agent, "Owner", Owned)
    sizes = ["model=tiny", "run.name=x", "outer.num_fragments=3", "outer.num_syncers=2", "model.layers=3"]
    config = compose([*sizes, "site.syncer=127.0.0.1:1/127.0.0.1:2"])
    follower = owning_follower_of(config, SiteDir(tmp_path), held(config), None, PLAIN_DISK)
    assert [len(layout.fragments) for layout in follower._layouts] == [1, 2]
    assert list(follower.state()[0]) == ["1.base.1"]


def test_ranks_that_own_fragments_share_what_the_link_has(tmp_path: Path) -> None:
    config = compose([*SMALL, "site.up_mbps=90", "site.down_mbps=0.2"])
    alone, third = _client(config, Dealt((0, 0), {})), _client(config, Dealt((0, 2, 1, 2), {}))
    assert (alone._options.up_mbps, alone._options.down_mbps) == (90, 0.2)
    assert (third._options.up_mbps, third._options.down_mbps) == (30, MBPS_MIN)
    assert _client(compose(SMALL), Dealt((0, 1), {}))._options.up_mbps == 0, "what is learned is each one's own"


def test_two_have_one_each_with_a_folder_of_its_own(tmp_path: Path) -> None:
    config = compose([*SMALL, "outer.num_syncers=2", "site.syncer=127.0.0.1:1/127.0.0.1:2"])
    agents = made(config, tmp_path)
    assert isinstance(agents, Agents)
    assert [each.client.address for each in agents._agents] == ["127.0.0.1:1", "127.0.0.1:2"]
    assert [len(each.tensors.layout.fragments) for each in agents._agents] == [1, 1]
    for index in range(2):
        assert (tmp_path / f"agent/syncer-{index}/odometer").is_file()
    assert [len(each.fragments) for each in follower_of(config, held(config))._layouts] == [1, 1]


def test_an_address_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="site: syncer is 'nowhere'"):
        made(compose([*SMALL, "site.syncer=nowhere"]), tmp_path)
