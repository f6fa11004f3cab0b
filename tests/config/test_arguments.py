from __future__ import annotations

import os
from pathlib import Path

import pytest

from diloco.cli.main import main
from diloco.config.arguments import OWN, goes_on, limit_threads, load_config, settings_parser
from diloco.config.compose import GROUPS, choices, compose, write
from diloco.config.keys import leaves


def test_settings_stand_on_both_sides_of_an_option_and_on_top_of_a_file(tmp_path: Path) -> None:
    write(compose(["outer=diloco", "run.seed=3"]), tmp_path / "c.yaml")
    given = settings_parser("up", "").parse_args(["seed=4", "--config", str(tmp_path / "c.yaml"), "site.id=x"])
    config = load_config(given)
    assert (config.outer.lock_step, config.run.seed, config.site.id) == (True, 4, "x")
    assert load_config(settings_parser("site", "").parse_args(["run.seed=5"])).run.seed == 5
    parser = settings_parser("status", "", file=False, shown=False)
    parser.add_argument("--watch", action="store_true")
    given = parser.parse_args(["runs/x", "--watch", "site.token_file=t"])
    assert (given.watch, given.settings) == (True, ["runs/x", "site.token_file=t"])


def test_19_the_commands_that_a_run_prints_name_what_it_keeps_of_its_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run began without the setting that the preset of this release has otherwise, and its sites still have it so.

    So a syncer or a site that starts again is part of the same run, and so is a site that joins by the printed line.
    """
    path = tmp_path / "config.yaml"
    write(compose(["outer=streaming", "outer.measure_from=adopted"]), path)
    given = settings_parser("site", "").parse_args(["outer=streaming"])
    config = goes_on(load_config(given), path, given)
    assert config.outer.measure_from == "adopted"
    assert given.settings == ["outer=streaming", "outer.measure_from=adopted"]
    assert load_config(given) == config
    assert capsys.readouterr().out == "note: outer.measure_from=adopted, as in the run's configuration\n"
    for settings in (["outer=streaming", "outer.measure_from=published"], ["--config", str(path)]):
        given = settings_parser("site", "").parse_args(settings)
        before = load_config(given)
        assert goes_on(before, path, given) == before
        assert not capsys.readouterr().out
    given = settings_parser("site", "").parse_args([])
    assert goes_on(load_config(given), tmp_path / "none.yaml", given) == load_config(given)


def test_threads_are_set_for_torch_and_for_children(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(name, "before")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    limit_threads(0)
    assert os.environ["OMP_NUM_THREADS"] == "before"
    limit_threads(3, deterministic=True)
    assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == "3"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_every_group_choice_and_key_is_listed_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["config"]) == 0
    lines = capsys.readouterr().out.replace("\n" + " " * 15, " ").splitlines()
    for group in GROUPS:
        (line,) = [line for line in lines if line.startswith(f"  {group}=")]
        assert line.partition("=")[2].replace("|", " ").split() == choices()[group]
    for key, _, _ in leaves():
        assert sum(line.startswith(f"  {key} [") for line in lines) == 1, key
    meaning = "The grace under fixed, the longest grace under adaptive, seconds."
    for told in f"outer.grace_s [1.0] {meaning}", "run.name [null]", 'data.path [""]', "outer.lock_step [false]":
        assert [line for line in lines if " ".join(line.split()).startswith(told)], "its default as a file has it"


def test_a_verb_lists_what_it_decides_as_wide_as_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for own in OWN.values():
        for begin in own:
            assert any(f"{key}=".startswith(begin) for key in [*GROUPS, *(key for key, _, _ in leaves())]), begin
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["drain", "--help"])
    said = capsys.readouterr().out
    assert "site.token_file" in said
    assert "model.layers" not in said
    with pytest.raises(SystemExit):
        main(["status", "--help"])
    assert len(capsys.readouterr().out.splitlines()) <= 60
    with pytest.raises(SystemExit):
        main(["up", "--help"])
    examples, said = "  diloco ", capsys.readouterr().out
    assert [line for line in said.splitlines() if len(line) > 80 and examples not in line] == []
    assert "  codec=       bf16 | e3m0 | fp32" in said, "and the choices of what it accepts beside"
    assert "codec.up" not in said


def test_a_setting_is_found_by_a_word_of_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    for word, line in (
        ("Prometheus", "  site.metrics ["),
        ("int4", "  codec.up ["),
        ("+auto", "codec: Encoding in both"),
        ("sparseloco", "  experiment=  "),
    ):
        assert main(["config", word]) == 0
        said = capsys.readouterr().out
        assert line in said, "of a section's text and of a group's choices too"
        assert "outer.lr " not in said
    assert main(["config", "nonsense"]) == 2
    assert "no setting has 'nonsense' in its name, its choices or its meaning" in capsys.readouterr().err
