"""A lease in etcd, accessed through its JSON gateway (v3) with the standard library only.

    /diloco/RUN/lease     the lease's content (``Standing``), never removed: so the epoch outlives every holder
    /diloco/RUN/holder    the epoch, under an etcd lease of ``ttl_s``: it exists while a process holds the lease

Every change is one transaction that compares both keys as they were read. Only etcd measures time. It counts a renewal
from its arrival, which is later than its sending, from which the holder counts.

Endpoints are tried one after another, each for a bounded time. A request without an answer may have been carried out
all the same: the next one finds out. Without users, everyone who reaches etcd may change the lease. With users, etcd
refuses a request whose certificate has a common name: this client's certificate must have none.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import ssl
import urllib.request
from dataclasses import asdict, dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

from diloco.sync.leadership import Claim, Standing, next_standing, refusal
from diloco.syncer.lease import LeaseError, LeaseRefusedError, is_held, standing_of
from diloco.wire.options import check_private, is_loopback

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        for one, other in (("tls_cert", "tls_key"), ("user", "password_file")):
            if bool(getattr(self, one)) != bool(getattr(self, other)):
                raise ValueError(
                    f"{one} is {getattr(self, one)!r} and {other} {getattr(self, other)!r}: both or neither"
                )
        for endpoint in endpoints:
            parts = urlsplit(endpoint)
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


class EtcdLease:
    """A lease in etcd; satisfies ``lease.Lease``."""

    def __init__(self, endpoints: Sequence[str], run_id: str, ttl_s: float, access: EtcdAccess = UNKNOWN) -> None:
        for endpoint in endpoints:
            parts = urlsplit(endpoint)
            if "@" in parts.netloc:
                raise ValueError("endpoints has one with a name or password, which etcd is not told: http://host:2379")
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
                raise ValueError(f"endpoints has {endpoint!r}: like http://host:2379")
        if not endpoints:
            raise ValueError("endpoints is []: at least one, like http://host:2379")
        if ttl_s < TTL_MIN_S or ttl_s != int(ttl_s):
            raise ValueError(f"ttl_s is {ttl_s!r}: whole seconds, at least {TTL_MIN_S}")
        self.endpoints = [endpoint.rstrip("/") for endpoint in endpoints]
        self.ttl_s = float(ttl_s)
        access.check(endpoints)
        self._access, self._token = access, ""
        self._number = ""
        """The ID of the etcd lease under which the holder's key exists."""
        self._prefix = f"/diloco/{run_id}"
        self._timeout_s = max(0.3, self.ttl_s / 6 / len(self.endpoints))

    @property
    def place(self) -> str:
        """The key. It names no endpoints: they change while the cluster stays."""
        return f"etcd:{self._prefix}/lease"

    def read(self) -> Standing | None:
        """Read the lease's key."""
        return self._found().standing

    def vacant(self) -> bool:
        """Return whether there is no holder's key."""
        return self._found().held_epoch is None

    def acquire(self, claim: Claim) -> Standing | None:
        """Take it, unless another holder's key exists."""
        found = self._found()
        why = refusal(found.standing, claim, self.place)
        if why is not None:
            raise LeaseRefusedError(why)
        own = found.standing is not None and found.standing.holder == claim.name
        if found.held_epoch is not None and not own:
            return None
        standing = next_standing(found.standing, claim)
        granted = self.ask("lease/grant", {"TTL": int(self.ttl_s), "ID": 0})
        number = str(granted.get("ID", ""))
        if not number.isdecimal() or not 0 < _number(granted.get("TTL")) <= 2 * self.ttl_s:
            raise LeaseError(f"{self.place}: etcd granted no lease of {self.ttl_s:g} s: {granted}")
        self._number = number
        holder = {"key": _text(f"{self._prefix}/holder"), "value": _text(str(standing.epoch)), "lease": number}
        if not self._put(found, standing, holder):
            self.ask("lease/revoke", {"ID": number})
            return None
        return standing

    def change(self, own: Standing, **changes: Any) -> bool:
        """Renew the etcd lease, or write the ``changes``, if the holder's key is still this process's."""
        if not changes:
            answer = self.ask("lease/keepalive", {"ID": self._number}).get("result")
            if not isinstance(answer, dict):
                raise LeaseError(f"{self.place}: etcd answered what cannot be read: {answer}")
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
            return _Found(standing, _revision(lease), epoch, _revision(holder))
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise LeaseError(f"{self.place}: etcd answered what cannot be read: {answers}") from error

    def _put(self, found: _Found, standing: Standing, holder: dict[str, str] | None = None) -> bool:
        """Write ``standing``, and the holder's key if it is given, unless either key has changed since ``found``."""
        keys = ((f"{self._prefix}/lease", found.changed), (f"{self._prefix}/holder", found.held_changed))
        compared = [
            {"key": _text(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}
            for key, revision in keys
        ]
        puts = [{"key": _text(f"{self._prefix}/lease"), "value": _text(json.dumps(asdict(standing)))}]
        puts += [holder] if holder is not None else []
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
        if not self._access.user:
            return self._post(endpoint, what, request)
        if self._token:
            try:
                return self._post(endpoint, what, request)
            except HTTPError as error:
                if error.code not in NO_TOKEN:
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


def _revision(value: dict[str, str] | None) -> int:
    return int(value["mod_revision"]) if value else 0


def _plain(data: bytes) -> object:
    """Parse JSON; return None if it is invalid."""
    with contextlib.suppress(ValueError):
        return json.loads(data)
    return None
