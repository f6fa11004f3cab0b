"""A push on its way in: durable before its ack, refused in words, and nothing left behind by what was refused."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from diloco.codec.base import digest
from diloco.codec.merging import sums_of
from diloco.codec.registry import make_codec
from diloco.durable import DiskFullError
from diloco.sync.events import Outcome, Reason
from diloco.sync.options import PROTOCOL
from diloco.syncer.api import LARGEST, Inspection, Reception, Vitals, added, vitals_of
from diloco.syncer.server import Syncer
from diloco.syncer.spool import PartialUpdate
from diloco.syncer.store import verify
from diloco.wire.messages import PullAsk, PushHeader, PushResult, Refusal, Status
from tests.syncer.building import (
    ANYONE,
    QUIET,
    RUN,
    Events,
    dice,
    eventually,
    files,
    finish,
    join,
    memory,
    no_room,
    push,
    refused,
    report,
    serving,
    update,
)

HEADER, PAYLOAD = update()


def reception(syncer: Syncer, header: PushHeader) -> Reception:
    """A push that the syncer would admit."""
    return Reception(syncer.api, header, PROTOCOL, 0)


def spooled(folder: Path) -> list[str]:
    return sorted(files(folder / "spool"))


def spooled_open(folder: Path) -> int:
    """How many files of the spool this process has open."""
    handles = list(Path("/proc/self/fd").iterdir())
    return sum(os.readlink(each).startswith(str(folder / "spool")) for each in handles if each.is_symlink())


def test_a_push_that_broke_off_goes_on_where_its_bytes_end_and_only_what_came_is_counted(tmp_path: Path) -> None:
    with serving(tmp_path, sites="a", **QUIET) as syncer:
        for end in (10, 11, 60):
            session = reception(syncer, HEADER)
            session.write(session.offset, memoryview(PAYLOAD)[session.offset : end])
            assert spooled_open(tmp_path) > 0
            session.close()
            assert spooled_open(tmp_path) == 0
        assert syncer.api.tally.sites()["a"].counts["payload_bytes_up"] == 60
    with serving(tmp_path, **QUIET) as syncer:
        session = reception(syncer, HEADER)
        assert session.offset == 60
        assert finish(session, HEADER, PAYLOAD).outcome is Outcome.ACCEPTED
        assert push(syncer, HEADER, PAYLOAD).outcome is Outcome.DUPLICATE
        assert spooled_open(tmp_path) == 0
        assert syncer.api.tally.sites()["a"].counts["payload_bytes_up"] == len(PAYLOAD) - 60
        header, payload = update(values=dice("other", 0))
        assert finish(reception(syncer, header), header, payload).reason is Reason.CONFLICT
        assert len(spooled(tmp_path)) == 1
    with serving(tmp_path, **QUIET) as syncer:  # And it is known to the next process.
        assert push(syncer, HEADER, PAYLOAD).outcome is Outcome.DUPLICATE


def test_invariant_15_what_is_refused_leaves_nothing_and_its_number_is_free(tmp_path: Path, events: Events) -> None:
    small, encoded = update(encoding="int8")
    broken = bytes([0xFF, 0xFF]) + encoded[2:]  # The first scale becomes a NaN.
    others = digest(dice("other", 0))
    with serving(tmp_path, events, sites="a", up_codecs=["fp32", "int8"], **QUIET) as syncer:
        before, state = files(tmp_path), memory(syncer)
        with refused(Status.DATA_LOSS, "digest of the payload is not the declared one; send it again"):
            push(syncer, HEADER, PAYLOAD[:-1] + b"!")
        assert files(tmp_path) == before
        with refused(Status.INVALID_ARGUMENT, "payload is no int8"):
            push(syncer, replace(small, digest=hashlib.sha256(broken).hexdigest()), broken)
        assert files(tmp_path) == before
        bad = dice("bad", 0)
        bad[7] = float("nan")
        for header, payload, reason in (
            (*update(values=bad), Reason.NON_FINITE),
            (replace(HEADER, values_digest=others), PAYLOAD, Reason.CORRUPT),
            (replace(small, values_digest=others), encoded, Reason.CORRUPT),
        ):
            assert push(syncer, header, payload) == PushResult(Outcome.REFUSED, 0, reason, epoch=1)
            assert files(tmp_path) == before
        assert memory(syncer) == state
        note, _ = events.of("note")
        assert (note["note"], note["site"]) == ("update_corrupt", "a")
        assert "update 1 of fragment 0 decodes to other values than at the site" in note["why"]
        assert syncer.api.tally.refusals() == {"non_finite": 1, "corrupt": 2}
        assert syncer.api.tally.sites()["a"].counts["updates_corrupt"] == 2
        meant = digest(make_codec("int8").decode(encoded, HEADER.numel))
        assert push(syncer, replace(small, values_digest=meant), encoded).outcome is Outcome.ACCEPTED


def test_an_update_ahead_of_its_predecessor_keeps_its_bytes(tmp_path: Path) -> None:
    """The machine may change its mind between the first look and the commit."""
    first, (header, payload) = update(sequence=1), update(sequence=2)
    with serving(tmp_path, sites="a", outer={"quorum": 2, "quorum_min": 2, "updates_in_flight_max": 1}) as syncer:
        assert push(syncer, *first).outcome is Outcome.ACCEPTED
        assert finish(reception(syncer, header), header, payload) == PushResult(Outcome.RETRY, 0, Reason.OVERLOAD)
        again = reception(syncer, header)
        assert again.offset == len(payload)
        again.close()


def test_a_late_twin_of_a_decided_update_does_not_stay_on_the_disk(tmp_path: Path) -> None:
    with serving(tmp_path, sites="a") as syncer:
        twin = reception(syncer, HEADER)
        twin.write(0, memoryview(PAYLOAD))
        assert finish(reception(syncer, HEADER), HEADER, PAYLOAD).outcome is Outcome.ACCEPTED
        eventually(lambda: syncer.core.ask(lambda machine: machine.state.fragments[0].version) == 1, "it is merged")
        twin.close()
        assert finish(reception(syncer, HEADER), HEADER, PAYLOAD).outcome is Outcome.DUPLICATE
        assert len(spooled(tmp_path)) == 1
        for _ in range(3):
            syncer.api.snapshot()
        assert spooled(tmp_path) == []


def test_a_full_disk_is_a_reason_to_come_back_and_no_defect(
    syncer: Syncer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        session = reception(syncer, HEADER)
        session.write(0, memoryview(PAYLOAD)[:10])
        patch.setattr(PartialUpdate, "close", no_room)
        session.close()
        assert spooled(tmp_path) == []
        patch.setattr(syncer.store.disk, "sync_file", no_room)
        with refused(Status.UNAVAILABLE, "disk full: No space left on device"):
            push(syncer, HEADER, PAYLOAD)
    assert spooled(tmp_path) == [], "pages whose fsync failed count as written: every byte is sent again"
    assert push(syncer, HEADER, PAYLOAD).outcome is Outcome.ACCEPTED
    assert syncer.failed is None


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), MemoryError()])
def test_a_push_that_cannot_be_resumed_leaves_no_file_open(
    syncer: Syncer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    session = reception(syncer, HEADER)
    session.write(0, memoryview(PAYLOAD)[:60])
    session.close()
    with monkeypatch.context() as patch:
        patch.setattr(Inspection, "advance", Mock(side_effect=error))
        with pytest.raises(Refusal if isinstance(error, OSError) else MemoryError):
            reception(syncer, HEADER)
    assert spooled_open(tmp_path) == 0
    assert finish(reception(syncer, HEADER), HEADER, PAYLOAD).outcome is Outcome.ACCEPTED


def test_the_payload_is_durable_before_the_machine_hears_of_it(syncer: Syncer, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    real = os.fsync

    def noted(handle: int) -> None:
        name = os.readlink(f"/proc/self/fd/{handle}")
        steps.append("folder" if os.path.isdir(name) else "payload")
        real(handle)

    append = syncer.store.journal.append
    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(syncer.store.journal, "append", lambda turn: (steps.append("record"), append(turn))[1])
    assert push(syncer, HEADER, PAYLOAD).outcome is Outcome.ACCEPTED
    monkeypatch.undo()
    assert steps.index("payload") < steps.index("record")
    assert steps[steps.index("record") - 1] == "folder"


def test_values_are_in_memory_only_where_there_is_room_for_them(syncer: Syncer) -> None:
    checks = syncer.api.checks = threading.BoundedSemaphore(1)
    checks.acquire()
    with ThreadPoolExecutor(1) as pushing:
        done = pushing.submit(finish, reception(syncer, HEADER), HEADER, PAYLOAD)
        time.sleep(0.3)
        assert not done.done()
        checks.release()
        assert done.result(30.0) == PushResult(Outcome.ACCEPTED, 0)
    assert syncer.api.tally.sites()["a"].counts["payloads_decoded"] == 1
    assert checks.acquire(blocking=False), "there is room again"


def test_a_push_that_moves_is_a_sign_of_life_and_so_are_a_pull_and_a_report(
    syncer: Syncer, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    monkeypatch.setattr(syncer.core, "heard", heard.append)
    session = syncer.api.open_push(HEADER)
    assert heard == [HEADER.site_id]
    for at in range(0, len(PAYLOAD), -(-len(PAYLOAD) // 4)):
        session.write(at, memoryview(PAYLOAD)[at : at + -(-len(PAYLOAD) // 4)])
    assert session.commit(HEADER.digest).outcome is Outcome.ACCEPTED
    session.close()
    assert heard == [HEADER.site_id] * 5
    for more, call in (
        (1, lambda: syncer.api.pull(PullAsk(RUN, "a", 0, -1), ANYONE)),
        (2, lambda: syncer.api.report(report())),
    ):
        call()
        assert heard == [HEADER.site_id] * (5 + more)


def test_an_update_that_was_decided_when_nobody_waited_any_more_is_kept_once(
    syncer: Syncer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site hears of the full disk, and sends it again while the first attempt is still to be written."""

    def full(records: object) -> None:
        raise DiskFullError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(syncer.store.journal, "append", full)
        for _ in range(2):
            with refused(Status.UNAVAILABLE, "disk full: No space left on device"):
                finish(reception(syncer, HEADER), HEADER, PAYLOAD)
            eventually(lambda: syncer.core.held, "the loop waits")
    eventually(lambda: syncer.core.held is None, "there is room again")
    assert push(syncer, HEADER, PAYLOAD).outcome is Outcome.DUPLICATE
    eventually(lambda: not syncer.store.spool._claims, "every attempt is over")
    assert len(spooled(tmp_path)) == 1
    verify(tmp_path)


