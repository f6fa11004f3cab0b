"""A standby takes over by itself as heir only, and otherwise by an operator's word, who hears why not."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.durable import PLAIN_DISK, Disk
from diloco.sync.leadership import Claim
from diloco.sync.state import FragmentState, OuterState
from diloco.syncer import standby as succession_module
from diloco.syncer.lease import FileLease, Lease, LeaseHolder, remembered
from diloco.syncer.standby import StandbyError, Succession, Warm, begun_anew
from tests.loopback.cluster import Log, SiteThread, eventually, free_port, serving
from tests.syncer.leases import taken
from tests.syncer.test_standby import BOUND_S, STEP_S, a_toy, following

TTL_S = 0.6


class Scene:
    """A lease that "first" holds, and a standby's succession; the standby itself is a few values."""

    def __init__(self, folder: Path) -> None:
        self.path, self.log, self.taken = folder / "lease.json", Log(), Log()
        self.held = taken(self.lease())
        state = OuterState([FragmentState()], epoch=1)
        self.name = remembered(folder, PLAIN_DISK, "second").name
        standby = SimpleNamespace(
            identity=self.name,
            folder=folder,
            disk=PLAIN_DISK,
            emit=self.log.emit,
            state=lambda: state,
            fail=lambda error: self.log.emit("failed", {"error": error}),
        )
        self.succession = Succession(standby, self.lease(), lambda: self.taken.emit("taken", {}))  # type: ignore[arg-type]

    def lease(self) -> FileLease:
        return FileLease(self.path, "run", TTL_S)


@contextmanager
def looking(scene: Scene) -> Iterator[Succession]:
    scene.succession.start()
    try:
        yield scene.succession
    finally:
        scene.succession.stop()


