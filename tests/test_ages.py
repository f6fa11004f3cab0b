"""`make bench` says which of the kept rows are older than the last change of what they measure."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks import ages


def git(folder: Path, *words: str) -> str:
    named = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(["git", *named, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def changed(folder: Path, package: str) -> str:
    path = folder / "diloco" / package / "a.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("1\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", package)
    return git(folder, "rev-parse", "--short", "HEAD")


def test_a_row_is_as_old_as_the_changes_of_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init", "-q")
    first = changed(tmp_path, "codec")
    changed(tmp_path, "wire")
    changed(tmp_path, "codec")
    monkeypatch.setattr(ages, "ROOT", tmp_path)
    assert ages.changes_since(first, "2026-01-01", ("codec",)) == 1
    assert ages.changes_since(first, "2026-01-01", ("codec", "wire")) == 2
    assert ages.changes_since("0123abc", "2000-01-01", ("codec",)) == 2, "git does not know the commit"
    assert ages.changes_since(first, "2026-01-01", ()) == 0


def test_what_is_measured_is_there() -> None:
    named = {name for packages in [*ages.MEASURED.values(), ages.HUNTED] for name in packages}
    assert all((ages.ROOT / "diloco" / name).is_dir() for name in named)
    assert set(ages.MEASURED) <= {path.stem for path in ages.RESULTS.glob("*.jsonl")}
