"""The lease by which one process at a time leads a run, in a file or in etcd. The leader checks it before it tells
anything.

Lease. It holds the *epoch*, which only rises: the process that takes the lease gets a larger one than any before, by
compare-and-swap, so that of many concurrent attempts one wins. It names the *holder*, and the *heir*: the standby that
has everything which any site was told, and so may take over without loss when the holder falls silent.

Leadership. ``LeaseHolder`` renews the lease in a thread, and the syncer asks it before it tells anything.
``sync/leadership`` decides the answers.

The syncer tells what follows the check within the same turn. A process frozen in that very instant still tells it when
it resumes: with a standby the new leader has all of it (``replicator``), and the messages carry the old epoch.

File. ``FileLease`` is a lease in a file that both machines reach. The file is replaced only as a whole. The new content
is written beside it and synced. Then, under a ``flock`` on ``NAME.lock``, the file is compared with what was read
before, and the new content is renamed to it. Then the folder is synced. A crash leaves the old content or the new one.

The clocks of two machines are never compared. The holder increments a count at each renewal. A taker takes the lease
when the count has not changed for the longer of both ``ttl_s`` by its own clock, and compares it once more under the
lock.

The file system must provide ``flock``, which is tested before the lease is taken, and renames that all machines see at
once. A local disk does, for processes of one machine, and so does NFS from version 4 on; NFS 3 with its cache of names
does not. A process that is frozen between the comparison and the rename keeps every other from the lease until it
resumes or ends: that delays a take-over, but never makes two leaders. NFS revokes the lock of a machine that it has not
heard from for NFS's lease time (often 90 s): a process frozen for that long may overwrite what its heir has written.
Where that can happen, use kind=etcd.

etcd. ``EtcdLease`` holds two keys, through the JSON gateway (v3) with the standard library only:

    /diloco/RUN/lease     the lease's content (``Standing``), never removed: so the epoch outlives every holder
    /diloco/RUN/holder    the epoch, under an etcd lease of ``ttl_s``: it exists while a process holds the lease

Every change is one transaction that compares both keys as they were read. Only etcd measures time. It counts a renewal
from its arrival; the holder counts from its sending, which is earlier.

Endpoints are tried one after another, each for a bounded time. A request without an answer may have been carried out
anyway: the next one shows that. Without users, everyone who reaches etcd may change the lease. With users, etcd refuses
a request whose certificate has a common name: this client's certificate must have none.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import json
import re
import secrets
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from http import HTTPStatus
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol
from urllib.error import HTTPError
from urllib.parse import urlsplit

from diloco.durable import LOCK, PLAIN_DISK, Disk, Step, lock
from diloco.sync.journal import PlainError, from_plain, parse_json
from diloco.sync.leadership import RETRY_SHARE, Claim, Leadership, Standing, next_standing, refusal
from diloco.wire.options import check_private, is_loopback

if TYPE_CHECKING:
    from diloco.sync.state import OuterState
    from diloco.syncer.store import Store


NUMBER_MAX = 1 << 63
NAME_CHARS_MAX = 64


class LeaseError(RuntimeError):
    """The lease cannot be read or changed: no answer, or the content is not a lease. The caller may retry."""


class LeaseRefusedError(LeaseError):
    """This process may not take the lease, even if it is free; the text says why and what to do."""


class Lease(Protocol):
    """One run's lease, in any store; used by one thread at a time."""

    place: str
    """Where it is kept: shown to users, and compared to recognise the same lease."""
    ttl_s: float
    """Seconds that it is held without renewal."""

    def read(self) -> tuple[Standing | None, bool]:
        """Return its content, None if there is none yet, and whether it is free, as far as this process knows: repeated
        calls find out."""

    def acquire(self, claim: Claim) -> Standing | None:
        """Take it; return its content, or None while another holds it. ``LeaseRefusedError`` when this claim may not
        have it.

        Repeated calls succeed once the holder has been silent for long enough. A successful call invalidates the result
        of earlier calls.
        """
        standing, is_free = self.read()
        if (why := refusal(standing, claim, self.place)) is not None:
            raise LeaseRefusedError(why)
        # The holder's name is that of this data folder, whose lock this process has: the earlier holder has ended.
        if not is_free and (standing is None or standing.holder != claim.name):
            return None
        own = next_standing(standing, claim)
        return own if self.take(own) else None

    def take(self, own: Standing) -> bool:
        """Write ``own`` as its content, unless that has changed since the last ``read``; return whether it was written.

        For ``acquire`` alone.
        """

    def change(self, own: Standing, **changes: Any) -> bool:
        """Apply ``changes`` to ``own``, from ``acquire``; without ``changes`` renew it for another ``ttl_s``.

        False when another process has it, or it has expired. After ``LeaseError`` the change may or may not be done.
        """


