"""A syncer and a site beside it, for the tests of either.

No test here cuts the power, so none has to wait for the disk; those about fsync put their own in its place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.syncer.server import Syncer
from tests.learner.direct import ALONE, Site, agent_threads, started
from tests.syncer.building import serving


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    monkeypatch.setattr(os, "fdatasync", lambda handle: None)


@pytest.fixture
def syncer(tmp_path: Path) -> Iterator[Syncer]:
    with serving(tmp_path / "syncer", **ALONE) as found:
        yield found


@pytest.fixture
def site(tmp_path: Path, syncer: Syncer) -> Iterator[Site]:
    with started(tmp_path / "a", syncer) as found:
        yield found
        found.close()  # Once more is no harm.
    assert agent_threads() == []
