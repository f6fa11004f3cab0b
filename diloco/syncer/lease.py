"""The lease by which one process at a time leads a run, and the guard that asks it before anything is told.

Lease.  It holds the *epoch*, which only rises: the process that takes the lease is given a larger one than any before,
by compare-and-swap, so that of many that try at once one wins.  It names the *holder*, and the *heir*: the standby that
has everything which any site was told, and so may take over without loss when the holder falls silent.

Leadership.  ``LeaseHolder`` renews the lease in a thread, and is asked before all that is told.  What it answers is
decided in ``sync/leadership``.

What follows the check is told within the same turn.  A process frozen in that very instant still tells it when it goes
on: with a standby that is nothing that a new leader lacks (``replicator``), and it carries the old epoch.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import threading
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from diloco.durable import LOCK, PLAIN_DISK, Step
from diloco.sync.leadership import RETRY_SHARE, Change, Claim, Leadership, Standing

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from diloco.durable import Disk
    from diloco.sync.state import OuterState

NUMBER_MAX = 1 << 63
NAME_CHARS_MAX = 64


class LeaseError(RuntimeError):
    """The lease cannot be read or changed: nobody answers, or what is there is no lease.  It may be tried again."""


class LeaseRefusedError(LeaseError):
    """The lease is not this process's to take, whoever holds it now; the text says why and what to do."""


class Held(Protocol):
    """The lease in the hands of this process."""

    @property
    def epoch(self) -> int:
        """The one that this process was given."""
        ...

    def renew(self) -> bool:
        """Hold it for another ``ttl_s``; False when it is another's, or has run out.  ``LeaseError``: not known."""
        ...

    def mark(self, heir: str) -> bool:
        """Name the heir, "" for none; False when the lease is another's.  ``LeaseError``: it may or may not be done."""
        ...

    def release(self) -> None:
        """Give it back, if it is still held."""
        ...


class Lease(Protocol):
    """One run's lease, wherever it is kept; used by one thread at a time."""

    @property
    def place(self) -> str:
        """Where it is kept, for people, and to know it again."""
        ...

    @property
    def ttl_s(self) -> float:
        """How long it is held without being renewed."""
        ...

    def read(self) -> Standing | None:
        """What it says; None where there is none yet."""
        ...

    def vacant(self) -> bool:
        """Whether nobody holds it, as far as this process knows: asked again and again it finds out."""
        ...

    def acquire(self, claim: Claim) -> Held | None:
        """Take it; None while another holds it.  ``LeaseRefusedError`` when it is not to be had."""
        ...


def standing_of(plain: object, wrong: Callable[[str], LeaseError]) -> Standing:
    """``Standing`` from what JSON gave; ``wrong`` makes the error of what is the matter with it."""
    if not isinstance(plain, dict):
        raise wrong("it is no object")
    for name, kind in (("epoch", int), ("lineage", int), ("holder", str), ("heir", str), ("released", bool)):
        if type(plain.get(name)) is not kind:
            raise wrong(f"{name} is {plain.get(name)!r}")
    found: dict[str, Any] = plain
    standing = Standing(found["epoch"], found["lineage"], found["holder"], found["heir"], found["released"])
    for name, number in (("epoch", standing.epoch), ("lineage", standing.lineage)):
        if not 1 <= number < NUMBER_MAX:
            raise wrong(f"{name} is {number}")
    for name, text in (("holder", standing.holder), ("heir", standing.heir)):
        if len(text) > NAME_CHARS_MAX or (name == "holder" and not text):
            raise wrong(f"{name} is {text[:80]!r}")
    return standing


def plain_of(standing: Standing) -> dict[str, object]:
    """For JSON."""
    return asdict(standing)


REMEMBERED = "leadership.json"
LABEL_CHARS_MAX = 55