def test_an_heir_takes_over_by_itself_once_the_holder_is_silent_and_hands_its_lease_over(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    assert scene.held.mark(scene.name)
    with looking(scene) as succession:
        scene.taken.wait_for("taken", 1, BOUND_S)
        warm = succession.hand_over(Warm(None, None, None, None), lossy=False)  # type: ignore[arg-type]
        assert warm.leadership is not None
        assert warm.leadership.epoch == 2
        assert warm.leadership.valid()
        warm.leadership.stop(release=True)
    assert not scene.held.renew()


def test_who_is_not_the_heir_never_does_and_an_operator_hears_why(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    with looking(scene) as succession:
        eventually(lambda: "holds the lease" in str(succession.refusal(lossy=True)), BOUND_S, "it was read")
        eventually(lambda: succession.refusal(lossy=True) is None, BOUND_S, "it has run out")
        assert "not the heir of first" in str(succession.refusal(lossy=False))
        assert scene.taken.of("taken") == []
        assert succession.status() == {
            "place": f"file:{scene.path}",
            "epoch": 1,
            "holder": "first",
            "is_heir": False,
            "vacant": True,
            "trouble": None,
        }
    assert scene.held.renew(), "nobody has taken it"


def test_a_syncer_that_stopped_in_order_is_followed_by_an_operators_word_only(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    assert scene.held.mark(scene.name)
    scene.held.release()
    with looking(scene) as succession:
        eventually(lambda: succession.refusal(lossy=False) is None, BOUND_S, "the heir may, at once")
        assert scene.taken.of("taken") == []


def test_a_lease_that_cannot_be_read_lets_nobody_take_over_and_is_said(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.path.write_text("{")
    with looking(scene) as succession:
        scene.log.wait_for("note", 1, BOUND_S, where=lambda note: "no lease that can be trusted" in str(note["why"]))
        assert "is not known" in str(succession.refusal(lossy=True))


def test_whatever_else_goes_wrong_while_it_looks_ends_the_standby_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path)
    assert scene.held.mark(scene.name)

    def broken(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("diloco.syncer.standby.try_to_lead", broken)
    with looking(scene):
        (failed,) = scene.log.wait_for("failed", 1, BOUND_S)
    assert isinstance(failed["error"], StandbyError)
    assert "nobody looks at the lease" in str(failed["error"])
    assert "Input/output error" in str(failed["error"])


def test_a_full_disk_when_the_lease_is_there_to_be_taken_is_said_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, lead, left = Scene(tmp_path), succession_module.try_to_lead, [2]
    assert scene.held.mark(scene.name)

    def full(lease: Lease, folder: Path, disk: Disk, claim: Claim, emit: Any) -> LeaseHolder | None:
        """The lease is taken by then; what the folder remembers of it finds no room."""
        leadership = lead(lease, folder, disk, claim, emit)
        if leadership is not None and left[0]:
            left[0] -= 1
            leadership.stop(release=False)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return leadership

    monkeypatch.setattr("diloco.syncer.standby.try_to_lead", full)
    with looking(scene):
        scene.log.wait_for("note", 1, BOUND_S, where=lambda note: "disk full: No space left" in str(note["why"]))
        scene.taken.wait_for("taken", 1, BOUND_S)
    assert left == [0]


def test_an_heir_whose_folder_may_not_lead_says_why(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    assert scene.held.mark(scene.name)
    (tmp_path / "leadership.json").write_text("{")
    with looking(scene) as succession:
        scene.log.wait_for("note", 1, BOUND_S, where=lambda note: "cannot be read: remove it" in str(note["why"]))
        assert "cannot be read" in str(succession.status()["trouble"])  # type: ignore[index]


@pytest.mark.parametrize(
    ("hears", "lacks", "why"),
    [
        (False, None, None),
        (True, None, "still heard: stop that first, so that never two lead; or promote this one with --lossy"),
        (False, "it was not waited for", "it was not waited for, so that this standby may lack what was told: start"),
    ],
)
def test_without_a_lease_an_operators_word_is_enough_where_nothing_speaks_against_it(
    tmp_path: Path, hears: bool, lacks: str | None, why: str | None
) -> None:
    standby = SimpleNamespace(identity="second", folder=tmp_path, still_hears=lambda: hears, may_lack=lambda: lacks)
    succession = Succession(standby, None, lambda: pytest.fail("nobody asked for it"))  # type: ignore[arg-type]
    succession.start()
    found = succession.refusal(lossy=False)
    assert found is None if why is None else why in str(found)
    assert succession.refusal(lossy=True) is None, "a new lineage fences either"
    assert succession.status() is None
    succession.stop()


def test_what_an_operator_gives_up_begins_a_new_lineage_that_sites_start_over_in(tmp_path: Path) -> None:
    """The standby lacks what was told after it had gone: sites that know it start over from what there is."""
    toy = a_toy(tmp_path, mode="async")
    second = free_port()
    with following(toy, f"127.0.0.1:{toy.port}") as (standby, _):
        with serving(toy) as (syncer, address, first), SiteThread(toy, "a", address, step_s=STEP_S):
            first.wait_for("published", 8, BOUND_S)
            eventually(lambda: standby.ready, BOUND_S, "it has a state")
            warm = standby.promote()
            had = [fragment.version for fragment in warm.machine.state.fragments]
            first.wait_for("published", len(first.of("published")) + 6, BOUND_S)
            there = [fragment.version for fragment in syncer.core.ask(lambda machine: machine.state.fragments)]
        assert max(there) > max(had)
        log = Log()
        promoted = toy.syncer(log.emit, folder="standby", port=second)
        address = promoted.start(begun_anew(warm, "a test gave it up", 1_795_000_000))
        try:
            lineage, fragments = promoted.core.ask(lambda machine: (machine.state.lineage, machine.state.fragments))
            assert lineage == 1_795_000_000
            assert [fragment.version for fragment in fragments] == [version + 1 for version in had]
            with SiteThread(toy, "a", address, step_s=STEP_S) as site:
                site.log.wait_for("adopted", 6, BOUND_S, where=lambda event: event["merged"])
        finally:
            promoted.stop()
