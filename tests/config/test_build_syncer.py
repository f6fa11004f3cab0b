from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from diloco.cli.main import main
from diloco.config import build, build_syncer, connecting
from diloco.config.build_syncer import lease, replication_options
from diloco.config.compose import compose, settle
from diloco.config.connecting import unanswered
from diloco.config.errors import ConfigError
from diloco.config.placing import (
    BY_PART,
    backup_of,
    has_several,
    in_whole_order,
    number_of,
    on_this_machine,
    placement_of,
    syncer_configs,
    syncer_dir,
    syncer_dirs,
    syncer_name,
    towards,
)
from diloco.config.run_dir import RunDir
from diloco.config.schema import RunConfig
from diloco.observe.console import syncer_log
from diloco.observe.eventlog import read_events
from diloco.runs.site_agent import join_text
from diloco.sync.options import disagreement
from diloco.wire.options import SecurityOptions
from tests.config.test_build import small
from tests.loopback.cluster import closed_port
from tests.wire.certificates import LOOPBACK, Authority
from tests.wire.fake_syncer import served


def test_replication_and_a_lease_are_built_as_they_are_said_and_without_a_word_there_are_none() -> None:
    config = settle(RunConfig())
    assert replication_options(config).mode == "off"
    assert lease(config) is None
    config.cluster.replication.mode, config.cluster.replication.timeout_s = "sync", 2.0
    options = replication_options(config)
    assert (options.mode, options.timeout_s, options.alive_s) == ("sync", 2.0, 0.5)
    config.cluster.replication.timeout_s = 60.0
    assert replication_options(config).alive_s == 1.0
    config.run.name, section = "otter", config.cluster.lease
    section.kind, section.path, section.ttl_s = "file", "/shared/lease.json", 4.0
    made = lease(config)
    assert made is not None
    assert (made.place, made.ttl_s) == ("file:/shared/lease.json", 4.0)
    section.kind, section.path, section.endpoints = "etcd", "", ["http://fra:2379", "http://iad:2379"]
    made = lease(config)
    assert made is not None
    assert (made.place, made.ttl_s) == ("etcd:/diloco/otter/lease", 4.0)


# --- Both ends of the wire as they are configured --------------------------------------------------------------------


def test_a_site_sets_its_connections_and_rates_and_an_emulated_link_is_the_networks_but_for_what_it_says() -> None:
    usual = connecting.client_options(small())
    assert (usual.data_channels, usual.up_mbps, usual.down_mbps) == (1, 0.0, 0.0)
    chosen = connecting.client_options(small("site.data_channels=4", "site.up_mbps=200", "site.down_mbps=1000"))
    assert (chosen.data_channels, chosen.up_mbps, chosen.down_mbps) == (4, 200.0, 1000.0)
    config = small("cluster=local4", "network=wan_bad")
    plain, far = connecting.link_options(config, "site-a"), connecting.link_options(config, "site-d")
    assert (plain.rtt_ms, plain.mbps, plain.stall_percent) == (150.0, 20.0, 5.0)
    assert (far.rtt_ms, far.mbps, far.stall_percent) == (200.0, 20.0, 5.0)
    assert plain.seed != far.seed


def test_what_a_site_shows_is_looked_at_before_anything_starts(tmp_path: Path) -> None:
    token = tmp_path / "token"
    with pytest.raises(ConfigError, match=r"site\.token_file is '.*/token': No such file"):
        connecting.site_security(small(f"site.token_file={token}"))
    with pytest.raises(ConfigError, match=r"site\.tls_ca is '.*/ca': No such file"):
        connecting.site_security(small(f"site.tls_ca={tmp_path / 'ca'}"))
    token.write_text("0123456789abcdef\n")
    token.chmod(0o644)
    with pytest.raises(ConfigError, match=rf"site\.token_file .*: chmod 600 {token}$"):
        connecting.site_security(small(f"site.token_file={token}"))
    token.chmod(0o600)
    assert connecting.site_security(small(f"site.token_file={token}")).token_file == str(token)
    token.write_text("two words\n")
    with pytest.raises(ConfigError, match=r"holds a blank"):
        connecting.site_security(small(f"site.token_file={token}"))


