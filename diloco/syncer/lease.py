"""The lease by which one process at a time leads a run, and the guard that asks it before anything is told.

Lease.  It holds the *epoch*, which only rises: the process that takes the lease is given a larger one than any before,
by compare-and-swap, so that of many that try at once one wins.  It names the *holder*, and the *heir*: the standby that
has everything which any site was told, and so may take over without loss when the holder falls silent.

Leadership.  ``Leadership`` says whether this process leads the run at this moment: it renews the lease in a thread, and
is asked before all that is told.  The lease counts as held for ``VALID_SHARE`` of its time from the instant at which
the last confirmed renewal was *sent*.  Others take it no sooner than a whole ``ttl_s`` after that by their own clocks:
the rest is for clocks that do not run alike.  A process that was frozen, or whose lease's keeper is away, finds the
lease too old and waits, in words, for a renewal.  The renewal says whether another has taken the lease, and then
nothing is told any more.

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
from diloco.sync.leadership import Claim, LeaseLostError, Standing

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


VALID_SHARE = 0.6
RENEW_SHARE = 1 / 3
RETRY_SHARE = 1 / 20
REMEMBERED = "leadership.json"
LABEL_CHARS_MAX = 55


def clock_s() -> float:
    """A clock that goes on while the machine sleeps: the lease runs out meanwhile."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Leadership:
    """The guard of one process that has taken the lease; every method is for any thread."""

    def __init__(
        self,
        held: Held,
        ttl_s: float,
        sent_s: float,
        place: str = "",
        clock_s: Callable[[], float] = clock_s,
        emit: Callable[[str, dict[str, object]], None] = lambda what, facts: None,
    ) -> None:
        """``sent_s``: when the lease was asked for, by ``clock_s``."""
        self.epoch = held.epoch
        self.ttl_s = ttl_s
        self.place = place
        self._held = held
        self._clock_s = clock_s
        self._emit = emit
        self._confirmed_s = sent_s
        self._due_s = sent_s + ttl_s * RENEW_SHARE
        self._lock = threading.Lock()
        self._wish = ""
        self._marked: str | None = ""
        self._possible = ""
        self._trouble: str | None = None
        self._lost: str | None = None
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    # --- asked before anything is told -------------------------------------------------------------------------------

    def valid(self) -> bool:
        """Whether this process leads the run."""
        return self._lost is None and self._clock_s() - self._confirmed_s < self.ttl_s * VALID_SHARE

    def wanting(self) -> str | None:
        """Why nothing may be told now, None when it may; ``LeaseLostError`` when nothing may ever be again."""
        if self._lost is not None:
            raise LeaseLostError(self._lost)
        why = f": {self._trouble}" if self._trouble else ""
        return None if self.valid() else f"the lease of epoch {self.epoch} was not renewed in time{why}"

    def heir_is(self, name: str) -> str | None:
        """Why it is not certain that the lease names at most ``name`` ("": nobody) as heir; None when it is.

        Until then what that standby lacks must not be told; whoever else is named is taken out.
        """
        with self._lock:
            if self._wish not in ("", name):
                self._wish = ""
            if self._possible in ("", name):
                return None
            other = self._possible
        self._wake.set()
        return f"the lease still names the standby {other} as the heir: it is being taken out"

    def name_heir(self, name: str) -> None:
        """The standby ``name`` has everything, and gets everything from now on: it may take over."""
        with self._lock:
            self._wish = name
        self._wake.set()

    def status(self) -> dict[str, object]:
        """For ``diloco status``."""
        return {
            "place": self.place,
            "epoch": self.epoch,
            "valid": self.valid(),
            "heir": self._marked,
            "renewed_seconds_ago": round(self._clock_s() - self._confirmed_s, 1),
            "trouble": self._lost or self._trouble,
        }

    # --- the thread --------------------------------------------------------------------------------------------------

    def start(self) -> Leadership:
        """Begin to renew."""
        self._thread.start()
        return self

    def stop(self, *, release: bool) -> None:
        """Renew no more; ``release`` gives the lease back, otherwise it runs out, and an heir takes over."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        if release and self._lost is None:
            try:
                self._held.release()
            except LeaseError as error:
                self._emit("note", {"note": "lease", "why": f"not given back, it will run out: {error}"})

    def _run(self) -> None:
        while not self._stopping.is_set() and self._lost is None:
            self._wake.wait(max(0.0, self._due_s - self._clock_s()))
            self._wake.clear()
            if not self._stopping.is_set():
                self.step()

    def step(self) -> None:
        """Renew if it is time, and write down the heir if another is wished for; what fails is tried again soon."""
        try:
            if self._clock_s() >= self._due_s:
                self._renew()
            self._write_heir()
            self._trouble = None
        except LeaseError as error:
            if self._trouble is None:
                self._emit("note", {"note": "lease", "why": str(error)})
            self._trouble = str(error)
            self._due_s = self._clock_s() + self.ttl_s * RETRY_SHARE

    def _renew(self) -> None:
        sent_s = self._clock_s()
        if not self._held.renew():
            self._lose("it ran out, and another process has taken it or may")
            return
        self._confirmed_s = sent_s
        self._due_s = sent_s + self.ttl_s * RENEW_SHARE

    def _write_heir(self) -> None:
        while self._lost is None:
            with self._lock:
                heir = self._wish if self._possible in ("", self._wish) else ""  # Never one name right after another.
                if heir == self._marked == self._possible:
                    return
                self._possible, self._marked = heir or self._possible, None
            if not self._held.mark(heir):
                self._lose("another process has taken it")
                return
            with self._lock:
                self._possible = self._marked = heir
            self._emit("note", {"note": "heir", "why": f"the lease names {heir or 'nobody'} as the heir"})

    def _lose(self, why: str) -> None:
        self._lost = f"the lease of epoch {self.epoch} is lost: {why}; nothing more is told here"
        self._emit("note", {"note": "lease_lost", "why": self._lost})


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
) -> Leadership | None:
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
) -> Leadership | None:
    """One attempt; None while another holds the lease.  What is taken is renewed from then on."""
    sent_s = clock_s()
    held = lease.acquire(claim)
    if held is None:
        return None
    _remember(folder / REMEMBERED, Remembered(claim.name, lease.place, _home(folder)), disk)
    emit("lease_taken", {"epoch": held.epoch, "holder": claim.name, "place": lease.place})
    return Leadership(held, lease.ttl_s, sent_s, lease.place, emit=emit).start()


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
