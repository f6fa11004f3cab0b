"""Record every disk operation of a small run, and check each state that a power cut may leave of it."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from types import ModuleType

import torch

from diloco.codec.base import digest
from diloco.durable import Step
from diloco.inner import checkpoint
from diloco.inner.checkpoint import CheckpointError
from diloco.learner.seal import Outbox
from diloco.sync.effects import OuterEffect
from diloco.sync.events import JoinRequested, OuterEvent
from diloco.sync.journal import JournalError
from diloco.syncer.backups import Vault, back_up
from diloco.syncer.restoring import Kept, KeptError, Known, Restore, RestoreError
from diloco.syncer.snapshots import FragmentValues, Image
from diloco.syncer.spool import SpoolError
from diloco.syncer.store import StoreError, payloads_in
from diloco.wire.messages import PushHeader
from tests.power import (
    Cut,
    Operation,
    QuietDisk,
    RecordingDisk,
    Synced,
    cuts_at,
    lay_out,
    state_after,
    told_at,
    without_syncs,
)
from tests.syncer.building import RUN, stored, update
from tests.syncer.desk import CARD, Desk
from tests.syncer.test_kept import RULES

State = tuple[str, ...]
"""The machine's snapshot and the digests of all values."""
GOES_ON_EVERY = 10
"""In one of this many states, the recovered syncer continues and is recovered once more."""


@contextlib.contextmanager
def quick_folder() -> Iterator[Path]:
    """Return a temporary folder, in memory where possible: thousands of states are created in it."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="cuts-", dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


def copied(source: Path, copy: Path) -> Path:
    """Copy a folder to a place where nothing is, or an earlier copy."""
    shutil.rmtree(copy, ignore_errors=True)
    return shutil.copytree(source, copy)


def state_of(desk: Desk) -> State:
    memory = json.dumps(desk.machine.snapshot(), sort_keys=True)
    return (memory, *(part for values in desk.values for part in _digests(values)))


def _digests(values: FragmentValues) -> tuple[str, ...]:
    remembered = [f"{name} {digest(each)}" for name, each in values.optimizer.tensors.items()]
    return str(values.version), digest(values.theta), digest(values.published), values.digest, *remembered


class RecordedDesk(Desk):
    """Records in the disk's log what is acknowledged after each turn, and keeps the state of that moment."""

    def __init__(self, folder: Path, disk: RecordingDisk) -> None:
        super().__init__(folder, disk=disk)
        self.recording = disk
        self.states = [state_of(self)]
        disk.tell(0)

    def handle(self, event: OuterEvent, after_ns: int = 1_000_000) -> list[OuterEffect]:
        effects = super().handle(event, after_ns)
        if (state := state_of(self)) != self.states[-1]:
            self.states.append(state)
            self.recording.tell(len(self.states) - 1)
        return effects


WRONG = (AssertionError, CheckpointError, JournalError, KeptError, RestoreError, SpoolError, StoreError)
"""What a check of a folder raises that a cut must not leave."""


@dataclass(frozen=True)
class Recording:
    """``check`` raises one of ``WRONG`` for a bad folder, given it and the acknowledged level."""

    log: Sequence[Operation]
    folders: set[int]
    check: Callable[[Path, int], None]
    began: int = 0
    """The operation before which the first cut comes."""

    def examined(self, folder: Path, dice: Random, drawn: int = 0, every: int = 1) -> Iterator[tuple[Cut, str]]:
        """Yield every state after every prefix of the operations, or each ``every``-th, with what is wrong, or "".

        A state that several prefixes leave is checked once for each acknowledged level.
        """
        seen: set[tuple[int, frozenset[tuple[str, bytes | None]]]] = set()
        for at in range(self.began, len(self.log) + 1, every):
            told = told_at(self.log, at)
            for cut in cuts_at(self.log, at, dice, drawn):
                state = state_after(self.log, self.folders, cut)
                key = (told, frozenset(state.items()))
                if key in seen:
                    continue
                seen.add(key)
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                lay_out(state, folder)
                wrong = ""
                try:
                    self.check(folder, told)
                except WRONG as error:
                    wrong = str(error) or repr(error)
                yield cut, wrong

    def forgetting(self, step: Step) -> Recording:
        """Return the recording, from the first sync of ``step`` on, of a program that forgets these syncs."""
        before, log = list(self.log[: self.began]), self.log[self.began :]
        first = next(n for n, each in enumerate(log) if isinstance(each, Synced) and each.step is step)
        return Recording(before + without_syncs(log, step), self.folders, self.check, self.began + first)


def joined(desk: Desk) -> None:
    desk.begin()
    for site in "ab":
        desk.handle(JoinRequested(1, site, "0123abcd"))