def clock_ns() -> int:
    """A clock that goes on while the machine sleeps: the lease runs out meanwhile."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class LeaseHolder:
    """Renews the lease of this process in a thread, and asks ``Leadership``; every method is for any thread."""

    def __init__(
        self,
        held: Held,
        ttl_s: float,
        sent_ns: int,
        place: str = "",
        clock_ns: Callable[[], int] = clock_ns,
        emit: Callable[[str, dict[str, object]], None] = lambda what, facts: None,
    ) -> None:
        """``sent_ns``: when the lease was asked for, by ``clock_ns``."""
        self.epoch = held.epoch
        self.place = place
        self._held = held
        self._clock_ns = clock_ns
        self._emit = emit
        self.machine = Leadership(held.epoch, round(ttl_s * 1e9), sent_ns)
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    # --- asked before anything is told -------------------------------------------------------------------------------

    def valid(self) -> bool:
        """Whether this process leads the run."""
        return self.machine.valid(self._clock_ns())

    def wanting(self) -> str | None:
        """As ``Leadership.wanting`` at this moment."""
        return self.machine.wanting(self._clock_ns())

    def heir_is(self, name: str) -> str | None:
        """As ``Leadership.heir_is``; the thread takes another out at once."""
        with self._lock:
            why = self.machine.heir_is(name)
        if why is not None:
            self._wake.set()
        return why

    def name_heir(self, name: str) -> None:
        """As ``Leadership.name_heir``; the thread writes it down at once."""
        with self._lock:
            self.machine.name_heir(name)
        self._wake.set()

    def status(self) -> dict[str, object]:
        """For ``diloco status``."""
        machine = self.machine
        return {
            "place": self.place,
            "epoch": self.epoch,
            "valid": self.valid(),
            "heir": machine.heir,
            "renewed_seconds_ago": round((self._clock_ns() - machine.confirmed_ns) / 1e9, 1),
            "trouble": machine.lost or machine.trouble,
        }

    # --- the thread --------------------------------------------------------------------------------------------------

    def start(self) -> LeaseHolder:
        """Begin to renew."""
        self._thread.start()
        return self

    def stop(self, *, release: bool) -> None:
        """Renew no more; ``release`` gives the lease back, otherwise it runs out, and an heir takes over."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        if release and self.machine.lost is None:
            try:
                self._held.release()
            except LeaseError as error:
                self._emit("note", {"note": "lease", "why": f"not given back, it will run out: {error}"})

    def _run(self) -> None:
        while not self._stopping.is_set() and self.machine.lost is None:
            self._wake.wait(max(0, self.machine.due_ns - self._clock_ns()) / 1e9)
            self._wake.clear()
            if not self._stopping.is_set():
                self.step()

    def step(self) -> None:
        """Make every change that is due at the lease; what fails is tried again soon."""
        machine = self.machine
        while not self._stopping.is_set() and (change := self._next_change()) is not None:
            try:
                held = self._held.renew() if change.heir is None else self._held.mark(change.heir)
            except LeaseError as error:
                if machine.trouble is None:
                    self._emit("note", {"note": "lease", "why": str(error)})
                machine.missed(self._clock_ns(), str(error))
                return
            with self._lock:
                machine.changed(change, held=held)
            if machine.lost is not None:
                self._emit("note", {"note": "lease_lost", "why": machine.lost})
            elif change.heir is not None:
                named = change.heir or "nobody"
                self._emit("note", {"note": "heir", "why": f"the lease names {named} as the heir"})

    def _next_change(self) -> Change | None:
        with self._lock:
            return self.machine.next_change(self._clock_ns())


# --- taking it --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Remembered:
    """What a data folder remembers of leases: the name it has for them, and the place of the one it was led under.

    ``home`` tells the folder itself from a copy of it; empty in one of a version that did not write it down.
    """

    name: str
    place: str = ""
    home: str = ""


def remembered(folder: Path, disk: Disk, label: str = "syncer") -> Remembered:
    """What ``folder`` remembers; one that does not is given a name of its own, by which no other folder goes.

    ``LeaseRefusedError`` for a copy of a folder that was led under a lease: the process whose folder was copied may
    live and hold the lease by this name, and may have acknowledged what the copy lacks.
    """
    path, home = folder / REMEMBERED, _home(folder)
    fit = re.sub(r"[^A-Za-z0-9._-]", "-", label).lstrip("._-")[:LABEL_CHARS_MAX] or "syncer"
    anew = Remembered(f"{fit}-{secrets.token_hex(4)}", home=home)
    try:
        plain = json.loads(path.read_bytes())
    except FileNotFoundError:
        return _remember(path, anew, disk)
    except ValueError:
        plain = None
    if not isinstance(plain, dict) or not all(isinstance(plain.get(key), str) for key in ("name", "place")):
        raise LeaseRefusedError(f"{path} cannot be read: remove it if no other process leads the run")
    found = Remembered(plain["name"], plain["place"], home)
    if plain.get("sha256", _digest(found)) != _digest(found):  # One of an earlier release has none.
        raise LeaseRefusedError(f"{path} is damaged: remove it if no other process leads the run")
    if plain.get("home", home) == home:
        return _remember(path, found, disk)
    if not found.place:
        return _remember(path, anew, disk)
    raise LeaseRefusedError(
        f"this data folder was copied or moved here, and the one it comes from was led under the lease {found.place}: "
        f'when that one is gone and was stopped before the copy was made, remove "home" from {path}'
    )


