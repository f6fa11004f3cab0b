from __future__ import annotations

from pathlib import Path

import pytest

from diloco.inner import checkpoint
from diloco.inner.checkpoint import CheckpointError
from diloco.inner.corpus import DataError
from diloco.launch.config import compose
from diloco.launch.errors import ConfigError, ExitCode, VerbError
from diloco.launch.site_rank import Place, check_resume, ending, in_words, join_group, place_from_environment
from diloco.learner.agent import Finished

TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_a_rank_knows_its_place_from_torchruns_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    assert place_from_environment() is None
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert place_from_environment() == Place(3, 1, 4, "10.0.0.1", 29500)
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(VerbError, match="make no sense"):
        place_from_environment()


def test_resume_is_what_the_user_said(tmp_path: Path) -> None:
    never, must, auto = (compose([f"run.resume={word}"]) for word in ("never", "must", "auto"))
    check_resume(never, tmp_path)
    check_resume(auto, tmp_path)
    with pytest.raises(ConfigError, match="there is no checkpoint in"):
        check_resume(must, tmp_path)
    checkpoint.save(tmp_path, "step-1", {}, {})
    check_resume(must, tmp_path)
    check_resume(auto, tmp_path)
    with pytest.raises(ConfigError, match="take another run"):
        check_resume(never, tmp_path)


@pytest.mark.parametrize(
    ("how", "resumed_step", "code", "words"),
    [
        ("finished", None, ExitCode.OK, "site-a finished: 1,000 tokens processed (900 merged, 100 lost)"),
        ("drained", None, ExitCode.DRAINED, "the same command goes on"),
        ("left", 40, ExitCode.DRAINED, "had gone on from step 40"),
    ],
)
def test_an_ending_has_a_code_and_says_where_the_tokens_are(
    how: str, resumed_step: int | None, code: ExitCode, words: str
) -> None:
    ledger = {"processed": 1000, "merged": 900, "refused": 0, "lost": 100}
    got, text = ending("site-a", Finished(how, "why", ledger), resumed_step)
    assert got is code
    assert words in text


def test_a_site_that_gave_up_failed() -> None:
    with pytest.raises(VerbError, match="site-a stopped: five discards in a row") as ended:
        ending("site-a", Finished("failed", "five discards in a row", {}), None)
    assert ended.value.code is ExitCode.FAILED


def test_what_training_says_becomes_one_line() -> None:
    for error, kind in (
        (DataError("no text"), ConfigError),
        (CheckpointError("damaged"), VerbError),
        (TimeoutError("in vain"), VerbError),
    ):
        with pytest.raises(kind, match=str(error)), in_words():
            raise error


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"site\.device is 'tpu'"):
        join_group(compose(["site.device=tpu"]), Place())