def a_round(desk: Desk, number: int, tokens: int) -> None:
    """Push an update of each site and fragment, and merge them."""
    for fragment in (0, 1):
        for site in "ab":
            desk.push(*update(site, number + 1, fragment, encoding="int8", base_version=number, tokens=tokens))
        while fragment in desk.under_way:
            desk.finish(fragment)


def opened(folder: Path) -> contextlib.closing[Desk]:
    """Return the syncer that recovers the folder, to be closed after ``with``."""
    return contextlib.closing(Desk(folder, disk=QuietDisk()))


def check_waiting(desk: Desk) -> None:
    """Check that every pending outer step can be computed."""
    for reference, whole in payloads_in(desk.machine.snapshot()).items():
        stored(desk.store.spool, reference, whole)


def record_syncer(root: Path, rounds: int) -> Recording:
    """Record pushes of two sites, merges, versions, a snapshot each round, and the pruning of the oldest."""
    disk = RecordingDisk(root)
    desk = RecordedDesk(root / "syncer", disk)
    joined(desk)
    for number in range(rounds):
        a_round(desk, number, 10 + number)
        desk.snapshot()
    desk.snapshot()  # With the one of the start there are three now: the oldest is pruned.
    desk.close()
    levels = {state: level for level, state in enumerate(desk.states)}
    number = itertools.count()

    def check(folder: Path, told: int) -> None:
        with opened(folder / "syncer") as desk:
            level = levels.get(state_of(desk), -1)
            assert level >= 0, "it recovered a state that never existed"
            assert level >= told, f"{told} records were acknowledged, but {level} are left"
            check_waiting(desk)
            if next(number) % GOES_ON_EVERY:
                return
            desk.begin()
            desk.snapshot()
            left = state_of(desk)
        with opened(folder / "syncer") as again:
            assert state_of(again) == left, "after one more snapshot it recovers another state"

    return Recording(list(disk.log), disk.folders, check)


def record_site(root: Path) -> Recording:
    """Record sealed updates put into the outbox and dropped, and checkpoints of which the oldest is pruned."""
    disk = RecordingDisk(root)
    outbox = Outbox(root / "site" / "outbox", disk)
    put: list[tuple[int, PushHeader, int]] = []
    for number in (1, 2, 3):
        header, payload = update("a", number, 0, encoding="int8")
        outbox.put(header, payload)
        put.append((2 * number - 1, header, number))
        disk.tell(2 * number - 1)
        tensors = {"parameters/w": torch.full((5,), float(number)), "agent/base": torch.zeros(3)}
        checkpoint.save(root / "site" / "checkpoints", f"step-{number}", tensors, {"number": number}, 2, disk)
        disk.tell(2 * number)
        if number > 1:
            outbox.drop(0, number - 1)

    def check(folder: Path, told: int) -> None:
        kept = checkpoint.latest(folder / "site" / "checkpoints")
        newest = 0 if kept is None else int(kept.meta["number"])
        assert newest >= told // 2, f"checkpoint {told // 2} was complete, but {newest} is the newest now"
        if kept is not None:
            values = torch.full((5,), float(newest))
            assert torch.equal(kept.read("parameters/w"), values), f"checkpoint {newest} holds other values"
        digests = Outbox(folder / "site" / "outbox", QuietDisk()).digests()
        for level, header, number in put:
            found = digests.get((0, number))
            assert found in (None, header.digest), f"update {number} has other content than was put there"
            # An update that a later checkpoint no longer lists may be dropped.
            assert found is not None or not level <= told < level + 3, f"update {number} was durable, and is lost"

    return Recording(list(disk.log), disk.folders, check)


# --- What a power cut may leave of a restore -------------------------------------------------------------------------

CLOCK_S = 1_800_000_000
VERSIONS = [4, 4]


def a_run(folder: Path, disk: QuietDisk) -> Desk:
    """Make some versions of both fragments, and a snapshot between them."""
    desk = Desk(folder, disk=disk)
    joined(desk)
    a_round(desk, 0, 11)
    desk.snapshot()
    a_round(desk, 1, 12)
    desk.close()
    return desk


def record_in_place(root: Path) -> Recording:
    """Record a run that is restored in place from an image."""
    disk = RecordingDisk(root)
    desk = a_run(root / "syncer", disk)
    began = len(disk.log)
    disk.tell(0)
    image = Image(dict(asdict(CARD)), tuple(desk.values), {})
    Restore(root / "syncer", CARD, RULES, "a test", Known(CLOCK_S), disk).in_place(image)
    disk.tell(1)

    return Recording(list(disk.log), disk.folders, check_run, began)


