"""No test here cuts the power, so none has to wait for the disk; those about fsync put their own in its place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.syncer.server import Syncer
from tests.syncer.building import QUIET, Events, serving


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    monkeypatch.setattr(os, "fdatasync", lambda handle: None)


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def syncer(tmp_path: Path, events: Events) -> Iterator[Syncer]:
    """One that waits for two sites, and has one."""
    with serving(tmp_path, events, sites="a", **QUIET) as syncer:
        yield syncer
