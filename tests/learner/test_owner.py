"""A rank that owns fragments does what rank 0 says in the order in which it is said, and knows no more than rank 0."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diloco.codec.base import digest
from diloco.inner import GroupError
from diloco.learner import exchange as owners
from diloco.sync.effects import Adopt, Forget, Release, Retake, Seal, StartOver
from diloco.sync.events import Sealed, VersionFetched
from diloco.sync.progress import Sent
from diloco.wire.messages import PullHeader
from tests.learner.owned import Pair, pair
from tests.syncer.building import dice, eventually

SEAL = Seal(1, 1, 0, (), 10, 1, 1_000, 1, final=False)


def begun(found: Pair) -> None:
    """Version 0 has been fetched and taken."""
    found.site.begin(found.state)
    arrive(found, 0)
    found.site.at_boundary(Retake(1, 0, (), "first version"), "")
    found.owner.do()


def arrive(found: Pair, version: int) -> None:
    values = dice(f"v{version}", 1)
    size = 4 * values.numel()
    told = digest(values)
    header = PullHeader(1, -1, version, True, "fp32", values.numel(), size, (size,), told, 0, (), 1)
    found.owner.keep_fetched(values, VersionFetched(1, version, ()), 1, header)


def test_a_version_is_here_when_the_machine_has_taken_it_and_not_before(tmp_path: Path) -> None:
    with pair(tmp_path) as found:
        found.site.begin(found.state)
        found.knows = False
        arrive(found, 0)
        assert found.owner.tensors.latest[1] is None
        found.knows = True
        arrive(found, 0)
        latest = found.owner.tensors.latest[1]
        assert latest is not None
        assert torch.equal(latest[1], dice("v0", 1))
        assert [type(event) for event in found.told] == [VersionFetched, VersionFetched]
        assert found.tensors.latest == [None, None], "no tensor of it is rank 0's"
        assert found.tensors.told_latest[1] == digest(dice("v0", 1))


def test_an_update_is_made_sealed_and_taken_back_here(tmp_path: Path) -> None:
    with pair(tmp_path) as found:
        begun(found)
        for values in found.models[1].values():
            values.add_(1.0)
        found.site.at_boundary(SEAL, "fp32")
        found.site.order(Release(1, 1))
        found.owner.do()
        eventually(lambda: any(isinstance(event, Sealed) for event in found.told), "it is told")
        found.through()
        assert list(found.owner.tensors.sent) == [(1, 1)], "that order came before it was sealed"
        (sealed,) = found.events.of("sealed")
        assert (sealed["fragment"], sealed["sequence"]) == (1, 1)
        assert list((tmp_path / "outbox").glob("*.update")) == [tmp_path / "outbox" / "1-1.update"]
        arrive(found, 1)
        found.site.at_boundary(Adopt(1, 1, (1,)), "")
        found.owner.do()
        found.site.order(Forget(1, 1))
        assert found.owner.tensors.sent == {}
        local = found.owner.tensors.local(1)
        assert torch.allclose(local, dice("v1", 1), atol=1e-6), "what was merged is taken off"
        eventually(lambda: [event["version"] for event in found.events.of("adopted")] == [1], "it is told")
        assert found.tensors.told_base[1] == digest(dice("v1", 1))


def test_what_is_ordered_behind_a_boundary_waits_until_that_is_done(tmp_path: Path) -> None:
    with pair(tmp_path) as found:
        begun(found)
        arrive(found, 1)
        found.site.at_boundary(Adopt(1, 1, ()), "")
        found.site.order(StartOver(1))
        found.site.capture()
        assert found.owner.tensors.latest[1] is not None
        found.owner.do()
        state = found.owner.state()
        assert torch.equal(state["base.1"], dice("v1", 1))
        assert found.owner.tensors.latest[1] is None
        eventually(lambda: [event["fragment"] for event in found.events.of("started_over")] == [1], "it is told")


def test_what_is_known_of_the_run_is_told_once(tmp_path: Path) -> None:
    with pair(tmp_path) as found:
        found.site.begin(found.state)
        found.state.incarnation, found.state.epoch, found.state.lineage = 4, 5, 6
        found.site.know(found.state)
        found.site.know(found.state)
        found.through()
        machine = found.owner
        assert (machine.known.incarnation, machine.known.epoch, machine.known.lineage) == (4, 5, 6)
        assert found.clients[1].followed == [(0, 1)]
        assert machine.wanted(1, 7) == "digest"
        found.answer = None
        assert machine.wanted(1, 7) is None


def test_a_checkpoint_is_taken_up_as_far_as_the_machine_lists_it(tmp_path: Path) -> None:
    tensors = {"base.0": dice("b0", 0), "base.1": dice("b1", 1), "sent.1.3": dice("d3", 1), "sent.1.4": dice("d4", 1)}
    with pair(tmp_path, tensors) as found:
        part = found.state.fragments[1]
        found.state.fragments[0].base_version = part.base_version = 7
        part.in_flight = [Sent(3, 7, 10, 1)]
        found.tensors.told_base[1] = "seven"
        found.site.begin(found.state)
        found.through()
        own = found.owner.tensors
        assert own.base[0] is None, "that is rank 0's"
        assert own.base[1] is tensors["base.1"]
        assert list(own.sent) == [(1, 3)]
        assert own.told_base[1] == "seven"


def test_a_base_is_hashed_here_and_told_for_the_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "ECHO_EVERY_S", 0.01)
    with pair(tmp_path) as found:
        begun(found)
        found.state.fragments[1].base_version = 0
        eventually(lambda: found.site.digests((5, 0), found.state)[1] != 0, "it is hashed")
        assert found.site.digests((5, 0), found.state)[0] == 5
        found.state.fragments[1].base_version = 1
        assert found.site.digests((5, 0), found.state) == (5, 0), "of another version nothing is said"


def test_bytes_are_those_of_all_ranks(tmp_path: Path) -> None:
    with pair(tmp_path) as found:
        found.site.begin(found.state)
        found.clients[0].bytes_up, found.clients[1].bytes_up, found.clients[1].bytes_down = 3, 40, 500
        found.owner.emit("note", {"note": "x"})
        eventually(lambda: found.site.traffic() == (43, 500), "it came with what is said")


def test_without_rank_0_nobody_waits(tmp_path: Path) -> None:
    with pair(tmp_path) as found:
        found.site.begin(found.state)
        waits = threading.Thread(target=found.owner.wanted, args=(1, 1))
        found.answer = None
        found.site.close()
        waits.start()
        waits.join(10)
        assert not waits.is_alive()
        with pytest.raises(GroupError, match="rank 0 of this site is not heard any more"):
            found.owner.do()


def test_an_order_that_ends_in_an_error_keeps_nobody_when_the_rank_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise GroupError("rank 2 went away")

    with pair(tmp_path) as found:
        begun(found)
        monkeypatch.setattr(found.owner.tensors, "retake", fail)
        found.site.at_boundary(Retake(1, 0, (), "an update was refused"), "")
        with pytest.raises(GroupError, match="rank 2 went away"):
            found.owner.do()
        found.owner.close()
        hears = found.owner._channel._thread
        assert hears is not None
        assert not hears.is_alive(), "it would be waited for in vain"


def test_an_owner_that_is_gone_is_a_rank_that_is_lost_unless_the_site_ends(tmp_path: Path) -> None:
    with pair(tmp_path / "one") as found:
        found.site.begin(found.state)
        found.owner.close()
        ((what, why),) = found.heard(1)
        assert what == "lost"
        assert "rank 1 of this site is gone" in why
    with pair(tmp_path / "two") as found:
        found.site.begin(found.state)
        found.site.part()
        found.owner.close()
        assert found.told == []


def test_a_thread_that_dies_here_stops_the_site_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with pair(tmp_path) as found:
        begun(found)
        broken = replace(SEAL, in_flight=())
        found.site.at_boundary(broken, "fp32")
        monkeypatch.setattr(found.owner.outbox, "put", lambda header, payload: 1 / 0)
        found.owner.do()
        eventually(lambda: any(isinstance(event, tuple) for event in found.told), "it is told")
        ((what, why),) = [event for event in found.told if isinstance(event, tuple)]
        assert what == "give_up"
        assert "ZeroDivisionError" in why


def test_a_version_that_is_taken_again_is_told_as_its_base_only_where_it_is_the_latest(tmp_path: Path) -> None:
    with pair(tmp_path) as found:
        found.site.begin(found.state)
        found.tensors.told_latest[1] = "two"
        found.site._versions[1] = 2
        found.owner.tensors.base[1] = dice("v1", 1)
        found.site.at_boundary(Retake(1, 1, (), "an update was refused"), "")
        found.owner.do()
        assert found.tensors.told_base[1] == "", "it takes what it had"
        found.owner.tensors.arrived(1, 2, dice("v2", 1), "two")
        found.site.at_boundary(Retake(1, 2, (), "an update was refused"), "")
        found.owner.do()
        assert found.tensors.told_base[1] == "two"
        assert torch.equal(found.owner.tensors.local(1), dice("v2", 1))
