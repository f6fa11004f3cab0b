"""Where a model is taken from; what the verbs make of it is in their own tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from diloco.cli.model import add_source, taken_from, version_of
from diloco.config.arguments import settings_parser
from diloco.config.errors import ConfigError, VerbError
from diloco.models.sources import Kind, kind_of
from tests.models.pasts import with_a_past


def test_versions() -> None:
    assert [version_of(text) for text in ("newest", "0", "12")] == [None, 0, 12]
    for text in ("-1", "1.5", "", "last", "²"):
        with pytest.raises(ConfigError, match="--version is"):
            version_of(text)


def test_what_lies_somewhere_is_known_by_what_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file in (
        "otter/config.json",
        "runs/warm/config.yaml",
        "runs/warm/train/checkpoints/step-1/manifest.json",
        "runs/first/events.jsonl",
        "runs/first/syncer/journal/x",
        "runs/first/sites/a/config.yaml",
        "runs/first/sites/a/checkpoints/step-1/manifest.json",
        "runs/first/syncer/final/model.safetensors",
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("")
    warm, site = Path("runs/warm/train/checkpoints"), Path("runs/first/sites/a")
    final = Path("runs/first/syncer/final/model.safetensors")
    for source, kind, path in (
        ("otter", Kind.FOLDER, Path("otter")),
        ("warm", Kind.TRAINED, warm),
        ("runs/warm", Kind.TRAINED, warm),
        (str(warm), Kind.TRAINED, warm),
        (str(warm / "step-1"), Kind.TRAINED, warm / "step-1"),
        (str(site), Kind.TRAINED, site),
        (str(site / "checkpoints"), Kind.TRAINED, site / "checkpoints"),
        (str(final), Kind.TRAINED, final),
        ("runs/first/syncer", Kind.DATA, Path("runs/first/syncer")),
        ("first", Kind.RUN, Path("runs/first")),
    ):
        assert kind_of(source) == (kind, path), source
    with pytest.raises(ConfigError, match="'nowhere' is no run folder"):
        kind_of("nowhere")


def test_a_folder_or_a_syncer_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    run = with_a_past(tmp_path, 1)
    parser = settings_parser("export", "", shown=False)
    add_source(parser)
    given = parser.parse_args(["--version", "1"])
    assert taken_from(given, [str(run)], [], 1).versions == (1, 1)
    assert os.environ["OMP_NUM_THREADS"] == "1"
    given = parser.parse_args(["--version", "1", "--syncer", "127.0.0.1:1"])
    with pytest.raises(ConfigError, match="a syncer hands out its newest alone"):
        taken_from(given, [], [], 1)
    given = parser.parse_args(["--syncer", "127.0.0.1:1"])
    with pytest.raises(VerbError, match=r"the syncer at 127\.0\.0\.1:1 does not answer"):
        taken_from(given, [], [], 1)
