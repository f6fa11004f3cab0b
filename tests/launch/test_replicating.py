from __future__ import annotations

import pytest

from diloco.launch.config import settle
from diloco.launch.errors import ConfigError
from diloco.launch.replicating import replication_options, standby_primary
from diloco.launch.schema import RunConfig


@pytest.fixture
def config() -> RunConfig:
    return settle(RunConfig())


def test_without_a_word_nothing_is_replicated(config: RunConfig) -> None:
    assert replication_options(config).mode == "off"


def test_a_short_timeout_asks_more_often(config: RunConfig) -> None:
    config.cluster.replication.mode, config.cluster.replication.timeout_s = "sync", 2.0
    options = replication_options(config)
    assert (options.mode, options.timeout_s, options.alive_s) == ("sync", 2.0, 0.5)
    config.cluster.replication.timeout_s = 60.0
    assert replication_options(config).alive_s == 1.0


@pytest.mark.parametrize(
    ("mode", "timeout_s", "why"),
    [
        ("both", 5.0, r"cluster\.replication\.mode is 'both': one of off, sync, async"),
        ("sync", 0.1, r"cluster\.replication\.timeout_s is 0\.1: at least 0\.5"),
        ("sync", float("nan"), r"cluster\.replication\.timeout_s is nan"),
    ],
)
def test_what_cannot_be_is_refused_in_words(config: RunConfig, mode: str, timeout_s: float, why: str) -> None:
    config.cluster.replication.mode, config.cluster.replication.timeout_s = mode, timeout_s
    with pytest.raises(ConfigError, match=why):
        replication_options(config)


@pytest.mark.parametrize(
    ("primary", "name", "why"),
    [
        ("", "standby", r"cluster\.standby\.primary is ''"),
        ("fra:7077,iad:7077", "standby", r"cluster\.standby\.primary is 'fra:7077,iad:7077': host:port"),
        ("fra:7077", "syncer", r"cluster\.standby\.name is 'syncer'.* and not 'syncer'"),
        ("fra:7077", "a/b", r"cluster\.standby\.name is 'a/b'"),
    ],
)
def test_a_standby_needs_whom_to_follow_and_a_name(config: RunConfig, primary: str, name: str, why: str) -> None:
    config.cluster.standby.primary, config.cluster.standby.name = primary, name
    with pytest.raises(ConfigError, match=why):
        standby_primary(config)


def test_whom_it_follows(config: RunConfig) -> None:
    config.cluster.standby.primary = "fra.example:7077"
    assert standby_primary(config) == "fra.example:7077"