GIVE = "speaks TLS: give site.tls_ca, and site.tls_cert and site.tls_key if it asks for them"


def test_a_verb_and_a_site_say_how_tls_differs_at_the_two_ends_and_nothing_where_that_would_not_help(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("syncer", *LOOPBACK)
    wants = SecurityOptions(tls_cert=cert, tls_key=key, tls_ca=authority.ca, require_client_cert=True)
    with served(wants) as (mutual, _), served() as (plain, _):
        for verb in ["status"], ["standby", "status"]:
            assert main([*verb, mutual]) == 3
            said = capsys.readouterr().err
            assert f"{mutual} {GIVE}" in said
            assert said.count("\n") == 1
        assert main(["status", mutual, f"site.tls_ca={authority.ca}"]) == 3
        assert f"{mutual} speaks TLS, and may want site.tls_cert and site.tls_key" in capsys.readouterr().err
        config = compose(["site.id=a", f"site.syncer='127.0.0.1:{closed_port()}, {mutual}'"])
        assert f"Join: Socket closed; {mutual} {GIVE}" in join_text(config, "unreachable", "Join: Socket closed")
        assert "TLS" not in join_text(config, "refused", "evicted from the run")

        cert, key = authority.site("site/a")
        everything = SecurityOptions(tls_ca=authority.ca, tls_cert=cert, tls_key=key)
        assert unanswered(mutual, everything, "why") == "why"
        assert unanswered(f"127.0.0.1:{closed_port()}", SecurityOptions(), "why") == "why"
        assert unanswered(plain, SecurityOptions(), "why") == "why"
        told = unanswered(plain, SecurityOptions(tls_ca=authority.ca), "why")
        assert told == f"why; {plain} does not speak TLS: leave site.tls_ca out"


# --- Several syncers in the configuration, and where one of several writes its events --------------------------------

TWO = ["outer.num_fragments=4", "outer.num_syncers=2", "run.name=otter"]


def test_with_one_syncer_nothing_is_different() -> None:
    config = compose(["outer.num_fragments=4", "run.name=otter", "cluster.syncer.backup=vault"])
    whole = build.whole_layout(config)
    assert not has_several(config)
    assert placement_of(config, whole) == ((0, 1, 2, 3),)
    assert not build.agreement(config, whole).shared.keys() & BY_PART
    assert build.layout_of(config) == whole
    assert [part.site.syncer for part in towards(config)] == [config.site.syncer]
    assert syncer_configs(config) == [config]
    assert syncer_dir(config).root == Path("runs/otter")
    assert backup_of(config) == "vault"
    assert number_of(config) is None
    assert build.learner_options(config).offsets == (3, 7, 11, 0)


def test_each_of_two_has_its_own_fragments_at_their_own_times() -> None:
    config = compose([*TWO, "cluster.syncer.backup=vault/"])
    build_syncer.check(config)
    whole, parts = build.whole_layout(config), syncer_configs(config)
    placement = placement_of(config, whole)
    assert sorted(index for mine in placement for index in mine) == [0, 1, 2, 3]
    offsets = build.learner_options(compose(TWO[:1])).offsets
    for index, (part, mine) in enumerate(zip(parts, placement, strict=True)):
        layout = build.layout_of(part)
        plan = build_syncer.plan(part, layout)
        assert [fragment.pieces for fragment in layout.fragments] == [whole.fragments[place].pieces for place in mine]
        assert plan.held == mine
        assert plan.outer.num_fragments == len(mine)
        assert build.learner_options(part).offsets == tuple(offsets[place] for place in mine)
        assert [value.numel() for value in build.version_zero(part, layout)] == [f.numel for f in layout.fragments]
        assert plan.agreement.shared["cluster.syncer.index"] == str(index)
        assert plan.agreement.shared["placement"] == f"0 2 / 1 3 of layout {whole.fingerprint[:12]}"
        assert number_of(part) == index
        assert backup_of(part) == f"vault/syncer-{index}"
    assert [run_dir.root for run_dir in syncer_dirs(config, RunDir(Path("runs/otter")))] == [
        Path(f"runs/otter/syncers/{index}") for index in (0, 1)
    ]
    assert [syncer_name(index) for index in range(2)] == ["syncer", "syncer-1"]
    ours, theirs = (build_syncer.plan(part, build.layout_of(part)).agreement for part in parts)
    assert disagreement(ours, theirs) == "cluster.syncer.index is 1 at the site and 0 at the syncer"


def test_a_site_has_an_address_for_each_syncer() -> None:
    config = compose([*TWO, "site.syncer=a:1,b:1/c:2"])
    assert [part.site.syncer for part in towards(config)] == ["a:1,b:1", "c:2"]
    assert [part.cluster.syncer.index for part in towards(config)] == [0, 1]
    assert in_whole_order(((0, 2), (1, 3)), ([10, 12], [11, 13])) == [10, 11, 12, 13]
    for settings, words in (
        ([*TWO, "site.syncer=a:1"], "site.syncer is 'a:1': 2 addresses with / between, one for each"),
        (["site.syncer=a:1/b:2"], "site.syncer is 'a:1/b:2': one address, since outer.num_syncers=1"),
    ):
        with pytest.raises(ConfigError, match=words):
            towards(compose(settings))


def test_syncers_on_one_machine_take_ports_in_a_row() -> None:
    many = ["outer.num_fragments=4", "outer.num_syncers=4", "cluster.syncer.processes=3", "cluster.syncer.index=1"]
    given = [*many, "cluster.syncer.listen=[::1]:7077", "cluster.syncer.metrics=9464"]
    parts = [part.cluster.syncer for part in on_this_machine(compose(given))]
    assert [(each.index, each.processes) for each in parts] == [(1, 1), (2, 1), (3, 1)]
    assert [each.listen for each in parts] == ["[::1]:7077", "[::1]:7078", "[::1]:7079"]
    assert [each.metrics for each in parts] == ["9464", "9465", "9466"]
    for page in ("", "0"):
        found = on_this_machine(compose([*many, f"cluster.syncer.metrics='{page}'"]))
        assert {part.cluster.syncer.metrics for part in found} == {page}
    for setting, words in (
        ("cluster.syncer.metrics=7076", "cluster.syncer.metrics is '7076': 3 ports in a row, none of them"),
        ("cluster.syncer.listen=127.0.0.1:0", "cluster.syncer.listen is '127.0.0.1:0': host:port, with a port"),
        ("cluster.syncer.listen=localhost:abc", "cluster.syncer.listen is 'localhost:abc': host:port, with a port"),
        ("cluster.syncer.folder=/x", "cluster.syncer.folder is '/x': each of cluster.syncer.processes has its own"),
        ("cluster.lease.path=/x/lease", "cluster.lease.path is '/x/lease': several syncers need a file each"),
    ):
        with pytest.raises(ConfigError, match=words):
            on_this_machine(compose([*many, setting, "cluster.lease.kind=file"]))


def test_a_syncers_own_numbers_and_the_whole_models(tmp_path: Path) -> None:
    config = compose(["outer.num_fragments=4", "outer.num_syncers=2", "run.name=x", f"run.dir={tmp_path}"])
    config.cluster.syncer.index = 1
    held = build.held_of(config)
    with ExitStack() as stack:
        log = syncer_log(config, stack)
        log.emit("published", {"fragment": 1, "version": 7})
        log.emit("syncer_started", {"versions": [5, 6]})
    own = list(read_events(tmp_path / "x/syncers/1/events.jsonl"))
    whole = list(read_events(tmp_path / "x/events.jsonl"))
    assert [event["who"] for event in own + whole] == ["syncer-1"] * 4
    assert [event.get("fragment") for event in own] == [1, None]
    assert [event.get("fragment") for event in whole] == [held[1], None]
    assert whole[1]["fragments"] == list(held)
    assert {event["of_syncer"] for event in whole} == {1}
