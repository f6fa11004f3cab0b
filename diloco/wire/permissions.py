"""What each identity may do: which role a method needs, and what a site may send.

The one table of roles is ``NEEDS``; a method that is not in it is denied to everybody.  What a single site may do
beyond that is said by the permissions file, JSON:

    {"default": "deny",
     "sites": {"site-a": {},
               "site-b": {"fragments": [0, 1], "update_bytes_max": 40000000, "bytes_per_s": 5e6, "pushes_per_s": 2},
               "site-c": {"may_push": false, "pull_bytes_per_s": 2e7, "roles": ["observer"]}},
     "roles": ["observer", "admin"]}

``default`` is for every site that is not listed: "deny", "allow", or what it may do, as for a site.  ``roles`` are
those that identities without a site may have; without it all of them under "allow", none under "deny".  What is not
said about a site is not limited: ``bytes_per_s`` of updates and ``pull_bytes_per_s`` of versions have no default,
because what a link carries is known to nobody here, and without them a site sends and takes as fast as the network
does, in a bounded number of streams.  What is under way is never slowed down; its debt is waited for by the next one.
A site that may not push still counts where a round waits for all sites.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from diloco.sync.plain import parse_json
from diloco.wire.messages import FRAGMENTS_MAX, PAYLOAD_BYTES_MAX, Refusal, Status

if TYPE_CHECKING:
    from diloco.wire.messages import PushHeader

ROLES = frozenset({"observer", "admin", "standby"})
SITES_MAX = 10_000
FILE_BYTES_MAX = 4 << 20
RATE_MAX = 1e15


class Needs(Enum):
    """Who may call a method."""

    SITE = "the site that it speaks for"
    READER = "the site that it speaks for, or an observer"
    OBSERVER = "an observer or an admin"
    ADMIN = "an admin"
    STANDBY = "a standby or an admin"
    KNOWN = "somebody whom the syncer knows"


NEEDS: Mapping[str, Needs] = MappingProxyType(
    {
        "Join": Needs.SITE,
        "Push": Needs.SITE,
        "Watch": Needs.SITE,
        "Pull": Needs.READER,
        "Report": Needs.SITE,
        "Leave": Needs.SITE,
        "Probe": Needs.KNOWN,
        "Status": Needs.OBSERVER,
        "Drain": Needs.ADMIN,
        "Evict": Needs.ADMIN,
        "Readmit": Needs.ADMIN,
        "Admit": Needs.ADMIN,
        "Refuse": Needs.ADMIN,
        "Snapshot": Needs.ADMIN,
        "Promote": Needs.ADMIN,
        "Detach": Needs.ADMIN,
        "Follow": Needs.STANDBY,
        "/grpc.health.v1.Health/Watch": Needs.KNOWN,
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Needs.KNOWN,
    }
)
_OPEN_TO: Mapping[Needs, frozenset[str]] = MappingProxyType(
    {
        Needs.READER: frozenset({"observer", "admin", "standby"}),
        Needs.OBSERVER: frozenset({"observer", "admin"}),
        Needs.ADMIN: frozenset({"admin"}),
        Needs.STANDBY: frozenset({"standby", "admin"}),
        Needs.KNOWN: ROLES,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What one identity may do; None is no limit."""

    may_push: bool = True
    fragments: frozenset[int] | None = None
    update_bytes_max: int | None = None
    bytes_per_s: float | None = None
    pull_bytes_per_s: float | None = None
    pushes_per_s: float | None = None
    calls_per_s: float | None = None
    roles: frozenset[str] = frozenset()

    def check_push(self, header: PushHeader) -> None:
        """Refuse with PERMISSION_DENIED an update that this identity may never send."""
        who = f"site {header.site_id}"
        if not self.may_push:
            raise Refusal(Status.PERMISSION_DENIED, f"{who} may not push")
        if self.fragments is not None and header.fragment not in self.fragments:
            raise Refusal(Status.PERMISSION_DENIED, f"fragment is {header.fragment}: {who} may not push it")
        if self.update_bytes_max is not None and header.payload_bytes > self.update_bytes_max:
            text = f"payload_bytes is {header.payload_bytes}: {who} may push at most {self.update_bytes_max}"
            raise Refusal(Status.PERMISSION_DENIED, text)


