from __future__ import annotations

import os
from pathlib import Path

import pytest

from diloco.launch.arguments import limit_threads, load_config, settings_parser
from diloco.launch.config import compose, write
from diloco.launch.errors import ExitCode, VerbError


def test_settings_stand_between_options_and_on_top_of_a_file(tmp_path: Path) -> None:
    write(compose(["outer=diloco", "run.seed=3"]), tmp_path / "c.yaml")
    given = settings_parser("site", "").parse_args(["--config", str(tmp_path / "c.yaml"), "run.seed=4", "site.id=x"])
    config = load_config(given)
    assert (config.outer.lock_step, config.run.seed, config.site.id) == (True, 4, "x")
    assert load_config(settings_parser("site", "").parse_args(["run.seed=5"])).run.seed == 5


def test_settings_stand_on_both_sides_of_an_option(tmp_path: Path) -> None:
    write(compose([]), tmp_path / "c.yaml")
    given = settings_parser("up", "").parse_args(["seed=3", "--config", str(tmp_path / "c.yaml"), "run.seconds=5"])
    config = load_config(given)
    assert (config.run.seed, config.run.seconds) == (3, 5)
    parser = settings_parser("status", "", file=False, shown=False)
    parser.add_argument("--watch", action="store_true")
    given = parser.parse_args(["runs/x", "--watch", "site.token_file=t"])
    assert given.watch
    assert given.settings == ["runs/x", "site.token_file=t"]


def test_a_wrong_option_is_one_line() -> None:
    with pytest.raises(VerbError, match="unrecognized arguments: --nope") as ended:
        settings_parser("site", "").parse_args(["--nope"])
    assert ended.value.code is ExitCode.USAGE


def test_threads_are_set_for_torch_and_for_children(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(name, "before")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    limit_threads(0)
    assert os.environ["OMP_NUM_THREADS"] == "before"
    limit_threads(3, deterministic=True)
    assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == "3"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
