"""The syncers of ``diloco up``."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.config.compose import compose
from diloco.config.errors import ConfigError
from diloco.config.schema import RunConfig
from diloco.runs.scenario import link_name, site_of
from diloco.runs.up import check_syncers, restore_line, syncer_address, syncers_of

TWO = ["outer.num_fragments=2", "outer.num_syncers=2", "run.name=x"]


def config_in(path: Path, *overrides: str) -> RunConfig:
    return compose([f"run.dir={path}/runs", "run.name=x", *overrides])


def test_the_address_is_free_unless_it_was_chosen(tmp_path: Path) -> None:
    first = syncer_address(config_in(tmp_path))
    assert first.startswith("127.0.0.1:")
    assert first != "127.0.0.1:7077"
    assert syncer_address(config_in(tmp_path, "cluster.syncer.listen=127.0.0.1:7123")) == "127.0.0.1:7123"


@pytest.mark.parametrize(
    ("setting", "source"),
    [("cluster.syncer.backup=s3://bucket/x", "--from s3://bucket/x"), ("seed=1", "--from-site {}/sites/site-a")],
)
def test_who_loses_the_syncers_folder_is_told_what_to_type(tmp_path: Path, setting: str, source: str) -> None:
    root = tmp_path / "runs" / "x"
    assert restore_line(config_in(tmp_path, setting)) == f"diloco restore {root} {source.format(root)}"


def test_each_of_two_has_an_address_a_folder_and_a_way_back(tmp_path: Path) -> None:
    one, other = syncers_of(config_in(tmp_path, *TWO, "cluster.syncer.backup=s3://bucket"))
    assert (one.name, other.name) == ("syncer", "syncer-1")
    assert one.address != other.address
    assert other.run_dir.root == tmp_path / "runs/x/syncers/1"
    assert other.restore == f"diloco restore {other.run_dir.root} --from s3://bucket/syncer-1"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("cluster.syncer.listen=127.0.0.1:7123", "cluster.syncer.listen is '127.0.0.1:7123': diloco up gives each"),
        ("cluster.syncer.metrics=9464", "cluster.syncer.metrics is '9464': diloco up gives each"),
        ("cluster.syncer.index=1", "cluster.syncer.index is 1: diloco up gives each"),
    ],
)
def test_what_two_on_one_machine_cannot_share_is_named(tmp_path: Path, setting: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_syncers(config_in(tmp_path, *TWO, setting))
    check_syncers(config_in(tmp_path, "cluster.syncer.listen=127.0.0.1:7123"))


def test_a_lease_file_is_for_one(tmp_path: Path) -> None:
    lease = ["cluster.lease.kind=file", "cluster.lease.path=/x/lease"]
    with pytest.raises(ConfigError, match=r"cluster.lease.path is '/x/lease': several syncers need a file each"):
        check_syncers(config_in(tmp_path, *TWO, *lease))


def test_a_sites_links_bear_its_name() -> None:
    assert [link_name("site-a", index) for index in range(2)] == ["site-a", "site-a@1"]
    assert [site_of(link_name("site-a", index)) for index in range(2)] == ["site-a"] * 2