class MortalDisk(RecordingDisk):
    """Interrupts a restore once, while it moves its files into place."""

    def __init__(self, root: Path, passage: int) -> None:
        super().__init__(root)
        self._left = passage or -1

    def reached(self, step: Step) -> None:
        self._left -= step is Step.RESTORE_MOVE
        if self._left == 0:
            self._left = -1
            raise InterruptedError(step.value)


def record_backup(root: Path, passage: int = 0) -> Recording:
    """Record a backup's restore into an empty folder, after one interrupted at ``passage`` unless that is 0."""
    a_run(root / "lost", QuietDisk())
    vault, here = Vault(str(root / "vault")), root / "here"
    back_up(root / "lost", vault)
    here.mkdir()
    disk = MortalDisk(here, passage)
    disk.make_folder(here / "syncer", Step.FOLDER)
    disk.sync_folder(here, Step.FOLDER)
    disk.tell(0)
    if passage:
        with contextlib.suppress(InterruptedError):
            restored(here / "syncer", vault, disk)
    began = len(disk.log)
    restored(here / "syncer", vault, disk)
    disk.tell(1)
    number = itertools.count()

    def check(folder: Path, told: int) -> None:
        why = "it is empty"
        if any((folder / "syncer").iterdir()):
            try:
                check_run(folder, told)
                return
            except StoreError as error:
                why = str(error)
        assert told < 1, f"it was restored, but does not start: {why}"
        assert why == "it is empty" or "restore it again" in why, f"no start: {why}"
        if next(number) % GOES_ON_EVERY == 0:
            restored(folder / "syncer", vault, QuietDisk())
            check_run(folder, 1)

    return Recording(list(disk.log), disk.folders, check, began)


def restored(folder: Path, vault: Vault, disk: QuietDisk) -> None:
    """Restore a backup as ``diloco restore`` does."""
    fetch = lambda to: vault.fetch(RUN, list(vault.backups(RUN))[-1], to, disk)  # noqa: E731
    Restore(folder, CARD, RULES, "a test", Known(CLOCK_S), disk).backup(fetch)


def check_run(folder: Path, told: int) -> None:
    """Check that a syncer recovers the restored run or, if it was not told otherwise, the one before, and that all of
    its past replays."""
    with opened(folder / "syncer") as desk:
        state = desk.machine.state
    again = Kept(folder / "syncer").replay(RULES, verify=True).machine.state
    assert again.lineage == state.lineage, f"lineage {state.lineage} replays to lineage {again.lineage}"
    found = state.lineage, [fragment.version for fragment in state.fragments]
    is_restored = found == (CLOCK_S, [version + 1 for version in VERSIONS])
    assert is_restored or (found == (1, VERSIONS) and told < 1), f"it recovered {found}"


# --- The wall clock of a process, read from a file that the hunt rewrites while the process lives --------------------

YEAR_S = 365 * 86_400
OFFSETS = {"true": 0, "+10 years": 10 * YEAR_S, "-10 years": -10 * YEAR_S, "+1 s": 1, "-1 s": -1, "second twice": 0}
KINDS = (*OFFSETS, "1960", "1970", "frozen")


def tell(clock: Path, kind: str) -> int:
    """Set the wall clock of the process that reads ``clock``; return its time in seconds since 1970."""
    now_s = time.time_ns() // 1_000_000_000
    if kind == "second twice":
        _write(clock, "+ 1")
        time.sleep(0.1)
    if kind in OFFSETS:
        _write(clock, f"+ {OFFSETS[kind]}")
        return now_s + OFFSETS[kind]
    if kind == "frozen":
        _write(clock, f"= {now_s}")
        return now_s
    then_s = {"1960": -10 * YEAR_S, "1970": 86_400}[kind]
    _write(clock, f"+ {then_s - now_s}")
    return then_s


def _write(clock: Path, text: str) -> None:
    beside = clock.with_suffix(".new")
    beside.write_text(text)
    beside.replace(clock)


def follow(clock: Path) -> None:
    """From now on, give the product's own code in this process the wall time of ``clock``.

    Libraries keep the machine's clock (gRPC turns deadlines into wall times, which its C core compares with that
    clock), and so do the dates of files, which another machine may have written.
    """

    def now_ns() -> int:
        how, number = clock.read_text().split()
        return int(number) * 1_000_000_000 + (time.time_ns() if how == "+" else 0)

    class Datetime(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Datetime:
            return cls.fromtimestamp(now_ns() / 1e9, tz)

    faked = ModuleType("time")
    vars(faked).update({**vars(time), "time_ns": now_ns, "time": lambda: now_ns() / 1e9})
    for module in [module for name, module in sys.modules.items() if name.startswith("diloco.")]:
        for name, true, other in (("time", time, faked), ("datetime", datetime.datetime, Datetime)):
            if getattr(module, name, None) is true:
                setattr(module, name, other)