def _home(folder: Path) -> str:
    """The numbers of the folder and of its file of locks: a disk takes them along, a copy nearly never has both."""
    lock = folder / LOCK
    return f"{folder.stat().st_ino}:{lock.stat().st_ino if lock.exists() else 0}"


def claim_of(lease: Lease, folder: Path, disk: Disk, state: OuterState, *, by_itself: bool = False) -> Claim:
    """What the data folder may claim of ``lease``; its lock is held by whoever calls."""
    known = remembered(folder, disk)
    if known.place not in ("", lease.place):
        raise LeaseRefusedError(
            f"this data folder was led under the lease {known.place}, and the settings say {lease.place}: two leases "
            f"let two syncers lead; when every process of the run is stopped, remove {folder / REMEMBERED}"
        )
    return Claim(known.name, state.epoch, state.lineage, anew=not known.place, by_itself=by_itself)


def lead(
    lease: Lease | None,
    folder: Path,
    disk: Disk,
    state: OuterState,
    emit: Callable[[str, dict[str, object]], None],
    wait_s: float | None = None,
) -> LeaseHolder | None:
    """Take ``lease`` for the run in ``folder``, waiting at most ``wait_s`` (None: twice its time) for another's end.

    None where the run is led without a lease.
    """
    if lease is None:
        _check_unled(folder)
        return None
    claim = claim_of(lease, folder, disk, state)
    until_s = time.monotonic() + (2 * lease.ttl_s if wait_s is None else wait_s)
    while (leadership := try_to_lead(lease, folder, disk, claim, emit)) is None:
        if time.monotonic() > until_s:
            standing = lease.read()
            holder = standing.holder if standing is not None else "another process"
            raise LeaseRefusedError(f"{holder} holds the lease {lease.place} and renews it: the run has a syncer")
        time.sleep(lease.ttl_s * RETRY_SHARE)
    return leadership


def try_to_lead(
    lease: Lease, folder: Path, disk: Disk, claim: Claim, emit: Callable[[str, dict[str, object]], None]
) -> LeaseHolder | None:
    """One attempt; None while another holds the lease.  What is taken is renewed from then on."""
    sent_ns = clock_ns()
    held = lease.acquire(claim)
    if held is None:
        return None
    _remember(folder / REMEMBERED, Remembered(claim.name, lease.place, _home(folder)), disk)
    emit("lease_taken", {"epoch": held.epoch, "holder": claim.name, "place": lease.place})
    return LeaseHolder(held, lease.ttl_s, sent_ns, lease.place, emit=emit).start()


def _check_unled(folder: Path) -> None:
    """A folder that was led under a lease must not be led without one: somebody may hold it."""
    path = folder / REMEMBERED
    if path.exists() and (place := remembered(folder, PLAIN_DISK).place):
        raise LeaseRefusedError(
            f"this data folder was led under the lease {place}, and the settings name none: when no other process "
            f"leads the run, remove {path}"
        )


def _remember(path: Path, found: Remembered, disk: Disk) -> Remembered:
    plain = {**asdict(found), "sha256": _digest(found)}
    if not path.exists() or json.loads(path.read_bytes()) != plain:
        disk.write_file(path, json.dumps(plain).encode(), Step.LEASE_REMEMBER)
    return found


def _digest(found: Remembered) -> str:
    """Without ``home``, which an operator may remove."""
    return hashlib.sha256(f"{found.name}\0{found.place}".encode()).hexdigest()
