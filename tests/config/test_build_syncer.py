from __future__ import annotations

import pytest

from diloco.config.build_syncer import lease, replication_options, standby_primary
from diloco.config.compose import settle
from diloco.config.errors import ConfigError
from diloco.config.schema import RunConfig


@pytest.fixture
def config() -> RunConfig:
    return settle(RunConfig())


def test_without_a_word_nothing_is_replicated_and_an_operator_says_who_leads(config: RunConfig) -> None:
    assert replication_options(config).mode == "off"
    assert lease(config) is None


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
    config.cluster.standby.primary, config.cluster.standby.name = "fra.example:7077", "standby"
    assert standby_primary(config) == "fra.example:7077"


def test_a_lease_is_built_as_it_is_said(config: RunConfig) -> None:
    config.run.name, section = "otter", config.cluster.lease
    section.kind, section.path, section.ttl_s = "file", "/shared/lease.json", 4.0
    made = lease(config)
    assert made is not None
    assert (made.place, made.ttl_s) == ("file:/shared/lease.json", 4.0)
    section.kind, section.path, section.endpoints = "etcd", "", ["http://fra:2379", "http://iad:2379"]
    made = lease(config)
    assert made is not None
    assert (made.place, made.ttl_s) == ("etcd:/diloco/otter/lease", 4.0)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"kind": "zookeeper"}, r"cluster\.lease\.kind is 'zookeeper': one of none, file, etcd"),
        ({"kind": "file"}, r"cluster\.lease\.path is '': kind=file needs it"),
        ({"kind": "file", "path": "lease.json"}, r"cluster\.lease\.path is 'lease\.json': an absolute path"),
        ({"path": "/lease.json"}, r"cluster\.lease\.path is given, and is for kind=file"),
        ({"kind": "etcd"}, r"cluster\.lease\.endpoints is \[\]: kind=etcd needs it"),
        ({"kind": "etcd", "endpoints": ["fra:2379"]}, r"cluster\.lease\.endpoints has 'fra:2379'"),
        ({"kind": "etcd", "endpoints": ["http://fra:2379"], "ttl_s": 2.5}, r"cluster\.lease\.ttl_s is 2\.5: whole"),
        ({"kind": "file", "path": "/lease.json", "ttl_s": 0.5}, r"cluster\.lease\.ttl_s is 0\.5: 1 to 3600"),
        ({"kind": "file", "path": "/lease.json", "ttl_s": float("nan")}, r"cluster\.lease\.ttl_s is nan"),
    ],
)
def test_a_lease_that_cannot_be_is_refused_in_words(config: RunConfig, settings: dict[str, object], why: str) -> None:
    for name, value in settings.items():
        setattr(config.cluster.lease, name, value)
    with pytest.raises(ConfigError, match=why):
        lease(config)
