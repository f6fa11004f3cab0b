"""A share of the floods of frames in every run: what is done about each kind, and that nothing is left of it."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hunts import http2
from tests.hunts.crowd import memory_of
from tests.hunts.frame_floods import FLOODS, Due, flood
from tests.hunts.hostile import FLOOD_BYTES_MAX, ORDER
from tests.hunts.target import Target, _kept, guarded, running
from tests.sooner import sooner

SITE = "site-b"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    fortress, _ = guarded("tokens", tmp_path_factory.mktemp("floods"), [SITE])
    with running(fortress) as found:
        yield found


@pytest.mark.parametrize("name", sooner(FLOODS, "rapid_resets"))
def test_a_flood_of_frames_is_dealt_with_and_changes_nothing(target: Target, name: str) -> None:
    pieces, due = FLOODS[name]
    before = target.look()
    Path(f"/proc/{target.pid}/clear_refs").write_text("5")
    found = flood(target.address, pieces(f"token-of-site-{SITE}-0123456789"), 0.5)
    assert ORDER.index(found.due) >= ORDER.index(due), found
    assert memory_of(target.pid)["VmHWM"] - before.rss_bytes < FLOOD_BYTES_MAX
    after = target.look()
    assert (after.state, after.counters.get("internal", 0)) == (before.state, 0)


@pytest.mark.parametrize(("answer", "due"), [(b"", Due.ENDED), (http2.frame(http2.RST, 0, 1, bytes(4)), Due.REFUSED)])
def test_what_is_done_about_a_flood_is_seen(answer: bytes, due: Due) -> None:
    """A peer of which it is known what it does: it hangs up at once, or says a frame in two parts and reads on."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            taken, _ = server.accept()
            with taken:
                for part in (answer[:5], answer[5:]):
                    taken.sendall(part)
                while answer and taken.recv(1 << 16):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        found = flood(f"127.0.0.1:{server.getsockname()[1]}", itertools.repeat(bytes(1000)), 0.3)
        thread.join(30)
    assert found.due is due


def test_a_folder_that_vanishes_while_the_target_is_looked_at_has_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The live syncer throws a snapshot away between the listing of its parent and its own."""
    (tmp_path / "snapshots" / ".00000012.tmp").mkdir(parents=True)
    (tmp_path / "run.json").write_text("{}")
    scandir = os.scandir

    def vanishing(place: Any) -> Any:
        if str(place).endswith(".tmp"):
            shutil.rmtree(place)
        return scandir(place)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert _kept(tmp_path) == [("run.json", 2)]
