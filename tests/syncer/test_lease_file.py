"""The lease in a file: one winner an epoch, nothing taken that is renewed, no free pass by a damaged file."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from diloco.durable import Disk, KillingDisk, Step
from diloco.sync.leadership import Claim, Standing
from diloco.syncer import lease as lease_module
from diloco.syncer.lease import FileLease, LeaseError, LeaseRefusedError
from tests.forked import forkserver
from tests.syncer.leases import FIRST, taken

TTL_S = 10.0
SECOND = Claim("second", 0, 1, by_itself=True)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lease.json"


def test_an_heir_takes_over_when_the_count_has_stood_still_for_the_holders_own_time(path: Path) -> None:
    holder, clock = FileLease(path, "run", TTL_S), Clock()
    held = taken(holder)
    assert held.mark("second")
    heir = FileLease(path, "run", 1.0, clock_s=clock)
    assert heir.acquire(SECOND) is None
    clock.now_s += TTL_S - 0.1
    assert heir.acquire(SECOND) is None, "the holder's time counts, not the taker's shorter one"
    assert held.renew()
    clock.now_s += 0.2
    assert heir.acquire(SECOND) is None, "it was renewed"
    clock.now_s += TTL_S
    second = taken(heir, SECOND)
    assert second.epoch == held.epoch + 1
    assert heir.read() == Standing(second.epoch, 1, "second", "", released=False)
    assert not held.renew()
    assert not held.mark("anybody")
    held.release()
    assert heir.read() == Standing(second.epoch, 1, "second", "", released=False), "what is not held is not given back"


def test_what_was_renewed_between_the_look_and_the_lock_is_not_taken(path: Path) -> None:
    held, clock = taken(FileLease(path, "run", TTL_S)), Clock()
    assert held.mark("second")
    heir = FileLease(path, "run", TTL_S, clock_s=clock)
    assert heir.acquire(SECOND) is None
    clock.now_s += TTL_S
    looked = heir._watched

    def look_and_be_late() -> object:
        content = looked()
        assert held.renew()
        heir._watched = looked  # type: ignore[method-assign]
        return content

    heir._watched = look_and_be_late  # type: ignore[assignment, method-assign]
    assert heir.acquire(SECOND) is None


def test_the_same_folder_takes_it_again_at_once_and_a_stranger_never(path: Path) -> None:
    first = taken(FileLease(path, "run", TTL_S))
    again = taken(FileLease(path, "run", TTL_S), replace(FIRST, anew=False, epoch=7))
    assert again.epoch == 8
    assert not first.renew(), "who had it under the same name before is fenced as anybody else"
    again.release()
    with pytest.raises(LeaseRefusedError, match="may lack"):
        FileLease(path, "run", TTL_S).acquire(Claim("third", 8, 1))
    with pytest.raises(LeaseRefusedError, match="is the lease of run 'run'"):
        FileLease(path, "other", TTL_S).acquire(FIRST)


def test_a_lease_that_was_given_back_is_free_at_once_but_not_for_an_heir_by_itself(path: Path) -> None:
    held = taken(FileLease(path, "run", TTL_S))
    assert held.mark("second")
    held.release()
    with pytest.raises(LeaseRefusedError, match="not the heir of a syncer that fell silent"):
        FileLease(path, "run", TTL_S).acquire(SECOND)
    assert taken(FileLease(path, "run", TTL_S), replace(SECOND, by_itself=False)).epoch == 2


def change(**fields: object) -> Callable[[bytes], bytes]:
    def changing(data: bytes) -> bytes:
        plain = json.loads(data)
        plain["lease"]["standing"].update(fields)
        return json.dumps(plain).encode()

    return changing


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-20],
        lambda data: bytes(len(data)),
        lambda data: b"[" * 4000,
        lambda data: data * 20,
        lambda data: b'{"format": 1}',
        lambda data: data.replace(b'"format": 1', b'"format": 2'),
        change(epoch=4),
        change(holder="second"),
        change(released=True),
    ],
)
def test_a_damaged_lease_is_an_error_in_words_for_everybody(path: Path, damage: Callable[[bytes], bytes]) -> None:
    lease = FileLease(path, "run", TTL_S)
    held = taken(lease)
    path.write_bytes(damage(path.read_bytes()))
    damaged = path.read_bytes()
    for claim in (FIRST, SECOND, Claim("third", 9, 9)):
        with pytest.raises(LeaseError, match=r"lease\.json is no lease that can be trusted"):
            FileLease(path, "run", TTL_S).acquire(claim)
    for change_it in (held.renew, lambda: held.mark("second"), lambda: held.release()):
        with pytest.raises(LeaseError, match="nobody takes it"):
            change_it()
    assert path.read_bytes() == damaged


def test_a_lease_that_has_gone_is_an_error_in_words(path: Path) -> None:
    held = taken(FileLease(path, "run", TTL_S))
    path.unlink()
    with pytest.raises(LeaseError, match="was removed"):
        held.renew()
    with pytest.raises(LeaseRefusedError, match="there is no lease at"):
        FileLease(path, "run", TTL_S).acquire(Claim("first", 1, 1))
    with pytest.raises(LeaseError, match="No such file"):
        FileLease(path.parent / "gone" / "lease.json", "run", TTL_S).acquire(FIRST)


def test_a_lock_that_somebody_keeps_is_waited_for_a_bounded_time(path: Path) -> None:
    held = taken(FileLease(path, "run", 0.4))
    with path.with_name("lease.json.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(LeaseError, match="locked by another process"):
            held.renew()
    assert held.renew()


class Frozen(Disk):
    """Stops in the middle of the next write, until it is let go on."""

    def __init__(self, at: str) -> None:
        self.at = at
        self.there, self.go_on = threading.Event(), threading.Event()

    def _stop(self, at: str) -> None:
        if at == self.at:
            self.there.set()
            assert self.go_on.wait(60.0)

    def make(self, path: Path, write: Callable[[Path], object], step: Step) -> None:
        self._stop("make")
        super().make(path, write, step)

    def sync_file(self, path: Path, step: Step) -> None:
        self._stop("sync_file")
        super().sync_file(path, step)

    def sync_folder(self, folder: Path, step: Step) -> None:
        self._stop("sync_folder")
        super().sync_folder(folder, step)


@pytest.mark.parametrize("at", ["make", "sync_file", "sync_folder"])
def test_a_holder_that_is_frozen_while_it_writes_keeps_no_heir_from_the_lease(path: Path, at: str) -> None:
    disk, clock = Frozen(""), Clock()
    holder = taken(FileLease(path, "run", TTL_S, disk))
    assert holder.mark("second")
    heir = FileLease(path, "run", TTL_S, clock_s=clock)
    assert heir.acquire(SECOND) is None
    disk.at = at
    renewed: list[bool] = []
    frozen = threading.Thread(target=lambda: renewed.append(holder.renew()), daemon=True)
    frozen.start()
    assert disk.there.wait(60.0)
    assert heir.acquire(SECOND) is None
    clock.now_s += TTL_S
    second = taken(heir, SECOND)
    disk.go_on.set()
    frozen.join(60.0)
    assert renewed == [at == "sync_folder"], "what was not yet renamed is not written over the heir's"
    assert heir.read() == Standing(second.epoch, 1, "second", "", released=False)
    assert not holder.renew()
    assert sorted(each.name for each in path.parent.iterdir()) == ["lease.json", "lease.json.lock"]


EPOCHS = 30


def take_often(path: Path, name: str, together: Barrier) -> None:
    """Take it whenever it is free, write down each epoch, give it back, and leave the next one to another."""
    together.wait(60.0)
    until_s, last, mine = time.monotonic() + 50.0, None, -1
    lease = FileLease(path, "run", 100 * TTL_S)  # It is given back each time; nobody stops waiting for the file.
    with path.with_name(name).open("w") as told:
        while (last is None or last.epoch < EPOCHS) and time.monotonic() < until_s:
            last = lease.read()
            if last is not None and last.epoch == mine:
                time.sleep(0.001)
                continue
            claim = Claim(name, 0, last.lineage + 1 if last is not None else 1, anew=True)  # Never refused as older.
            with contextlib.suppress(LeaseRefusedError):  # Unless another has just begun the same lineage.
                own = lease.acquire(claim)
                if own is not None:
                    mine = own.epoch
                    told.write(f"{mine}\n")
                    lease.change(own, released=True)


def test_a_file_system_that_locks_nothing_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "lock", lambda file: None)
    with pytest.raises(LeaseError, match="without locks"):
        FileLease(path, "run", TTL_S).acquire(FIRST)

    def unknown(file: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(lease_module, "lock", unknown)
    with pytest.raises(LeaseError, match="No locks available"):
        FileLease(path, "run", TTL_S).acquire(FIRST)
    assert not path.exists()


def test_of_many_that_try_at_once_exactly_one_has_each_epoch(path: Path) -> None:
    context = forkserver()
    names = [f"taker-{n}" for n in range(4)]
    together = context.Barrier(len(names))
    takers = [context.Process(target=take_often, args=(path, name, together)) for name in names]
    for taker in takers:
        taker.start()
    for taker in takers:
        taker.join(60.0)
        assert taker.exitcode == 0
    won = {name: [int(line) for line in path.with_name(name).read_text().splitlines()] for name in names}
    epochs = sorted(epoch for each in won.values() for epoch in each)
    assert epochs == list(range(1, len(epochs) + 1)), "each epoch was given once, and none was left out"
    assert sum(bool(each) for each in won.values()) > 1
    assert len(epochs) >= EPOCHS


def take_and_die(path: Path, passage: int) -> None:
    FileLease(path, "run", TTL_S, KillingDisk(Step.LEASE_WRITE, passage)).acquire(Claim("first", 1, 1))


@pytest.mark.parametrize("passage", range(1, 9))
def test_a_death_while_it_is_written_leaves_the_old_lease_or_the_new_one(path: Path, passage: int) -> None:
    lease = FileLease(path, "run", TTL_S)
    before = taken(lease)
    process = forkserver().Process(target=take_and_die, args=(path, passage))
    process.start()
    process.join(60.0)
    assert process.exitcode == -9
    renamed = passage > 5
    assert lease.read() == Standing(before.epoch + renamed, 1, "first", "", released=False)
    assert before.renew() is not renamed
    assert taken(FileLease(path, "run", TTL_S), Claim("first", 1, 1)).epoch == before.epoch + 1 + renamed