def is_held(standing: Standing, own: Standing) -> bool:
    """Return whether ``standing`` still names the holder and the epoch of ``own``, unreleased."""
    return (standing.epoch, standing.holder, standing.released) == (own.epoch, own.holder, False)


def not_trusted(place: object, what: str) -> LeaseError:
    """Return the error for a lease with invalid content; ``what`` describes the fault."""
    return LeaseError(f"{place} is not a valid lease: {what}; no process takes it until it is repaired")


def standing_of(plain: object, place: object) -> Standing:
    """Parse a ``Standing`` from the JSON value found at ``place``; raise ``LeaseError`` if it is invalid."""
    if not isinstance(plain, dict):
        raise not_trusted(place, "it is no object")
    try:  # Of its own fields alone: a later release may write more.
        standing: Standing = from_plain(
            Standing, {each.name: plain.get(each.name) for each in fields(Standing)}, "lease"
        )
    except PlainError as error:
        raise not_trusted(place, str(error)) from error
    for name, number in (("epoch", standing.epoch), ("lineage", standing.lineage)):
        if not 1 <= number < NUMBER_MAX:
            raise not_trusted(place, f"{name} is {number}")
    for name, text in (("holder", standing.holder), ("heir", standing.heir)):
        if len(text) > NAME_CHARS_MAX or (name == "holder" and not text):
            raise not_trusted(place, f"{name} is {text[:80]!r}")
    return standing


REMEMBERED = "leadership.json"
LABEL_CHARS_MAX = 55


