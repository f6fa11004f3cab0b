from __future__ import annotations

import pickle
import re
from dataclasses import fields, replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from diloco.cli import main
from diloco.config import build, build_syncer
from diloco.config.compose import GROUPS, compose, is_name, settle, shared_config
from diloco.config.errors import ConfigError, ExitCode, RankLost, VerbError, advice, whole_steps
from diloco.config.keys import leaves, nearest, type_of, unknown, wanted
from diloco.config.run_dir import HOW, WHO, RunDir, name_run, run_dir_of
from diloco.config.schema import OuterSection, RunConfig, RunSection
from diloco.outer.merge import CORRECTION_NUMBERS, Correction
from diloco.outer.optimizer import OuterOptimizerOptions


def test_every_section_but_some_is_a_group_and_the_defaults_alone_are_a_run_that_can_be_built() -> None:
    names = [item.name for item in fields(RunConfig)]
    assert set(names) == {*GROUPS} - {"experiment"} | {"run", "launch", "upstream", "scenario"}
    config = settle(RunConfig())
    config.run.name = "x"
    config.data.cache = "cache"
    build_syncer.check(config)


def test_every_option_of_the_outer_optimizer_can_be_set_and_is_as_the_optimizer_has_it() -> None:
    outer = compose([]).outer
    assert {item.name for item in fields(OuterOptimizerOptions)} <= {item.name for item in fields(OuterSection)}
    for item in fields(OuterOptimizerOptions):
        assert item.name in ("kind", "momentum", "lr") or getattr(outer, item.name) == item.default, item.name


def test_every_number_of_a_correction_can_be_set_and_is_shared_and_its_default_is_the_corrections() -> None:
    assert {item.name for item in fields(Correction)} == {"kind", *CORRECTION_NUMBERS}
    for name in CORRECTION_NUMBERS:
        usual, key = getattr(Correction(), name), f"outer.correction_{name}"
        for settings, value in ([], usual), ([f"{key}=0.75"], 0.75):
            config = compose(["experiment=heloco", *settings])
            assert build.rule(config, build.layout_of(config)).correction == Correction(kind="heloco", **{name: value})
            shared = shared_config(config)
            assert (shared["outer.correction"], shared.get(key)) == ("heloco", "0.75" if settings else None)


def test_every_key_has_a_type_free_names_take_any_name_and_of_others_the_nearest_is_meant() -> None:
    for key, _, _ in leaves():
        assert type_of(key.replace("<name>", "anything")) is not None
        assert "section" not in wanted(key)
    assert type_of("cluster.sites.anything.slowdown") is float
    for key in ("cluster.sites.a.b", "run.anything", "", "run.", "run..name", "run.name.x"):
        with pytest.raises(ConfigError, match="unknown key"):
            type_of(key)
    assert nearest("zzzz", ["outer.lr", "inner.lr"]) == "", "it is near to none"
    for typed, meant in (
        ("inner.batchsequences", "inner.batch_sequences"),
        ("sede", "run.seed"),
        ("modle", "model"),
    ):
        assert unknown(typed) == f"unknown key {typed}: did you mean {meant}?"


def test_codes_are_those_that_scripts_and_schedulers_know() -> None:
    codes = {"OK": 0, "FAILED": 1, "USAGE": 2, "UNREACHABLE": 3, "MISMATCH": 4, "DRAINED": 75}
    assert {code.name: int(code) for code in ExitCode} == codes


def test_an_error_becomes_its_code_and_one_line_and_our_own_defect_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for error, code, lines in (
        (VerbError(ExitCode.MISMATCH, "not\nthe same"), 4, 1),
        (ConfigError("wrong"), 2, 1),
        (KeyboardInterrupt(), 1, 0),
    ):
        monkeypatch.setattr("diloco.cli.status.main", Mock(side_effect=error))
        assert main.main(["status"]) == code
        assert capsys.readouterr().err.count("\n") == lines
    monkeypatch.setattr("diloco.cli.status.main", Mock(side_effect=AssertionError("a defect")))
    with pytest.raises(AssertionError, match="a defect"):
        main.main(["status"])


def test_a_verbs_error_comes_whole_out_of_another_process() -> None:
    told = pickle.loads(pickle.dumps(RankLost(ExitCode.MISMATCH, "not the same")))
    assert (type(told), told.code, str(told)) == (RankLost, ExitCode.MISMATCH, "not the same")


def test_updates_may_be_as_old_as_a_site_can_be_told_of() -> None:
    assert build.outer_options(compose(["outer.staleness_max=200"])).fates_kept_max == 2 * 202
    with pytest.raises(ConfigError, match=r"^outer\.staleness_max is 511: .*outer\.updates_in_flight_max=2 .* 1024$"):
        build.outer_options(compose(["outer.staleness_max=511"]))