def test_an_update_like_no_other_is_refused_and_counted_or_held_and_shown(tmp_path: Path) -> None:
    with serving(tmp_path, health={"policies": {"b": "hold"}}) as syncer:
        for site in ("a", "b"):
            join(syncer, site)
        base = 0
        for sequence in range(1, 6):
            for site in ("a", "b"):
                assert push(syncer, *update(site, sequence, base_version=base)).outcome is Outcome.ACCEPTED
                base += 1
                eventually(lambda base=base: syncer.holdings.values[0].version == base, "it is merged")
        large = {"values": 1e6 * dice("large", 0), "base_version": base}
        assert push(syncer, *update("a", 6, **large)).reason is Reason.OUTLIER
        assert push(syncer, *update("b", 6, **large)).outcome is Outcome.ACCEPTED
        status: dict[str, Any] = syncer.api.status()
        assert status["refused_at_the_door"]["outlier"] == 1
        assert status["sites"]["a"]["held"] == []
        (held,) = status["sites"]["b"]["held"]
        assert (held["fragment"], held["sequence"]) == (0, 6)
        assert held["ratio"] > 1e4
        assert "norm" in held["why"]
    verify(tmp_path)  # The journal names no payload of the one that was refused.
    with serving(tmp_path, sites="a", health={"policy": "admit"}) as syncer:
        assert push(syncer, *update("a", 6, **large)).reason is Reason.OUTLIER, "judged once, also after a crash"
        status = syncer.api.status()
        assert (status["payloads_decoded"], status["sites"]["a"]["updates_refused"]) == (0, {"outlier": 1})


def test_the_largest_values_do_not_overflow_larger_ones_say_nothing_and_nothing_has_no_direction() -> None:
    """``test_api`` has what is measured of an update that arrives piece by piece."""

    def measured(values: torch.Tensor, *momentum: torch.Tensor | None) -> Vitals:
        """Of a block against each."""
        return vitals_of(reduce(added, [sums_of(values, against) for against in momentum]))

    largest = measured(torch.full((8,), LARGEST), *[torch.full((8,), -LARGEST)] * 2)
    assert (largest.norm, largest.cosine) == (pytest.approx(LARGEST * 4), pytest.approx(-1.0))
    assert measured(torch.tensor([1.0, -LARGEST * 1.01]), torch.ones(2), torch.ones(2)) == Vitals(False, 0.0, None)
    assert measured(torch.zeros(5), torch.ones(5)) == Vitals(True, 0.0, None)
    assert measured(torch.ones(5), torch.zeros(5)).cosine is None
    assert measured(torch.ones(5), None).cosine is None
    late = measured(torch.tensor([3.0, 0.0]), None, torch.tensor([0.5, 0.0]))
    assert late.cosine == pytest.approx(0.5**0.5), "what came before there was a momentum is in the norm alone"
