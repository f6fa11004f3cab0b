from __future__ import annotations

import os
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from diloco.cli.up import check, choose_run, exit_code, facts_of, main, reference_bits, up_options
from diloco.config import compose as configs
from diloco.config.compose import compose
from diloco.config.errors import ConfigError, ExitCode, VerbError
from diloco.config.run_dir import RunDir
from diloco.config.schema import DataSection, RunConfig
from diloco.durable import locked
from diloco.observe.history import RunHistory
from diloco.runs.scenario import ScenarioError, scenario_of
from diloco.runs.up import OneSyncer, Outcome, syncers_of


def config_in(path: Path, *overrides: str) -> RunConfig:
    return compose([f"run.dir={path / 'runs'}", *overrides])


def chosen(config: RunConfig) -> tuple[RunDir, bool]:
    with ExitStack() as stack:
        return choose_run(config, stack)


def begun(path: Path, *overrides: str) -> RunDir:
    """A run that was begun and not finished."""
    run_dir, again = chosen(config_in(path, *overrides))
    assert not again
    run_dir.syncer.mkdir()
    return run_dir


def finish(run_dir: RunDir) -> None:
    run_dir.final_model.parent.mkdir(parents=True)
    run_dir.final_model.write_bytes(b"")


def test_a_new_run_has_a_name_a_configuration_and_is_the_latest(tmp_path: Path) -> None:
    first = begun(tmp_path)
    config = config_in(tmp_path, "run.resume=never")
    run_dir, again = chosen(config)
    assert not again
    assert run_dir.root != first.root, "it is made where the latest could go on"
    assert run_dir.root.name == config.run.name
    assert (tmp_path / "runs" / "latest").resolve() == run_dir.root.resolve()
    # A child that is started again must be able to go on.
    assert configs.read(run_dir.config).run.resume == "auto"


def test_the_latest_run_goes_on_when_it_is_the_same_and_unfinished_though_its_syncers_folder_is_gone(
    tmp_path: Path,
) -> None:
    """The syncer then says what to do; a new run would leave the sites' work behind in silence."""
    first = begun(tmp_path)
    (first.root / "summary.json").write_text("{}")
    assert chosen(config_in(tmp_path, "run.log_every=3")) == (first, True)
    assert not first.summary.exists(), "a summary of the part before"
    first.syncer.rmdir()
    second, again = chosen(config_in(tmp_path))
    assert (second == first, again) == (False, False), "nothing was in it"
    second.events.write_text('{"at": 1, "who": "syncer", "what": "published", "version": 1}\n')
    assert chosen(config_in(tmp_path)) == (second, True)


def test_another_configuration_is_another_run(tmp_path: Path, capsys: Any) -> None:
    first = begun(tmp_path)
    for key, value in (("scenario", "none"), ("outer.lr", "0.5"), ("network.rtt_ms", "200")):
        setting = f"{key}={value}"
        with pytest.raises(ConfigError, match=f"run.resume is 'must': .* is another run: {key} is"):
            chosen(config_in(tmp_path, setting, "run.resume=must"))
        run_dir, again = chosen(config_in(tmp_path, setting))
        assert not again
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith(f"a new run, since {first.root} is another run: {key} is {value}")
        assert run_dir.root != first.root
        (tmp_path / "runs" / "latest").unlink()
        (tmp_path / "runs" / "latest").symlink_to(first.root.name)


def test_a_named_run_says_what_it_takes_anew_and_goes_on_with_more_room_for_sites(tmp_path: Path, capsys: Any) -> None:
    first = begun(tmp_path)
    name = f"run.name={first.root.name}"
    others = ["network=loopback", "site.threads=2", "scenario=none"]
    assert chosen(config_in(tmp_path, name, *others))[1]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("changed: network.emulate is false now and was true; ")
    assert line.endswith("; and 3 more")
    assert chosen(config_in(tmp_path, name, *others))[1]
    assert capsys.readouterr().out == ""
    config = config_in(tmp_path, name, *others, "outer.sites_max=40")
    with ExitStack() as stack:
        assert choose_run(config, stack, frozenset({"outer.sites_max"})) == (first, True)
    assert capsys.readouterr().out == "changed: outer.sites_max is 40 now and was 16\n"
    assert configs.read(first.config).outer.sites_max == 40
    assert chosen(config_in(tmp_path, *others)) == (first, True)
    assert capsys.readouterr().out == "note: outer.sites_max=40, as in the run's configuration\n"


