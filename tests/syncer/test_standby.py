"""A standby beside a syncer, over real sockets: it has what is acknowledged, waits are in words, and it takes over."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.durable import PLAIN_DISK, Disk, DiskFullError
from diloco.outer.optimizer import OuterOptimizerOptions, OuterRule
from diloco.sync.options import HealthOptions, OuterOptions
from diloco.sync.state import FragmentState, OuterState
from diloco.syncer.lease import FileLease, LeaseHolder, remembered
from diloco.syncer.options import RunPlan
from diloco.syncer.standby import Incoming, Standby, StandbyError, StandingBy, Warm, try_to_lead
from diloco.wire.chunks import cut
from diloco.wire.client import AdminClient
from diloco.wire.messages import Chunk, Item, ProbeAsk, Refused, Status, Unreachable
from diloco.wire.options import SecurityOptions, ServerOptions
from tests.loopback.cluster import Log, SiteThread, eventually, free_port, serving
from tests.loopback.toy import Toy
from tests.syncer.building import LAYOUT, RUN, agreement, no_room, refused
from tests.syncer.leases import taken

BOUND_S = 40.0
STEP_S = 0.005
TIMES: dict[str, object] = {"timeout_s": 2.0, "alive_s": 0.2}


def a_toy(folder: Path, mode: str = "sync", **changes: object) -> Toy:
    outer = {"grace": "fixed", "grace_ns": 5_000_000, "num_fragments": 2}
    return Toy(
        folder=str(folder),
        codec="int8",
        inner_steps=4,
        outer=outer,
        port=free_port(),
        replication={"mode": mode, **TIMES},
        **changes,  # type: ignore[arg-type]
    )


@contextmanager
def following(
    toy: Toy, address: str, folder: str = "standby", disk: Disk = PLAIN_DISK
) -> Iterator[tuple[Standby, Log]]:
    log = Log()
    standby = toy.standby(folder, address, log.emit, disk)
    standby.start()
    try:
        yield standby, log
    finally:
        standby.close()


def test_nothing_is_acknowledged_without_a_standby_unless_an_operator_says_so_and_until_one_has_caught_up(
    tmp_path: Path,
) -> None:
    def held(log: Log, times: int) -> str:
        return str(log.wait_for("note", times, BOUND_S, where=lambda note: note["note"] == "held")[-1]["why"])

    toy = a_toy(tmp_path, snapshot_every=1000)  # So that the journal which the standby goes on from is still kept.
    with serving(toy) as (_, address, log), AdminClient(address) as operator:
        assert "no standby has followed" in held(log, 1)
        assert "diloco standby detach" in str(operator.status()["wanting"])
        with pytest.raises(Refused, match="not a standby"):
            operator.promote()
        with SiteThread(toy, "a", address, step_s=STEP_S) as site:
            with following(toy, address):
                site.log.wait_for("pushed", 3, BOUND_S)
            pushed = len(site.log.of("pushed"))
            assert "the standby is away" in held(log, 2)
            steps = site.toy_site.trained
            eventually(lambda: site.toy_site.trained > steps + 20, BOUND_S, "the site trains on")
            assert len(site.log.of("pushed")) <= pushed + 2
            operator.detach()
            site.log.wait_for("pushed", pushed + 4, BOUND_S)
            assert operator.status()["replication"]["detached"] is True  # type: ignore[index]
            with following(toy, address):
                log.wait_for("standby_attached", 1, BOUND_S)
                site.log.wait_for("pushed", len(site.log.of("pushed")) + 4, BOUND_S)
    with serving(toy) as (_, address, log):
        assert "no standby has followed" in held(log, 1), "it is waited for again, also after a restart"
        with following(toy, address):
            log.wait_for("note", 1, BOUND_S, where=lambda note: note["note"] == "goes_on")


# --- What comes of the syncer's files is whole under its name, or not there ------------------------------------------

DATA = bytes(range(200))
NAME = "spool/a/0-1-d.update"


def incoming(folder: Path, name: str = NAME, digest: str = "", disk: Disk = PLAIN_DISK) -> Incoming:
    store = SimpleNamespace(folder=folder, disk=disk)
    item = Item(name, 0, 0, len(DATA), digest or hashlib.sha256(DATA).hexdigest())
    return Incoming(store, item)  # type: ignore[arg-type]


def bring(found: Incoming) -> bytes:
    """All of it, and its name."""
    try:
        for piece in cut([DATA], 0, len(DATA), lambda: 64):
            found.accept(Chunk.of(*piece))
        return found.finish()
    finally:
        found.discard()


@pytest.mark.parametrize(
    ("name", "path"),
    [
        (NAME, NAME),
        ("snapshots/00000007/state.json", "snapshots/.incoming-00000007/state.json"),
    ],
)
def test_a_file_has_its_name_when_it_is_whole(tmp_path: Path, name: str, path: str) -> None:
    found = incoming(tmp_path, name)
    half, rest = DATA[:100], DATA[100:]
    found.accept(Chunk.of(0, memoryview(half)))
    assert not found.complete
    found.accept(Chunk.of(100, memoryview(rest)))
    assert found.complete
    assert not (tmp_path / path).exists()
    assert found.finish() == b""
    assert (tmp_path / path).read_bytes() == DATA
    assert [each.name for each in (tmp_path / path).parent.iterdir()] == [(tmp_path / path).name]


def test_what_is_not_what_was_declared_gets_no_name(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="is not what was declared"):
        bring(incoming(tmp_path, digest="0" * 64))
    damaged = incoming(tmp_path)
    with pytest.raises(Unreachable, match="Follow: "):
        damaged.accept(Chunk(0, memoryview(DATA), 1))
    damaged.discard()
    assert list((tmp_path / "spool" / "a").iterdir()) == []


@pytest.mark.parametrize(
    ("operation", "full"),
    [("make_folder", True), ("open", True), ("write", True), ("rename", True), ("sync", False)],
)
def test_where_there_is_no_room_nothing_is_left_and_a_sync_that_fails_is_final(
    tmp_path: Path, operation: str, full: bool
) -> None:
    (tmp_path / "spool" / "a").mkdir(parents=True)
    setattr(disk := Disk(), operation, no_room)
    with pytest.raises(OSError, match="No space left") as failed:
        bring(incoming(tmp_path, disk=disk))
    assert isinstance(failed.value, DiskFullError) is full
    assert list((tmp_path / "spool" / "a").iterdir()) == []


def test_what_only_a_syncer_gives_is_asked_for_there_and_a_probe_is_told_where_that_is() -> None:
    plan = RunPlan(agreement(), LAYOUT, "shared", OuterOptions(), OuterRule(OuterOptimizerOptions()), HealthOptions())
    api = StandingBy(SimpleNamespace(plan=plan), "host:7077", None, None)  # type: ignore[arg-type]
    for method in ELSEWHERE.split():
        with refused(Status.UNAVAILABLE, "this is the standby of host:7077: ask there"):  # A site tries the next one.
            getattr(api, method)()
    told = api.probe(ProbeAsk(2, RUN, shared_config={"outer.lr": "9"}))
    assert (told.standby_of, told.run_id) == ("host:7077", RUN)
    assert told.difference


# --- What only a syncer gives is asked for there --------------------------------------------------------------------

ELSEWHERE = "join open_push watch pull report leave drain evict readmit admit refuse snapshot detach"


# --- It takes over by itself as heir only, and otherwise by an operator's word, who hears why not --------------------

TTL_S = 0.6


class Scene:
    """A lease that "first" holds, and a standby's process; what follows in it is a few values.  It looks at the lease
    as long as it is entered."""

    def __init__(self, folder: Path, *, heir: bool = True) -> None:
        self.path, self.log = folder / "lease.json", Log()
        self.held = taken(self.lease())
        state = OuterState([FragmentState()], epoch=1)
        self.name = remembered(folder, PLAIN_DISK, "second").name
        assert not heir or self.held.mark(self.name)
        standby = SimpleNamespace(
            identity=self.name,
            store=SimpleNamespace(folder=folder, disk=PLAIN_DISK, emit=self.log.emit),
            emit=self.log.emit,
            failed=None,
            start=lambda: None,
            status=dict,
            state=lambda: state,
            promote=lambda: Warm(None, None, None, None),  # type: ignore[arg-type]
            close=lambda: None,
            fail=lambda error: self.log.emit("failed", {"error": error}),
        )
        network = ServerOptions(run_id=RUN, address="127.0.0.1:0")
        self.standing = StandingBy(standby, "host:7077", network, SecurityOptions(), lease=self.lease())  # type: ignore[arg-type]

    def lease(self) -> FileLease:
        return FileLease(self.path, "run", TTL_S)

    def note(self, words: str) -> None:
        self.log.wait_for("note", 1, BOUND_S, where=lambda note: words in str(note["why"]))

    def __enter__(self) -> StandingBy:
        self.standing.start()
        return self.standing

    def __exit__(self, *_: object) -> None:
        self.standing.stop()
        assert "succession" not in {thread.name for thread in threading.enumerate()}


def test_who_is_not_the_heir_never_does_and_an_operator_hears_why(tmp_path: Path) -> None:
    scene = Scene(tmp_path, heir=False)
    with scene as standing:
        eventually(lambda: "holds the lease" in str(standing.refusal(lossy=True)), BOUND_S, "it was read")
        eventually(lambda: standing.refusal(lossy=True) is None, BOUND_S, "it has run out")
        assert "not the heir of first" in str(standing.refusal(lossy=False))
        assert not standing.promoted.is_set()
        told = {"epoch": 1, "holder": "first", "is_heir": False, "vacant": True, "trouble": None}
        assert standing.status()["lease"] == {"place": f"file:{scene.path}", **told}
        assert scene.held.renew(), "nobody has taken it"
        scene.path.write_text("{")
        scene.note("is not a valid lease")
        eventually(lambda: "is not known" in str(standing.refusal(lossy=True)), BOUND_S, "nobody may take over")


def test_a_syncer_that_stopped_in_order_is_followed_by_an_operators_word_only(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.held.release()
    with scene as standing:
        eventually(lambda: standing.refusal(lossy=False) is None, BOUND_S, "the heir may, at once")
        assert not standing.promoted.is_set()


def test_an_heir_whose_folder_may_not_lead_says_why(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    (tmp_path / "leadership.json").write_text("{")
    with scene as standing:
        scene.note("cannot be read: remove it")
        assert "cannot be read" in str(standing.status()["lease"])


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_an_heir_takes_over_once_the_holder_is_silent_also_after_a_full_disk_and_any_other_failure_ends_it_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    scene, lead, left = Scene(tmp_path), try_to_lead, [2]

    def failing(*args: Any, by_itself: bool) -> LeaseHolder | None:
        """The lease is taken by then; what the folder remembers of it finds no room."""
        leadership = lead(*args, by_itself=by_itself)
        if leadership is not None and left[0]:
            left[0] -= 1
            leadership.stop(release=False)
            raise OSError(error, os.strerror(error))
        return leadership

    monkeypatch.setattr("diloco.syncer.standby.try_to_lead", failing)
    with scene as standing:
        if error == errno.ENOSPC:
            scene.note("disk full: No space left")
            warm = standing.wait(BOUND_S)
            assert left == [0]
            assert warm.leadership.epoch == 4, "one more with each taking"
            assert warm.leadership.status()["valid"], "it hands over the lease that it has taken"
            warm.leadership.stop(release=True)
            assert not scene.held.renew()
            return
        (failed,) = scene.log.wait_for("failed", 1, BOUND_S)
    assert isinstance(failed["error"], StandbyError)
    assert "no longer watches the lease" in str(failed["error"])
    assert "Input/output error" in str(failed["error"])
