"""A lease in etcd, spoken to by its JSON gateway (v3) with nothing but the standard library.

    /diloco/RUN/lease     what the lease says (``Standing``), for ever: so the epoch outlives every holder
    /diloco/RUN/holder    the epoch, under an etcd lease of ``ttl_s``: it is there while somebody holds it

Every change is one transaction that compares both as they were read.  Time is counted by etcd alone; it counts a
renewal from when it arrived, which is later than when it was sent, from where the holder counts.

Endpoints are asked one after another, each a bounded time.  What did not answer may have been done all the same: the
next question tells.  Without a user everyone who reaches etcd may change the lease.  With users etcd refuses
a question whose certificate has a common name: this end's must have none.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import ssl
import urllib.request
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

from diloco.sync.leadership import Claim, Standing, next_standing, refusal
from diloco.syncer.lease import LeaseError, LeaseRefusedError, plain_of, standing_of
from diloco.wire.options import check_private, is_loopback

if TYPE_CHECKING:
    from collections.abc import Sequence

TTL_MIN_S = 2
NO_TOKEN = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
"""What etcd answers to a token that it does not know, as after its restart, or that is older than its users."""
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
    """By which files etcd knows this end, and this end etcd, each read again when it is asked; "" for none."""

    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    user: str = ""
    password_file: str = ""

    def check(self, endpoints: Sequence[str]) -> None:
        """``ValueError`` or ``OSError`` in words where it cannot work."""
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
        """What an https connection is made with."""
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
        """The user's; "" without one."""
        if not self.user:
            return ""
        try:
            check_private("password_file", self.password_file)
            return Path(self.password_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"password_file {self.password_file}: {error}") from error


UNKNOWN = EtcdAccess()
"""For an etcd that asks nobody who they are."""


class EtcdLease:
    """Satisfies ``lease.Lease``."""

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
        self._prefix = f"/diloco/{run_id}"
        self._timeout_s = max(0.3, self.ttl_s / 6 / len(self.endpoints))

    @property
    def place(self) -> str:
        """The keys.  Endpoints come and go, the cluster stays."""
        return f"etcd:{self._prefix}/lease"

    def read(self) -> Standing | None:
        """What the key says now."""
        return self.found().standing

    def vacant(self) -> bool:
        """Whether nobody's key is there."""
        return self.found().held_epoch is None

    def acquire(self, claim: Claim) -> HeldEtcd | None:
        """Take it, unless another's key is there."""
        found = self.found()
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
        held = HeldEtcd(self, standing, number)
        holder = {"key": _text(f"{self._prefix}/holder"), "value": _text(str(standing.epoch)), "lease": number}
        if not self.change(found, standing, holder):
            self.ask("lease/revoke", {"ID": number})
            return None
        return held

    def found(self) -> _Found:
        """Both keys, in one transaction."""
        ranges = [{"request_range": {"key": _text(f"{self._prefix}/{name}")}} for name in ("lease", "holder")]
        answers: Any = self.ask("kv/txn", {"success": ranges}).get("responses")
        try:
            lease, holder = (answer["response_range"].get("kvs", [None])[0] for answer in answers)
            standing = _standing(base64.b64decode(lease.get("value", "")), self.place) if lease else None
            epoch = base64.b64decode(holder["value"]).decode() if holder else None
            return _Found(standing, _revision(lease), epoch, _revision(holder))
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise LeaseError(f"{self.place}: etcd answered what cannot be read: {answers}") from error

    def change(self, found: _Found, standing: Standing, holder: dict[str, str] | None = None) -> bool:
        """Write ``standing``, and the holder's key if it is given, unless either key has changed since ``found``."""
        keys = ((f"{self._prefix}/lease", found.changed), (f"{self._prefix}/holder", found.held_changed))
        compared = [
            {"key": _text(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}
            for key, revision in keys
        ]
        puts = [{"key": _text(f"{self._prefix}/lease"), "value": _text(json.dumps(plain_of(standing)))}]
        puts += [holder] if holder is not None else []
        request = {"compare": compared, "success": [{"request_put": put} for put in puts]}
        return self.ask("kv/txn", request).get("succeeded") is True

    def ask(self, what: str, request: dict[str, Any]) -> dict[str, Any]:
        """One question to the first endpoint that answers; ``LeaseError`` names what each of them did instead."""
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
        """As the user, if there is one, whose token is made when there is none and when etcd does not take it."""
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


class HeldEtcd:
    """Satisfies ``lease.Held``."""

    def __init__(self, lease: EtcdLease, standing: Standing, number: str) -> None:
        self._lease = lease
        self._standing = standing
        self._number = number

    @property
    def epoch(self) -> int:
        """The one that was given."""
        return self._standing.epoch

    def renew(self) -> bool:
        """Keep the etcd lease alive, and see that the holder's key is still this process's."""
        answer = self._lease.ask("lease/keepalive", {"ID": self._number}).get("result")
        if not isinstance(answer, dict):
            raise LeaseError(f"{self._lease.place}: etcd answered what cannot be read: {answer}")
        return _number(answer.get("TTL")) > 0 and self._ours() is not None

    def mark(self, heir: str) -> bool:
        """Name the heir, if nothing has changed since it was looked whether the lease is still held."""
        while (found := self._ours()) is not None:
            assert found.standing is not None
            if self._lease.change(found, replace(found.standing, heir=heir)):
                return True
        return False

    def release(self) -> None:
        """Give it back."""
        found = self._ours()
        if found is not None and found.standing is not None:
            self._lease.change(found, replace(found.standing, released=True))
            self._lease.ask("lease/revoke", {"ID": self._number})

    def _ours(self) -> _Found | None:
        found = self._lease.found()
        standing = found.standing
        if standing is None:
            raise LeaseError(f"{self._lease.place} is gone: the lease that this process holds was removed")
        ours = (standing.epoch, standing.holder, standing.released) == (self.epoch, self._standing.holder, False)
        return found if ours and found.held_epoch == str(self.epoch) else None


def _said(error: Exception) -> str:
    """What etcd says of its refusal; "" where it says nothing."""
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


def _standing(data: bytes, place: str) -> Standing:
    def wrong(what: str) -> LeaseError:
        return LeaseError(f"{place} is no lease that can be trusted: {what}; nobody takes it before it is mended")

    try:
        plain = json.loads(data)
    except ValueError:
        raise wrong("it is not whole") from None
    return standing_of(plain, wrong)
