"""``diloco replay``: what it says, what it leaves behind, and what it says of nonsense."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from diloco.cli.main import main
from diloco.syncer.snapshots import read_image
from tests.models.pasts import with_a_past
from tests.syncer.building import files


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_a_past(tmp_path_factory.mktemp("replayed"))


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_every_version_is_compared_with_its_digest(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(run)
    assert main(["replay", str(run), "--verify"]) == 0
    said = capsys.readouterr().out
    assert "versions 0 0 to 8 8" in said
    assert "16 versions have the digest that the journal says, bit for bit" in said
    assert "1 snapshots hold what the journal gives" in said
    assert files(run) == before, "the folder is only read"


def test_without_an_update_it_says_what_is_gone_and_keeps_an_image(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "image"
    chosen = ["--without", "site=b:versions=3..4:fragment=1"]
    assert main(["replay", str(run), *chosen, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "left out: b, fragment 1, sequence 2, merged into version 4, 100 tokens" in said
    assert "skipped: version 4 of fragment 1: nothing of it remained; it keeps its number" in said
    assert "4 later updates were trained on a base with those inside (a 2, b 2) and are merged as they are" in said
    assert f"diloco restore {run} --from {out}" in said
    image = read_image(out)
    assert [values.version for values in image.fragments] == [8, 8]
    assert image.card["run_id"] == "past"
    assert main(["replay", str(run), *chosen, "--json"]) == 0
    facts = told(capsys)
    assert facts["digests"] == [values.digest for values in image.fragments]
    assert facts["left_out"] == [
        {"site": "b", "fragment": 1, "sequence": 2, "version": 4, "tokens": 100, "chosen": True}
    ]
    assert facts["skipped"] == [{"fragment": 1, "version": 4}]
    final = load_file(out / "model.safetensors")
    assert sum(values.numel() for values in final.values()) == sum(v.published.numel() for v in image.fragments)
    assert all(bool(torch.isfinite(values).all()) for values in final.values())


def test_up_to_a_version(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run), "--to", "3", "--json"]) == 0
    facts = told(capsys)
    assert facts["versions"] == [3, 3]
    assert facts["versions_compared"] == 6


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--without", "b"], 2, "--without 'b' has 'b': site=NAME"),
        (["--without", "site=x:versions=1"], 1, "the run has no site x; it has a, b"),
        (["--without", "site=b:versions=90..99"], 1, "no such update was merged"),
        (["--to", "-1"], 2, "--to is -1"),
        (["--to", "x"], 2, "invalid int value"),
        (["--out", "."], 2, "--out is '.': it exists already"),
    ],
)
def test_nonsense_is_one_line(
    run: Path, arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(run), *arguments]) == code
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_a_run_without_data_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path)]) == 2
    assert "is no run folder" in capsys.readouterr().err
    (tmp_path / "events.jsonl").touch()
    assert main(["replay", str(tmp_path)]) == 2
    assert "has no config.yaml" in capsys.readouterr().err
