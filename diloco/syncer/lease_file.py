"""A lease in a file that both machines reach.

The file is changed only whole.  The new content is written beside it and synced.  Then, under a ``flock`` on
``NAME.lock``, the file is compared with what was read before, and the new content is renamed to it.  Then the folder
is synced.  A crash leaves the old content or the new one.

No two machines' clocks are compared.  The holder counts its renewals up; whoever wants the lease takes it when the
count has stood still for the holder's own ``ttl_s`` by the taker's clock, and is compared once more under the lock.

What the file system must give: ``flock``, which is tried before the lease is taken, and renames that all machines agree
on at once.  A local disk does, for processes of one machine, and so does NFS from version 4 on; NFS 3 with its cache of
names does not.  A process that is frozen between the comparison and the rename keeps every other from the lease until
it goes on or ends: that costs a take-over, never two leaders.  NFS takes a lock away from a machine that it has not
heard for its own lease time (often 90 s): one that is frozen there for so long may write over what its heir has
written.  Where that can happen, take kind=etcd.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import time
from dataclasses import asdict, dataclass, replace
from typing import IO, TYPE_CHECKING

from diloco.durable import PLAIN_DISK, Step, lock
from diloco.sync.leadership import Claim, Standing, next_standing, refusal
from diloco.sync.plain import parse_json
from diloco.syncer.lease import LeaseError, LeaseRefusedError, plain_of, standing_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from diloco.durable import Disk

FORMAT = 1
FILE_BYTES_MAX = 4096
LOCK_TRIES_S = 0.01
TTL_MAX_S = 86400.0


@dataclass(frozen=True, slots=True)
class _Content:
    standing: Standing
    count: int
    ttl_s: float
    run_id: str


class FileLease:
    """Satisfies ``lease.Lease``."""

    def __init__(
        self,
        path: Path,
        run_id: str,
        ttl_s: float,
        disk: Disk = PLAIN_DISK,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self.ttl_s = ttl_s
        self._run_id = run_id
        self._disk = disk
        self._clock_s = clock_s
        self._seen: _Content | None = None
        self._since_s = 0.0

    @property
    def place(self) -> str:
        """The file."""
        return f"file:{self.path}"

    def read(self) -> Standing | None:
        """What the file says now."""
        content = self._read()
        return content.standing if content is not None else None

    def vacant(self) -> bool:
        """Whether it was given back, or stands still for too long."""
        return self._runs_out(self._watched())

    def acquire(self, claim: Claim) -> HeldFile | None:
        """Take it; asked again and again, it is taken once the holder has been silent for long enough."""
        content = self._watched()
        if not self._free(content, claim):
            return None
        with self._errors():
            self._probe()
        standing = next_standing(content.standing if content else None, claim)
        count = content.count if content else 0
        taken = self._replace(content, _Content(standing, count + 1, self.ttl_s, self._run_id))
        return HeldFile(self, standing) if taken else None

    def _free(self, content: _Content | None, claim: Claim) -> bool:
        """Whether nobody holds it, as far as this process has seen."""
        standing = content.standing if content is not None else None
        why = refusal(standing, claim, self.place)
        if why is not None:
            raise LeaseRefusedError(why)
        # The name is its data folder's, whose lock we have: the process that held the lease under it has ended.
        return self._runs_out(content) or (standing is not None and standing.holder == claim.name)

    def _runs_out(self, content: _Content | None) -> bool:
        if content is None or content.standing.released:
            return True
        return self._clock_s() - self._since_s >= max(content.ttl_s, self.ttl_s)

    def _watched(self) -> _Content | None:
        """What the file says, with a note of since when it has said so."""
        content = self._read()
        if content != self._seen or content is None:
            self._seen, self._since_s = content, self._clock_s()
        return content

    def change(self, own: Standing, make: Callable[[_Content], _Content]) -> bool:
        """Change the file if it still says who holds the lease as ``own`` does; False when it does not."""
        while True:
            content = self._read()
            if content is None:
                raise LeaseError(f"{self.path} is gone: the lease that this process holds was removed")
            found = content.standing
            if (found.epoch, found.holder, found.released) != (own.epoch, own.holder, False):
                return False
            if self._replace(content, make(content)):
                return True

    # --- the file ----------------------------------------------------------------------------------------------------

    def _probe(self) -> None:
        """``LeaseError`` where the file system lets two have the lock at once: some say yes to each that asks."""
        with self._locked() as file, open(file.name, "a") as other, contextlib.suppress(BlockingIOError):
            lock(other)
            raise LeaseError(f"{self.path} lies on a file system without locks (flock): take another, or kind=etcd")

    def _replace(self, found: _Content | None, content: _Content) -> bool:
        """Have the file say ``content`` if it still says ``found``; whether it did.

        What takes long is done without the lock: a process may be frozen at any time.
        """
        body = {**asdict(content), "standing": plain_of(content.standing)}
        text = json.dumps({"format": FORMAT, "lease": body, "sha256": _digest(body)}, indent=1)
        beside = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}.tmp")
        with self._errors():
            try:
                self._disk.make(beside, lambda path: path.write_text(text), Step.LEASE_WRITE)
                self._disk.sync_file(beside, Step.LEASE_WRITE)
                with self._locked():
                    if self._read() != found:
                        return False
                    self._disk.rename(beside, self.path, Step.LEASE_WRITE)
                self._disk.sync_folder(self.path.parent, Step.LEASE_WRITE)
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
        def wrong(what: str) -> LeaseError:
            return LeaseError(
                f"{self.path} is no lease that can be trusted: {what}; nobody takes it before it is mended"
            )

        try:
            with self.path.open("rb") as file:
                data = file.read(FILE_BYTES_MAX + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise LeaseError(f"{self.path}: {error.strerror or error}") from error
        try:
            plain = parse_json(data) if len(data) <= FILE_BYTES_MAX else None
        except ValueError:
            plain = None
        if not isinstance(plain, dict) or not isinstance(body := plain.get("lease"), dict):
            raise wrong("it is not whole")
        if plain.get("format") != FORMAT:
            raise wrong(f"its format is {plain.get('format')!r}, and this release reads {FORMAT}")
        if plain.get("sha256") != _digest(body):
            raise wrong("it was changed by something else than a syncer, or is damaged")
        standing = standing_of(body.get("standing"), wrong)
        count, ttl_s, run_id = body.get("count"), body.get("ttl_s"), body.get("run_id")
        if type(count) is not int or not isinstance(ttl_s, int | float) or not 0 < ttl_s <= TTL_MAX_S:
            raise wrong(f"count is {count!r}, ttl_s is {ttl_s!r}")
        if run_id != self._run_id:
            raise LeaseRefusedError(f"{self.path} is the lease of run {run_id!r}, and this is run {self._run_id!r}")
        return _Content(standing, count, float(ttl_s), self._run_id)


class HeldFile:
    """Satisfies ``lease.Held``."""

    def __init__(self, lease: FileLease, standing: Standing) -> None:
        self._lease = lease
        self._standing = standing

    @property
    def epoch(self) -> int:
        """The one that was given."""
        return self._standing.epoch

    def renew(self) -> bool:
        """Count up."""
        return self._lease.change(self._standing, _counted)

    def mark(self, heir: str) -> bool:
        """Name the heir."""
        return self._lease.change(
            self._standing, lambda content: replace(content, standing=replace(content.standing, heir=heir))
        )

    def release(self) -> None:
        """Give it back."""
        self._lease.change(
            self._standing, lambda content: replace(content, standing=replace(content.standing, released=True))
        )


def _counted(content: _Content) -> _Content:
    return replace(content, count=content.count + 1)


def _digest(body: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