def clock_ns() -> int:
    """Return a clock that also runs while the machine sleeps: the lease expires meanwhile."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


@dataclass(eq=False, repr=False)
class LeaseHolder:
    """Renews this process's lease in a thread, and consults ``Leadership``; any thread may call every method."""

    lease: Lease
    own: Standing
    """From ``acquire``."""
    sent_ns: int
    """When that was requested, by ``clock_ns``."""
    clock_ns: Callable[[], int] = clock_ns
    emit: Callable[[str, dict[str, object]], None] = lambda what, facts: None

    def __post_init__(self) -> None:
        self.epoch = self.own.epoch
        self.machine = Leadership(self.epoch, round(self.lease.ttl_s * 1e9), self.sent_ns)
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    # --- asked before anything is told -------------------------------------------------------------------------------

    def wanting(self) -> str | None:
        """``Leadership.wanting`` at this moment."""
        return self.machine.wanting(self.clock_ns())

    def heir_is(self, name: str) -> str | None:
        """``Leadership.heir_is``; if another heir is named, the thread removes it at once."""
        with self._lock:
            why = self.machine.heir_is(name)
        if why is not None:
            self._wake.set()
        return why

    def name_heir(self, name: str) -> None:
        """``Leadership.name_heir``; the thread writes the name at once."""
        with self._lock:
            self.machine.name_heir(name)
        self._wake.set()

    def status(self) -> dict[str, object]:
        """The lease's state, for ``diloco status``."""
        machine = self.machine
        return {
            "place": self.lease.place,
            "epoch": self.epoch,
            "valid": machine.valid(self.clock_ns()),
            "heir": machine.heir,
            "renewed_seconds_ago": round((self.clock_ns() - machine.confirmed_ns) / 1e9, 1),
            "trouble": machine.lost or machine.trouble,
        }

    # --- the thread --------------------------------------------------------------------------------------------------

    def start(self) -> LeaseHolder:
        """Start the renewing thread."""
        self._thread.start()
        return self

    def stop(self, *, release: bool) -> None:
        """Stop renewing; ``release`` releases the lease, otherwise it expires and an heir takes over."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        if release and self.machine.lost is None:
            try:
                self.lease.change(self.own, released=True)
            except LeaseError as error:
                self.emit("note", {"note": "lease", "why": f"it was not released and will expire: {error}"})

    def _run(self) -> None:
        while not self._stopping.is_set() and self.machine.lost is None:
            self._wake.wait(max(0, self.machine.due_ns - self.clock_ns()) / 1e9)
            self._wake.clear()
            self.step()

    def step(self) -> None:
        """Make every change of the lease that is due; a failed one is retried soon."""
        machine = self.machine
        while not self._stopping.is_set():
            with self._lock:
                change = machine.next_change(self.clock_ns())
            if change is None:
                return
            try:
                wanted = {} if change.heir is None else {"heir": change.heir}
                held = self.lease.change(self.own, **wanted)
            except LeaseError as error:
                if machine.trouble is None:
                    self.emit("note", {"note": "lease", "why": str(error)})
                machine.missed(self.clock_ns(), str(error))
                return
            with self._lock:
                machine.changed(change, held=held)
            if machine.lost is not None:
                self.emit("note", {"note": "lease_lost", "why": machine.lost})
            elif change.heir is not None:
                named = change.heir or "no standby"
                self.emit("note", {"note": "heir", "why": f"the lease names {named} as the heir"})


# --- taking it --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Remembered:
    """What a data folder records of leases: its own name in them, and the place of the lease it was led under.

    ``home`` distinguishes the folder from a copy of it; empty in a record of a version that did not write it.
    """

    name: str
    place: str = ""
    home: str = ""


def remembered(folder: Path, disk: Disk, label: str = "syncer") -> Remembered:
    """Return the record in ``folder``; a folder without one gets a unique name.

    Raises ``LeaseRefusedError`` for a copy of a folder that was led under a lease: the process of the original folder
    may be alive, hold the lease by this name, and have acknowledged what the copy lacks.
    """
    path, lock_file = folder / REMEMBERED, folder / LOCK
    # By inode numbers: a moved disk keeps both, a copy almost never does.
    home = f"{folder.stat().st_ino}:{lock_file.stat().st_ino if lock_file.exists() else 0}"
    fit = re.sub(r"[^A-Za-z0-9._-]", "-", label).lstrip("._-")[:LABEL_CHARS_MAX] or "syncer"
    anew = Remembered(f"{fit}-{secrets.token_hex(4)}", home=home)
    if not path.exists():
        return _remember(path, anew, disk)
    plain = _plain(path.read_bytes())
    if not isinstance(plain, dict) or not all(isinstance(plain.get(key), str) for key in ("name", "place")):
        raise LeaseRefusedError(f"{path} cannot be read: remove it if no other process leads the run")
    found = Remembered(plain["name"], plain["place"], home)
    if plain.get("sha256", _digest(found)) != _digest(found):  # Earlier releases wrote no digest.
        raise LeaseRefusedError(f"{path} is damaged: remove it if no other process leads the run")
    if plain.get("home", home) == home:
        return _remember(path, found, disk)
    if not found.place:
        return _remember(path, anew, disk)
    raise LeaseRefusedError(
        f"this data folder was copied or moved here, and the one it comes from was led under the lease {found.place}: "
        f'when that one is gone and was stopped before the copy was made, remove "home" from {path}'
    )


def lead(lease: Lease | None, store: Store, state: OuterState, wait_s: float | None = None) -> LeaseHolder | None:
    """Take ``lease`` for the run in ``store``; wait at most ``wait_s`` (None: 2 ``ttl_s``) while another holds it.

    Returns None if the run is led without a lease. Raises ``LeaseRefusedError`` if another still holds it then.
    """
    if lease is None:
        path = store.folder / REMEMBERED
        if path.exists() and (place := remembered(store.folder, store.disk).place):  # Another process may hold it.
            raise LeaseRefusedError(
                f"this data folder was led under the lease {place}, and the settings name none: when no other process "
                f"leads the run, remove {path}"
            )
        return None
    until_s = time.monotonic() + (2 * lease.ttl_s if wait_s is None else wait_s)
    while (leadership := try_to_lead(lease, store, state)) is None:
        if time.monotonic() > until_s:
            standing, _ = lease.read()
            holder = standing.holder if standing is not None else "another process"
            raise LeaseRefusedError(f"{holder} holds the lease {lease.place} and renews it: the run has a syncer")
        time.sleep(lease.ttl_s * RETRY_SHARE)
    return leadership


def try_to_lead(lease: Lease, store: Store, state: OuterState, *, by_itself: bool = False) -> LeaseHolder | None:
    """Try once to take ``lease`` for the run in ``store``; return None while another process holds it.

    A taken lease is renewed from then on.
    """
    known, path = remembered(store.folder, store.disk), store.folder / REMEMBERED
    if known.place not in ("", lease.place):
        raise LeaseRefusedError(
            f"this data folder was led under the lease {known.place}, and the settings say {lease.place}: two leases "
            f"let two syncers lead; when every process of the run is stopped, remove {path}"
        )
    sent_ns = clock_ns()
    own = lease.acquire(Claim(known.name, state.epoch, state.lineage, anew=not known.place, by_itself=by_itself))
    if own is None:
        return None
    _remember(path, replace(known, place=lease.place), store.disk)
    store.emit("lease_taken", {"epoch": own.epoch, "holder": known.name, "place": lease.place})
    return LeaseHolder(lease, own, sent_ns, emit=store.emit).start()


def _remember(path: Path, found: Remembered, disk: Disk) -> Remembered:
    plain = {**asdict(found), "sha256": _digest(found)}
    if not path.exists() or _plain(path.read_bytes()) != plain:
        disk.write_file(path, json.dumps(plain).encode(), Step.LEASE_REMEMBER)
    return found


def _digest(found: Remembered) -> str:
    """Digest the record without ``home``, which an operator may remove."""
    return hashlib.sha256(f"{found.name}\0{found.place}".encode()).hexdigest()


FILE_FORMAT = 1
FILE_BYTES_MAX = 4096
LOCK_TRIES_S = 0.01
TTL_MAX_S = 86400.0


@dataclass(frozen=True, slots=True)
class _Content:
    standing: Standing
    count: int
    ttl_s: float


@dataclass(eq=False, repr=False)
class FileLease(Lease):
    """A lease in a file."""

    path: Path
    run_id: str
    ttl_s: float
    disk: Disk = PLAIN_DISK
    clock_s: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.place = f"file:{self.path}"
        self._seen: _Content | None = None
        self._since_s = 0.0

    def read(self) -> tuple[Standing | None, bool]:
        """Read the file; the lease is free once it was released, or has not changed for too long."""
        content = self._read()
        if content != self._seen or content is None:
            self._seen, self._since_s = content, self.clock_s()
        if content is None:
            return None, True
        is_silent = self.clock_s() - self._since_s >= max(content.ttl_s, self.ttl_s)
        return content.standing, content.standing.released or is_silent

    def take(self, own: Standing) -> bool:
        """Write ``own``, if the file still holds what was read, and its file system has locks."""
        with (
            self._errors(),
            self._locked() as file,
            open(file.name, "a") as other,
            contextlib.suppress(BlockingIOError),
        ):
            lock(other)  # Some file systems grant it to every caller.
            raise LeaseError(f"{self.path} is on a file system without locks (flock): use another, or kind=etcd")
        count = self._seen.count if self._seen is not None else 0
        return self._replace(self._seen, _Content(own, count + 1, self.ttl_s))

    def change(self, own: Standing, **changes: Any) -> bool:
        """Increment the count, which renews the lease, and write the ``changes``."""
        while True:
            content = self._read()
            if content is None:
                raise LeaseError(f"{self.path} is gone: the lease that this process holds was removed")
            if not is_held(content.standing, own):
                return False
            standing = replace(content.standing, **changes)
            if self._replace(content, replace(content, standing=standing, count=content.count + 1)):
                return True

    # --- the file ----------------------------------------------------------------------------------------------------

    def _replace(self, found: _Content | None, content: _Content) -> bool:
        """Write ``content`` if the file still holds ``found``; return whether it was written.

        The slow steps are done without the lock: a process may be frozen at any time.
        """
        body = {**asdict(content), "run_id": self.run_id}
        text = json.dumps({"format": FILE_FORMAT, "lease": body, "sha256": _body_digest(body)}, indent=1)
        beside = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}.tmp")
        with self._errors():
            try:
                self.disk.make(beside, lambda path: path.write_text(text), Step.LEASE_WRITE)
                self.disk.sync_file(beside, Step.LEASE_WRITE)
                with self._locked():
                    if self._read() != found:
                        return False
                    self.disk.rename(beside, self.path, Step.LEASE_WRITE)
                self.disk.sync_folder(self.path.parent, Step.LEASE_WRITE)
            finally:
                beside.unlink(missing_ok=True)
        return True

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise LeaseError(f"{self.path}: {error.strerror or error}") from error

    @contextlib.contextmanager
    def _locked(self) -> Iterator[IO[str]]:
        with self.path.with_name(f"{self.path.name}.lock").open("a") as file:
            until_s = time.monotonic() + self.ttl_s / 4
            while True:
                try:
                    lock(file)
                    break
                except BlockingIOError:
                    if time.monotonic() > until_s:
                        raise LeaseError(f"{file.name} is locked by another process, for too long") from None
                    time.sleep(LOCK_TRIES_S)
            yield file

    def _read(self) -> _Content | None:
        with self._errors():
            try:
                with self.path.open("rb") as file:
                    data = file.read(FILE_BYTES_MAX + 1)
            except FileNotFoundError:
                return None
        plain = _plain(data) if len(data) <= FILE_BYTES_MAX else None
        if not isinstance(plain, dict) or not isinstance(body := plain.get("lease"), dict):
            raise not_trusted(self.path, "it is not whole")
        if plain.get("format") != FILE_FORMAT:
            raise not_trusted(self.path, f"its format is {plain.get('format')!r}, and this release reads {FILE_FORMAT}")
        if plain.get("sha256") != _body_digest(body):
            raise not_trusted(self.path, "it was changed by something else than a syncer, or is damaged")
        standing = standing_of(body.get("standing"), self.path)
        count, ttl_s, run_id = body.get("count"), body.get("ttl_s"), body.get("run_id")
        if type(count) is not int or not isinstance(ttl_s, int | float) or not 0 < ttl_s <= TTL_MAX_S:
            raise not_trusted(self.path, f"count is {count!r}, ttl_s is {ttl_s!r}")
        if run_id != self.run_id:
            raise LeaseRefusedError(f"{self.path} is the lease of run {run_id!r}, and this is run {self.run_id!r}")
        return _Content(standing, count, float(ttl_s))


def _body_digest(body: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


# --- A lease in etcd, accessed through its JSON gateway (v3) with the standard library only --------------------------

TTL_MIN_S = 2
NO_TOKEN = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
"""etcd's answers to a token that it does not know, as after its restart, or that is older than its users."""
ANSWER_BYTES_MAX = 64 * 1024