def test_what_does_not_go_on_gives_way_to_a_new_run_and_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be resumed"):
        chosen(config_in(tmp_path, "run.resume=must"))
    with pytest.raises(ConfigError, match=r"cluster\.syncer\.backup is '.*runs': another folder"):
        chosen(config_in(tmp_path, f"cluster.syncer.backup={tmp_path}/runs"))
    with pytest.raises(ConfigError, match="there is no run otter"):
        chosen(config_in(tmp_path, "run.resume=must", "run.name=otter"))
    first = begun(tmp_path)
    name = f"run.name={first.root.name}"
    assert chosen(config_in(tmp_path, "run.resume=must", name))[1]
    with pytest.raises(ConfigError, match="holds a run"):
        chosen(config_in(tmp_path, "run.resume=never", name))
    with pytest.raises(VerbError, match=r"outer.lr is 0.5 now and \d\.\d+ in") as refusal:
        chosen(config_in(tmp_path, name, "outer.lr=0.5"))
    assert refusal.value.code is ExitCode.MISMATCH
    with locked(first.root):
        assert chosen(config_in(tmp_path))[0].root != first.root
        for settings in ([name], [name, "outer.lr=0.5"]):
            with pytest.raises(VerbError, match="running already"):
                chosen(config_in(tmp_path, *settings))
    finish(first)
    assert chosen(config_in(tmp_path))[0].root != first.root
    with pytest.raises(ConfigError, match="has finished"):
        chosen(config_in(tmp_path, name))


def test_a_new_run_leases_units_of_its_one_text_unless_it_is_to_be_the_same_twice(tmp_path: Path) -> None:
    for settings, leased in (
        ([], True),
        (["inner.deterministic=true"], False),
        (["outer.lock_step=true"], False),
        (["data.leased=false"], False),
        (["data.leased=true", "inner.deterministic=true"], True),
    ):
        run_dir, _ = chosen(config_in(tmp_path, "run.resume=never", *settings))
        assert configs.read(run_dir.config).data.leased is leased


@pytest.mark.slow
def test_a_run_that_goes_on_leases_as_it_did(tmp_path: Path) -> None:
    first = begun(tmp_path)
    text = first.config.read_text()
    assert "leased: true" in text
    first.config.write_text(text.replace("  leased: true\n", ""))  # As an earlier release has left it.
    name = f"run.name={first.root.name}"
    assert chosen(config_in(tmp_path)) == (first, True)
    assert chosen(config_in(tmp_path, name))[1]
    assert not configs.read(first.config).data.leased
    with pytest.raises(VerbError, match=r"data\.leased is true now and not set in") as refusal:
        chosen(config_in(tmp_path, name, "data.leased=true"))
    assert refusal.value.code is ExitCode.MISMATCH


def test_the_demo_is_played_as_far_as_it_applies(tmp_path: Path) -> None:
    def targets(*overrides: str) -> list[str]:
        return [step.target for step in scenario_of(config_in(tmp_path, *overrides))]

    assert targets() == ["site-b", "link:site-c", "syncer"]
    assert targets("cluster=one") == ["syncer"]
    assert targets("network.emulate=false") == ["site-b", "syncer"]
    assert targets("scenario=none") == []
    assert targets("scenario=demo") == ["site-b", "link:site-c", "syncer"]


def test_a_users_scenario_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "faults.yaml"
    file.write_text("- {at_s: 1, do: kill, target: site-z}")
    with pytest.raises(ScenarioError, match="site-z"):
        scenario_of(config_in(tmp_path, f"scenario={file}"))
    file.write_text("- {at_s: 1, do: reset, target: 'link:site-a'}")
    assert len(scenario_of(config_in(tmp_path, f"scenario={file}"))) == 1
    with pytest.raises(ConfigError, match=r"network\.emulate is false"):
        scenario_of(config_in(tmp_path, f"scenario={file}", "network.emulate=false"))
    with pytest.raises(ConfigError, match=r"neither a file that can be read nor one of demo, none"):
        scenario_of(config_in(tmp_path, "scenario=nothing.yaml"))


def test_every_site_gets_its_speed_and_a_link_to_each_syncer(tmp_path: Path) -> None:
    far = ["run.name=otter", "cluster.sites.site-b.link.rtt_ms=200", "site.metrics=127.0.0.1:9465"]
    one = OneSyncer("syncer", "127.0.0.1:7001", RunDir(tmp_path), "diloco restore")
    options = up_options(config_in(tmp_path, *far), [one], None, [], {})
    assert list(options.sites) == ["site-a", "site-b", "site-c"]
    assert "site.slowdown=1.25" in options.sites["site-b"]
    assert {"site.id=site-b", "site.index=1", "site.num_sites=3"} <= set(options.sites["site-b"])
    assert "site.syncer=127.0.0.1:7001" in options.sites["site-a"]
    assert [each[-1] for each in options.sites.values()] == [f"site.metrics=127.0.0.1:{9465 + n}" for n in range(3)]
    assert [options.links[name]["rtt_ms"] for name in options.sites] == [80.0, 200.0, 80.0]
    assert sum(options.layout) > 600_000
    assert options.ending_s_max > 60
    config = config_in(tmp_path, *far, "outer.num_fragments=2", "outer.num_syncers=2")
    syncers = syncers_of(config)
    options = up_options(config, syncers, None, [], {})
    assert f"site.syncer={syncers[0].address}/{syncers[1].address}" in options.sites["site-c"]
    assert sorted(options.links) == [f"site-{name}{at}" for name in "abc" for at in ("", "@1")]
    assert options.links["site-b@1"]["rtt_ms"] == 200.0
    assert [each.name for each in options.syncers] == ["syncer", "syncer-1"]