@pytest.mark.slow
@pytest.mark.parametrize("value", ["-1", "0", "33", "4294967296"])
def test_a_number_that_is_refused_is_named_by_its_setting(value: str) -> None:
    keys = {key.replace("<name>", "a") for key, _, _ in leaves()}
    for key in sorted(each for each in keys if type_of(each) in (int, float)):
        refused = ""
        try:
            config = settle(compose([f"{key}={value}", "run.name=x", "site.id=a", "data.cache=cache"]))
            build_syncer.check(config)
            build.trainer_options(config)
            build.inner_options(config)
        except ConfigError as error:
            refused = str(error)
        assert not refused or refused.split(" ")[0] in keys, refused


WINDOWS = "experiment=async_dn inner.batch_sequences=8 inner.sequence_length=128"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("outer=async outer.kind=nesterov outer.momentum=0.5", "outer.share_weighted=true scales each step"),
        ("outer.kind=nesterov outer.momentum=0.5", "outer.lr is 1.5 with outer.kind=nesterov and outer.momentum=0.5"),
        ("outer=diloco outer.inner_steps=10", "momentum is 0.9 with outer.inner_steps=10"),
        ("outer=async_dn outer.window=2", "outer.window is 2 and there are 3 sites"),
        ("outer=diloco outer.merge=rda", "outer.merge is rda with outer.lr=0.7 and outer.momentum=0.9"),
        ("outer=decoupled outer.staleness_max=5", "staleness_max is 5 and there are 3 sites: under outer.adopt"),
        (f"{WINDOWS} run.tokens=4000000", "run.tokens=4000000 are about 26 windows of outer.window=3 updates"),
        ("experiment=streaming codec=int2 codec.feedback=0", "int2:128 with codec.feedback=0 under outer.adopt=blend"),
        ("outer=async outer.staleness_power=0.5", "staleness_power is 0.5 and each update is merged alone"),
        ("cluster=one outer=async outer.kind=nesterov outer.momentum=0.5", ""),
        (f"{WINDOWS} run.tokens=40000000", ""),
        (f"{WINDOWS} run.tokens=null", ""),
        ("experiment=streaming codec=int2", ""),
    ],
)
def test_what_goes_badly_together_is_said_with_its_settings_and_nothing_else_is_warned_of(
    settings: str, words: str
) -> None:
    said = advice(compose(settings.split()))
    assert len(said) == bool(words)
    assert all(words in each for each in said)


def test_19_a_preset_of_whole_steps_says_so_and_what_takes_shares_or_waits_for_all_does_not() -> None:
    for settings in (["experiment=decoupled"], ["experiment=async"]):
        (said,) = whole_steps(compose(settings))
        assert said.startswith("outer.share_weighted is false: each outer step is a whole one, as in the paper")
        assert whole_steps(compose([*settings, "outer.share_weighted=true"])) == []
    for settings in ([], ["experiment=diloco"], ["experiment=async_dn"], ["outer=buffered"]):
        assert whole_steps(compose(settings)) == []


def test_a_run_has_one_folder_by_its_name() -> None:
    config = compose(["run.name=nimble-otter", "run.dir=somewhere"])
    assert run_dir_of(config).root == Path("somewhere/nimble-otter")
    assert run_dir_of(config).site("site-a").checkpoints == Path("somewhere/nimble-otter/sites/site-a/checkpoints")
    with pytest.raises(ConfigError, match=r"run\.name is null"):
        run_dir_of(compose([]))


def test_a_run_has_lost_its_data_when_it_published_and_no_snapshot_is_left(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert not run_dir.has_lost(run_dir.syncer), "nothing has happened in it"
    (run_dir.syncer / "snapshots" / "00000001").mkdir(parents=True)
    run_dir.events.write_text('{"at": 1, "who": "syncer", "what": "syncer_started"}\n')
    assert not run_dir.has_lost(tmp_path / "elsewhere"), "no site has anything that a new run would not know"
    with run_dir.events.open("a") as events:
        events.write('{"at": 1, "who": "syncer", "what": "published", "version": 1}\n')
    assert not run_dir.has_lost(run_dir.syncer)
    (run_dir.syncer / "snapshots" / "00000001").rename(run_dir.syncer / "snapshots" / "damaged-00000001")
    assert run_dir.has_lost(run_dir.syncer)
    assert run_dir.has_lost(tmp_path / "elsewhere")


def test_a_name_is_two_words_fit_for_a_folder_and_not_given_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def named() -> str:
        config = replace(RunConfig(), run=RunSection(dir=str(tmp_path)))
        for _ in range(2):
            name_run(config)
            run_dir_of(config).root.mkdir(exist_ok=True)  # Named once, it keeps its name.
        assert is_name(config.run.name or "")
        return run_dir_of(config).root.name

    monkeypatch.setattr("diloco.config.run_dir.HOW", "nimble quick")
    monkeypatch.setattr("diloco.config.run_dir.WHO", "otter")
    assert {named(), named()} == {"nimble-otter", "quick-otter"}
    assert re.fullmatch("(nimble|quick)-otter-[0-9a-f]{8}", named()), "there is always one"
    assert all(is_name(f"{how}-{who}") for how in HOW.split() for who in WHO.split())
    assert not any(is_name(name) for name in ("", "-a", "a/b", "a b", "é", "x" * 65, ".."))