@dataclass(frozen=True, slots=True)
class _Found:
    """Both keys at one instant; ``changed`` and ``held_changed`` are etcd's revisions of them, 0 for none."""

    standing: Standing | None
    changed: int
    held_epoch: str | None
    held_changed: int


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """The files by which etcd and this client authenticate each other, each read again for every use; "" for none."""

    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    user: str = ""
    password_file: str = ""

    def check(self, endpoints: Sequence[str]) -> None:
        """Raise ``ValueError`` or ``OSError`` with a clear text if these settings cannot work."""
        if not endpoints:
            raise ValueError("endpoints is []: at least one, like http://host:2379")
        for one, other in (("tls_cert", "tls_key"), ("user", "password_file")):
            if bool(getattr(self, one)) != bool(getattr(self, other)):
                raise ValueError(
                    f"{one} is {getattr(self, one)!r} and {other} {getattr(self, other)!r}: both or neither"
                )
        for endpoint in endpoints:
            parts = urlsplit(endpoint)
            if "@" in parts.netloc:
                raise ValueError("endpoints has one with a name or password, which etcd never gets: http://host:2379")
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
                raise ValueError(f"endpoints has {endpoint!r}: like http://host:2379")
            if parts.scheme == "http" and (self.tls_ca or self.tls_cert):
                raise ValueError(f"endpoints has {endpoint!r}, and tls_ca or tls_cert is given: https://host:2379")
            if parts.scheme == "http" and self.user and not is_loopback(f"{parts.hostname}:0"):
                raise ValueError(
                    f"endpoints has {endpoint!r}: a password goes over https alone, or to a loopback address"
                )
        self.context()
        self.password()

    def context(self) -> ssl.SSLContext:
        """Return the TLS context for https connections."""
        try:
            context = ssl.create_default_context(cafile=self.tls_ca or None)
        except OSError as error:
            raise ValueError(f"tls_ca {self.tls_ca}: {error.strerror or error}") from error
        if self.tls_cert:
            try:
                check_private("tls_key", self.tls_key)
                context.load_cert_chain(self.tls_cert, self.tls_key)
            except OSError as error:
                raise ValueError(f"tls_cert {self.tls_cert} with tls_key {self.tls_key}: {error.strerror}") from error
        return context

    def password(self) -> str:
        """Return the user's password; "" without a user."""
        if not self.user:
            return ""
        try:
            check_private("password_file", self.password_file)
            return Path(self.password_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"password_file {self.password_file}: {error}") from error