def test_a_run_of_two_syncers_goes_on_until_both_have_finished(tmp_path: Path) -> None:
    two = ["outer.num_fragments=2", "outer.num_syncers=2"]
    run_dir, again = chosen(config_in(tmp_path, *two))
    assert not again
    first, second = (RunDir(run_dir.root / "syncers" / str(index)) for index in range(2))
    for each in (first, second):
        each.syncer.mkdir(parents=True)
    finish(first)
    assert chosen(config_in(tmp_path, *two))[0].root == run_dir.root
    finish(second)
    assert chosen(config_in(tmp_path, *two))[0].root != run_dir.root


def test_exit_codes() -> None:
    for ending, code, status, wanted in (
        ("finished", ExitCode.OK, "ok", ExitCode.OK),
        ("finished", ExitCode.OK, "the tokens of site-a do not balance", ExitCode.FAILED),
        ("drained", ExitCode.OK, "drained: the same command resumes it", ExitCode.DRAINED),
        (None, ExitCode.OK, "the run has not reached its end", ExitCode.FAILED),
        ("drained", ExitCode.FAILED, "stopped at once, by hand", ExitCode.FAILED),
    ):
        history = RunHistory()
        history.ending = ending
        assert exit_code(history, Outcome(code), status) is wanted


def test_the_head_of_the_view_says_what_runs_and_compressors_are_tried_on_our_own_text_alone(tmp_path: Path) -> None:
    facts = facts_of(config_in(tmp_path, "run.name=otter", "run.seconds=60"), 1_050_000)
    assert (facts.name, facts.seconds) == ("otter", 60)
    assert "2x128 transformer, 1.05M values · stdlib · int4:32+zstd1" in facts.what
    bits = reference_bits(DataSection())
    assert 1.0 < bits["xz"] < bits["zlib -9"] < 4.0
    assert reference_bits(DataSection(kind="text", path="/nowhere")) == {}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            "site.index=0 site.num_sites=3 site.id=b site.syncer=otherhost:1 site.nodes=2",
            "diloco up gives each of clus",
        ),
        ("cluster.sites.b.nodes=2", "cluster.sites.b.nodes is 2: diloco up has one machine"),
        ("cluster.syncer.folder=there", "cluster.syncer.folder is 'there': diloco up keeps"),
        ("outer.quorum=4 outer.quorum_min=4", "is 4: cluster.sites has 3, so that no round would ever close"),
        ("cluster.replication.mode=sync", "mode is 'sync': it acknowledges nothing without a standby"),
        ("upstream.endpoint=a:1", "upstream.endpoint is 'a:1': diloco up runs a whole run"),
        (f"cluster.sites.{'x' * 65}.nproc=1", "letters, digits, '.', '_' and '-', at most 64"),
        ("cluster.sites.eval.nproc=1 cluster.sites.up.nproc=1 cluster.sites.syncer.nproc=1", "that is the name of ano"),
    ],
)
def test_what_up_decides_by_itself_is_refused(settings: str, words: str, tmp_path: Path) -> None:
    for setting in settings.split():
        with pytest.raises(ConfigError, match=re.escape(words)) as refused:
            check(config_in(tmp_path, setting))
        own, _, value = setting.partition("=")
        section, _, name = own.removesuffix(".nproc").rpartition(".")
        told = str(refused.value)
        assert f"{section} has {name!r}: " in told if own.endswith(".nproc") else f"{own} is " in told
        assert value in told or own.endswith(".nproc")


def test_a_wrong_setting_is_refused_before_anything_starts(here: Path) -> None:
    Path("no-sites.yaml").write_text("run: {name: otter}\n")
    for words, line in (
        (r"run\.init_from is 'nowhere': neither a \.safetensors file nor", "run.init_from=nowhere run.name=otter"),
        (r"outer\.lr", "outer.lr=-1"),
        (r"cluster\.sites is empty", "--config no-sites.yaml"),
        (r"^site\.memory_folder is 'none'", "inner.memory_checkpoint_every_steps=5 site.memory_folder=none"),
        (r"^inner\.kernels is 'liger': its kernels are for accel", "inner.kernels=liger site.device=cpu"),
    ):
        with pytest.raises(ConfigError, match=words):
            main(line.split())
        assert os.listdir(here) == ["no-sites.yaml"]
