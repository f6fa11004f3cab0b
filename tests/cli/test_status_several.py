"""The status of a run with several syncers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diloco.cli import status
from diloco.cli.main import main
from diloco.cli.status import answering, as_one, asked_all, code_of, one_line, syncer_addresses, whole_line
from diloco.config.errors import ExitCode, VerbError
from tests.cli.test_status import STATUS


def of(held: list[int], tokens: int, progress: float) -> dict[str, Any]:
    fragments = [{"version": 10 + place, "arrived": []} for place in held]
    return {**STATUS, "held": held, "run_tokens": tokens, "progress": progress, "fragments": fragments}


def away() -> dict[str, Any]:
    raise VerbError(ExitCode.UNREACHABLE, "the syncer at b:2 does not answer: refused")


def test_the_tokens_of_the_whole_are_the_mean_over_fragments() -> None:
    found = asked_all({"a:1": lambda: of([0, 2, 3], 100, 0.25), "b:2": lambda: of([1], 200, 0.5)})
    one = as_one(found)
    assert one["run_tokens"] == (3 * 100 + 200) // 4
    assert one["versions"] == {"0": 10, "1": 11, "2": 12, "3": 13}
    assert one["progress"] == [0.25, 0.5]
    line = whole_line(found)
    assert "on 2 syncers  25% to 50% of the run  versions 0:10,1:11,2:12,3:13  125 tokens merged, the mean" in line
    assert code_of(found) is ExitCode.OK
    assert one_line("a:1", found["a:1"]) == "syncer a:1 holds fragments 0,2,3 of the model, and counts them from 0:"


def test_one_that_is_away_is_named_and_the_others_are_shown() -> None:
    found = asked_all({"a:1": lambda: of([0], 100, 0.25), "b:2": away})
    assert whole_line(found).endswith("100 tokens merged, the mean over these fragments  DOES NOT ANSWER: b:2")
    assert len(answering(found)) == 1
    assert code_of(found) is ExitCode.UNREACHABLE
    assert "does not answer: refused" in one_line("b:2", found["b:2"])
    assert as_one({"b:2": {"unreachable": "gone"}})["run_tokens"] is None
    assert whole_line({"b:2": {"unreachable": "gone"}}) == "1 syncers  DOES NOT ANSWER: b:2"


def test_a_refusal_is_no_absence() -> None:
    def refuses() -> dict[str, Any]:
        raise VerbError(ExitCode.FAILED, "it does not tell")

    with pytest.raises(VerbError, match="does not tell"):
        asked_all({"a:1": refuses})


def test_the_verb_shows_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    known = {"a:1": of([0], 100, 0.25), "b:2": of([1], 100, 0.25)}
    monkeypatch.setattr(status, "_asker", lambda address, settings: lambda: known[address])
    assert main(["status", "a:1/b:2"]) == ExitCode.OK
    told = capsys.readouterr().out
    assert "on 2 syncers  25% of the run" in told
    assert told.count("nimble-otter") == 3
    assert main(["status", "a:1", "b:2", "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["run_tokens"] == 100


def test_a_run_folder_names_all_its_syncers(tmp_path: Path) -> None:
    for index, address in enumerate(("a:1", "b:2")):
        folder = tmp_path / "syncers" / str(index)
        folder.mkdir(parents=True)
        (folder / "syncer.address").write_text(address)
    assert syncer_addresses(str(tmp_path)) == ["a:1", "b:2"]
    assert syncer_addresses("a:1/b:2") == ["a:1", "b:2"]
    assert syncer_addresses("a:1") == ["a:1"]