UNKNOWN = EtcdAccess()
"""For an etcd without authentication."""


class EtcdLease(Lease):
    """A lease in etcd."""

    def __init__(self, endpoints: Sequence[str], run_id: str, ttl_s: float, access: EtcdAccess = UNKNOWN) -> None:
        if ttl_s < TTL_MIN_S or ttl_s != int(ttl_s):
            raise ValueError(f"ttl_s is {ttl_s!r}: whole seconds, at least {TTL_MIN_S}")
        access.check(endpoints)
        self.endpoints = [endpoint.rstrip("/") for endpoint in endpoints]
        self.ttl_s = float(ttl_s)
        self._access, self._token = access, ""
        self._number = ""
        """The ID of the etcd lease under which the holder's key exists."""
        self._prefix = f"/diloco/{run_id}"
        self.place = f"etcd:{self._prefix}/lease"
        """The key. It names no endpoints: they change while the cluster stays."""
        self._timeout_s = max(0.3, self.ttl_s / 6 / len(self.endpoints))

    def read(self) -> tuple[Standing | None, bool]:
        """Read both keys; the lease is free while there is no holder's."""
        self._seen = self._found()
        return self._seen.standing, self._seen.held_epoch is None

    def take(self, own: Standing) -> bool:
        """Write both keys, the holder's under an etcd lease of ``ttl_s``."""
        granted = self.ask("lease/grant", {"TTL": int(self.ttl_s), "ID": 0})
        number = str(granted.get("ID", ""))
        if not number.isdecimal() or not 0 < _number(granted.get("TTL")) <= 2 * self.ttl_s:
            raise LeaseError(f"{self.place}: etcd granted no lease of {self.ttl_s:g} s: {granted}")
        self._number = number
        holder = {"key": _text(f"{self._prefix}/holder"), "value": _text(str(own.epoch)), "lease": number}
        is_taken = self._put(self._seen, own, holder)
        if not is_taken:
            self.ask("lease/revoke", {"ID": number})
        return is_taken

    def change(self, own: Standing, **changes: Any) -> bool:
        """Renew the etcd lease, or write the ``changes``, if the holder's key is still this process's."""
        if not changes:
            answer = self.ask("lease/keepalive", {"ID": self._number}).get("result")
            if not isinstance(answer, dict):
                raise LeaseError(f"{self.place}: the answer of etcd cannot be read: {answer}")
            return _number(answer.get("TTL")) > 0 and self._ours(own) is not None
        while (found := self._ours(own)) is not None:
            assert found.standing is not None
            if self._put(found, replace(found.standing, **changes)):
                if changes.get("released"):
                    self.ask("lease/revoke", {"ID": self._number})
                return True
        return False

    def _ours(self, own: Standing) -> _Found | None:
        found = self._found()
        if found.standing is None:
            raise LeaseError(f"{self.place} is gone: the lease that this process holds was removed")
        return found if is_held(found.standing, own) and found.held_epoch == str(own.epoch) else None

    def _found(self) -> _Found:
        """Read both keys in one transaction."""
        ranges = [{"request_range": {"key": _text(f"{self._prefix}/{name}")}} for name in ("lease", "holder")]
        answers: Any = self.ask("kv/txn", {"success": ranges}).get("responses")
        try:
            lease, holder = (answer["response_range"].get("kvs", [None])[0] for answer in answers)
            standing = standing_of(_plain(base64.b64decode(lease.get("value", ""))), self.place) if lease else None
            epoch = base64.b64decode(holder["value"]).decode() if holder else None
            changed, held_changed = (int(key["mod_revision"]) if key else 0 for key in (lease, holder))
            return _Found(standing, changed, epoch, held_changed)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise LeaseError(f"{self.place}: the answer of etcd cannot be read: {answers}") from error

    def _put(self, found: _Found, standing: Standing, *holder: dict[str, str]) -> bool:
        """Write ``standing``, and the holder's key if it is given, unless either key has changed since ``found``."""
        keys = ((f"{self._prefix}/lease", found.changed), (f"{self._prefix}/holder", found.held_changed))
        compared = [
            {"key": _text(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}
            for key, revision in keys
        ]
        puts = [{"key": _text(f"{self._prefix}/lease"), "value": _text(json.dumps(asdict(standing)))}, *holder]
        request = {"compare": compared, "success": [{"request_put": put} for put in puts]}
        return self.ask("kv/txn", request).get("succeeded") is True

    def ask(self, what: str, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request to the first endpoint that answers; ``LeaseError`` lists what each did instead."""
        troubles = []
        for endpoint in self.endpoints:
            try:
                plain = self._answer(endpoint, what, request)
                if isinstance(plain, dict):
                    return plain
                troubles.append(f"{endpoint}: no object")
            except (OSError, ValueError, http.client.HTTPException) as error:
                troubles.append(f"{endpoint}: {_said(error) or error}")
        raise LeaseError(f"{self.place}: {'; '.join(troubles)}")

    def _answer(self, endpoint: str, what: str, request: dict[str, Any]) -> object:
        """Send a request, as the user if there is one; get a new token when there is none or etcd rejects it."""
        if self._token or not self._access.user:
            try:
                return self._post(endpoint, what, request)
            except HTTPError as error:
                if error.code not in NO_TOKEN or not self._access.user:
                    raise
        self._token = ""
        known = {"name": self._access.user, "password": self._access.password()}
        told = self._post(endpoint, "auth/authenticate", known)
        self._token = str(told.get("token", "")) if isinstance(told, dict) else ""
        return self._post(endpoint, what, request)

    def _post(self, endpoint: str, what: str, request: dict[str, Any]) -> object:
        headers = {"Content-Type": "application/json"} | ({"Authorization": self._token} if self._token else {})
        asked = urllib.request.Request(f"{endpoint}/v3/{what}", json.dumps(request).encode(), headers)
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if endpoint.startswith("https:"):
            handlers.append(urllib.request.HTTPSHandler(context=self._access.context()))
        with urllib.request.build_opener(*handlers).open(asked, timeout=self._timeout_s) as answer:
            return json.loads(answer.read(ANSWER_BYTES_MAX))


def _said(error: Exception) -> str:
    """Return etcd's text for its refusal; "" if there is none."""
    try:
        text = error.read(ANSWER_BYTES_MAX).decode() if isinstance(error, HTTPError) else ""
    except (OSError, ValueError, http.client.HTTPException):
        return ""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        text = str(json.loads(text)["message"])
    return text.strip()[:200]


def _text(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _number(text: object) -> int:
    return int(text) if isinstance(text, str) and text.isdecimal() else 0


def _plain(data: bytes) -> Any:
    """Parse JSON; return None if it is invalid."""
    with contextlib.suppress(ValueError):
        return parse_json(data)
    return None
