"""The soft limit of open files is raised to the hard one, a syncer that serves has it, and no crash leaves a core."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from diloco import open_files
from tests.runs.processes import place_in

INFINITE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("had", "has"),
    [
        ((1024, 4096), (4096, 4096)),
        ((1024, 1_000_000), (open_files.WANTED, 1_000_000)),
        ((1024, INFINITE), (open_files.WANTED, INFINITE)),
        ((256, 256), None),
        ((INFINITE, INFINITE), None),
        ((100_000, 1_000_000), None),
    ],
)
def test_the_soft_limit_is_raised_and_never_lowered(
    had: tuple[int, int], has: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: had)
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: given.append(limits))
    open_files.raise_limit()
    assert given == ([] if has is None else [has])


@pytest.mark.parametrize(
    ("had", "has"),
    [((0, 0), (0, 0)), ((0, INFINITE), (1, INFINITE)), ((INFINITE, INFINITE), (1, INFINITE))],
)
def test_no_crash_leaves_what_was_in_memory(
    had: tuple[int, int], has: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: had)
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: given.append(limits))
    open_files.leave_no_core()
    assert given == [has]


@pytest.mark.slow
def test_a_syncer_that_serves_may_open_what_the_hard_limit_allows(tmp_path: Path) -> None:
    with place_in(tmp_path) as place:
        place.open_files = (256, 600)
        syncer, _ = place.syncer("files")
        assert resource.prlimit(syncer.process.pid, resource.RLIMIT_NOFILE) == (600, 600)