@dataclass(frozen=True, slots=True)
class Permissions:
    """The table.  ``default`` None: what is not listed is denied."""

    default: Grant | None
    sites: Mapping[str, Grant]
    roles: frozenset[str] = ROLES

    def of_site(self, site: str) -> Grant | None:
        """What ``site`` may do; None: nothing at all."""
        return self.sites.get(site, self.default)


EVERYTHING = Permissions(Grant(), MappingProxyType({}))


def check_role(method: str, is_site: bool, roles: frozenset[str]) -> None:
    """Refuse with PERMISSION_DENIED a caller whom the table does not let call ``method``."""
    needs = NEEDS.get(method)
    if needs is None:
        raise Refusal(Status.PERMISSION_DENIED, f"{method} is open to nobody")
    if is_site and needs in (Needs.SITE, Needs.READER, Needs.KNOWN):
        return
    if not roles & _OPEN_TO.get(needs, frozenset()):
        raise Refusal(Status.PERMISSION_DENIED, f"only {needs.value} may do this")


def read_permissions(path: str) -> Permissions:
    """The table in the file at ``path``.  Raises ``ValueError`` naming the entry and what is wrong with it."""
    raw = Path(path).read_bytes()
    try:
        if len(raw) > FILE_BYTES_MAX:
            raise ValueError(f"it has {len(raw)} bytes: at most {FILE_BYTES_MAX}")
        return _table(parse_json(raw.decode()))
    except ValueError as error:
        raise ValueError(f"permissions {path}: {error}") from error


def _table(table: Any) -> Permissions:
    if not isinstance(table, dict) or not set(table) <= {"default", "sites", "roles"}:
        raise ValueError('wanted an object with "default", "sites" and "roles" only')
    said = table.get("default")
    if said not in ("allow", "deny") and not isinstance(said, dict):
        raise ValueError(f'default is {said!r}: "allow", "deny" or what a site that is not listed may do')
    default = None if said == "deny" else Grant() if said == "allow" else _grant("default", said)
    sites = table.get("sites", {})
    if not isinstance(sites, dict) or len(sites) > SITES_MAX:
        raise ValueError(f"sites: wanted an object of at most {SITES_MAX} sites")
    grants = {site: _grant(f"sites.{site}", grant) for site, grant in sites.items()}
    roles = _roles("roles", table["roles"]) if "roles" in table else frozenset() if default is None else ROLES
    return Permissions(default, MappingProxyType(grants), roles)


def _grant(where: str, said: Any) -> Grant:
    names = {field.name for field in fields(Grant)}
    if not isinstance(said, dict) or not set(said) <= names:
        extra = sorted(set(said) - names) if isinstance(said, dict) else said
        raise ValueError(f"{where} has {extra!r}: wanted an object of {', '.join(sorted(names))}")
    checked: dict[str, Any] = {}
    for name, value in said.items():
        checked[name] = _CHECKS[name](f"{where}.{name}", value)
    return Grant(**checked)


def _flag(where: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{where} is {value!r}: true or false")
    return value


def _fragments(where: str, value: Any) -> frozenset[int]:
    if not isinstance(value, list) or not all(type(each) is int and 0 <= each < FRAGMENTS_MAX for each in value):
        raise ValueError(f"{where} is {value!r}: a list of fragments' numbers")
    return frozenset(value)


def _bytes(where: str, value: Any) -> int:
    if type(value) not in (int, float) or not 1 <= value <= PAYLOAD_BYTES_MAX:
        raise ValueError(f"{where} is {value!r}: 1 to {PAYLOAD_BYTES_MAX}")
    return int(value)


def _rate(where: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value <= RATE_MAX:
        raise ValueError(f"{where} is {value!r}: a positive number, at most {RATE_MAX:g}")
    return float(value)


def _roles(where: str, value: Any) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) and each in ROLES for each in value):
        raise ValueError(f"{where} is {value!r}: a list of {', '.join(sorted(ROLES))}")
    return frozenset(value)


_CHECKS: Mapping[str, Any] = MappingProxyType(
    {
        "may_push": _flag,
        "fragments": _fragments,
        "update_bytes_max": _bytes,
        "bytes_per_s": _rate,
        "pull_bytes_per_s": _rate,
        "pushes_per_s": _rate,
        "calls_per_s": _rate,
        "roles": _roles,
    }
)
