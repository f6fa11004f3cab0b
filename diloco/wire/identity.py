"""Authentication and authorization: roles, permissions, tokens, certificates and revocations.

Permissions.  ``NEEDS`` is the one table of the roles that methods require; a method not in it is denied to all callers.
The permissions file (JSON) sets what each site may do beyond that:

    {"default": "deny",
     "sites": {"site-a": {},
               "site-b": {"fragments": [0, 1], "update_bytes_max": 40000000, "bytes_per_s": 5e6, "pushes_per_s": 2},
               "site-c": {"may_push": false, "pull_bytes_per_s": 2e7, "roles": ["observer"]}},
     "roles": ["observer", "admin"]}

``default`` applies to every site that is not listed: "deny", "allow", or an object as for a site.  ``roles`` are the
roles that identities without a site may have; if absent, all of them, or none when ``default`` is "deny".  A key that
is absent from a site's object sets no limit.  ``bytes_per_s`` (updates) and ``pull_bytes_per_s`` (versions) have no
default, because the syncer does not know the capacity of a link; without them a site sends and receives as fast as the
network permits, in a bounded number of streams.  A transfer under way is never slowed down; the next one waits until
its debt is paid.  A site that may not push still counts where a round waits for all sites.

Identity.  ``Authenticator`` turns tokens and certificates into an identity, and can revoke it later.  Its files are
read again when they change (``options.Watched.refresh``); ``check_still`` raises when a caller admitted earlier would
no longer be admitted.
"""

from __future__ import annotations

import hashlib
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

from diloco.sync.journal import parse_json
from diloco.wire.messages import FRAGMENTS_MAX, PAYLOAD_BYTES_MAX, Flag, Refusal, Status, bound, bounds_of
from diloco.wire.options import Watched, check_private, is_token

if TYPE_CHECKING:
    from diloco.wire.messages import PushHeader
    from diloco.wire.options import SecurityOptions

ROLES = frozenset({"observer", "admin", "standby"})
SITES_MAX = 10_000
FILE_BYTES_MAX = 4 << 20
RATE_MAX = 1e15


_HEALTH_WATCH = "/grpc.health.v1.Health/Watch"
_REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
_OF_ADMINS = ("Drain", "Evict", "Readmit", "Admit", "Refuse", "Snapshot", "Promote", "Detach")


class Needs(Enum):
    """Which callers may call which methods: in words, the roles that suffice, and the methods."""

    SITE = "the site itself", frozenset[str](), ("Join", "Push", "Watch", "Report", "Leave")
    READER = "the site itself or an observer", ROLES, ("Pull",)
    OBSERVER = "an observer or an admin", frozenset({"observer", "admin"}), ("Status",)
    ADMIN = "an admin", frozenset({"admin"}), _OF_ADMINS
    STANDBY = "a standby or an admin", frozenset({"standby", "admin"}), ("Follow",)
    KNOWN = "a caller that the syncer knows", ROLES, ("Probe", _HEALTH_WATCH, _REFLECTION)


NEEDS: Mapping[str, Needs] = MappingProxyType({method: needs for needs in Needs for method in needs.value[2]})
"""What each method requires."""


def _list_of(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(holds, value))


def _up_to(high: float, least: float = 5e-324) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and least <= value <= high


_Rate = Annotated[float, bound(f"a positive number, at most {RATE_MAX:g},", _up_to(RATE_MAX))]
_are_fragments = _list_of(lambda each: type(each) is int and 0 <= each < FRAGMENTS_MAX)
_are_roles = _list_of(lambda each: each in sorted(ROLES))  # In a list, because ``each`` may have no hash.


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The permissions and limits of one identity; None is no limit."""

    may_push: Flag = True
    fragments: Annotated[frozenset[int], bound("a list of fragments' numbers", _are_fragments)] | None = None
    update_bytes_max: Annotated[float, bound(f"1 to {PAYLOAD_BYTES_MAX}", _up_to(PAYLOAD_BYTES_MAX, 1))] | None = None
    bytes_per_s: _Rate | None = None
    pull_bytes_per_s: _Rate | None = None
    pushes_per_s: _Rate | None = None
    calls_per_s: _Rate | None = None
    roles: Annotated[frozenset[str], bound("a list of observer, admin or standby", _are_roles)] = frozenset()

    def check_push(self, header: PushHeader) -> None:
        """Raise PERMISSION_DENIED for an update that this identity may never send."""
        who = f"site {header.site_id}"
        if not self.may_push:
            raise Refusal(Status.PERMISSION_DENIED, f"{who} may not push")
        if self.fragments is not None and header.fragment not in self.fragments:
            raise Refusal(Status.PERMISSION_DENIED, f"fragment is {header.fragment}: {who} may not push it")
        if self.update_bytes_max is not None and header.payload_bytes > self.update_bytes_max:
            text = f"payload_bytes is {header.payload_bytes}: {who} may push at most {self.update_bytes_max:.0f}"
            raise Refusal(Status.PERMISSION_DENIED, text)


@dataclass(frozen=True, slots=True)
class Permissions:
    """The permissions table.  ``default`` None: a site that is not listed is denied."""

    default: Grant | None
    sites: Mapping[str, Grant]
    roles: frozenset[str] = ROLES


EVERYTHING = Permissions(Grant(), MappingProxyType({}))


def read_permissions(path: str) -> Permissions:
    """Read the table in the file at ``path``.  Raises ``ValueError`` naming the entry and what is wrong with it."""
    if Path(path).stat().st_size > FILE_BYTES_MAX:
        raise ValueError(f"permissions {path}: it has more than {FILE_BYTES_MAX} bytes")
    table = _read_object("permissions", path, "default", "sites", "roles")
    said, sites = table.get("default"), table.get("sites", {})
    try:
        if said not in ("allow", "deny") and not isinstance(said, dict):
            raise ValueError(f'default is {said!r}: wanted "allow", "deny" or an object of permissions, as for a site')
        default = None if said == "deny" else Grant() if said == "allow" else _grant("default.", said)
        if not isinstance(sites, dict) or len(sites) > SITES_MAX:
            raise ValueError(f"sites: wanted an object of at most {SITES_MAX} sites")
        grants = {site: _grant(f"sites.{site}.", grant) for site, grant in sites.items()}
        roles = frozenset() if default is None else ROLES
        if "roles" in table:
            roles = _grant("", {"roles": table["roles"]}).roles
    except ValueError as error:
        raise ValueError(f"permissions {path}: {error}") from error
    return Permissions(default, MappingProxyType(grants), roles)


def _read_object(field: str, path: str, *names: str) -> dict[str, Any]:
    """Read the JSON object in the file at ``path``; ``ValueError`` for invalid JSON or keys other than ``names``."""
    try:
        table = parse_json(Path(path).read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{field} {path} is not JSON: {error}") from error
    if not isinstance(table, dict) or not set(table) <= set(names):
        raise ValueError(f"{field} {path}: wanted an object with {', '.join(names)} only")
    return table


def _grant(prefix: str, said: Any) -> Grant:
    bounds = bounds_of(Grant)
    if not isinstance(said, dict) or not set(said) <= set(bounds):
        extra = sorted(set(said) - set(bounds)) if isinstance(said, dict) else said
        raise ValueError(f"{prefix[:-1]} has {extra!r}: wanted an object of {', '.join(sorted(bounds))}")
    for name, value in said.items():
        if value is None:
            raise ValueError(f"{prefix}{name} is None: leave it out where there is no limit")
        bounds[name](f"{prefix}{name}", value)
    values: dict[str, Any] = {name: frozenset(each) if isinstance(each, list) else each for name, each in said.items()}
    return Grant(**values)


TOKEN_CHARS_MIN = 16
TOKENS_EACH_MAX = 4
REVOKED_MAX = 100_000
_SITE = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_SPIFFE = re.compile(rf"spiffe://(?P<domain>[^/]+)/(?:site/(?P<site>{_SITE})|(?P<role>observer|admin|standby))")
_ID = re.compile(rf"site/{_SITE}|observer|admin|standby")
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller.  ``site`` None and ``anyone`` True: authentication is off (loopback without tokens)."""

    site: str | None = None
    roles: frozenset[str] = frozenset()
    anyone: bool = False
    grant: Grant = field(default=Grant(), compare=False)
    certificate: bytes = field(default=b"", compare=False, repr=False)
    """The client certificate, PEM; empty where none are required."""
    token_digest: bytes = field(default=b"", compare=False, repr=False)

    @property
    def name(self) -> str:
        """``site/a``, ``admin`` ...; empty where ``anyone``."""
        return f"site/{self.site}" if self.site is not None else "".join(sorted(self.roles)[:1] * (not self.anyone))

    def check_role(self, method: str) -> None:
        """Raise PERMISSION_DENIED unless the table lets this caller call ``method``."""
        needs = NEEDS.get(method)
        if needs is None:
            raise Refusal(Status.PERMISSION_DENIED, f"no caller may call {method}")
        if (self.anyone or self.site is not None) and needs in (Needs.SITE, Needs.READER, Needs.KNOWN):
            return
        who, roles, _ = needs.value
        if not (self.roles | self.grant.roles) & roles:
            raise Refusal(Status.PERMISSION_DENIED, f"only {who} may do this")

    def check_site(self, site_id: str) -> None:
        """Raise PERMISSION_DENIED unless this caller is ``site_id``."""
        if not self.anyone and site_id != self.site:
            raise Refusal(Status.PERMISSION_DENIED, f"this caller may not speak for site_id {site_id!r}")

    def check_reader(self, site_id: str) -> None:
        """Raise PERMISSION_DENIED unless this caller may read the run as ``site_id``; '' needs a role."""
        if site_id:
            self.check_site(site_id)
        elif not (self.anyone or self.roles | self.grant.roles):
            text = "site_id is '': only an observer, an admin or a standby reads without a site"
            raise Refusal(Status.PERMISSION_DENIED, text)


@dataclass(frozen=True, slots=True)
class Revoked:
    """Callers refused despite valid credentials: certificates by SHA-256 fingerprint, and whole identities."""

    certificates: frozenset[str] = frozenset()
    ids: frozenset[str] = frozenset()


def read_tokens(path: str) -> dict[bytes, Identity]:
    """Read the tokens of a syncer: the identity that each proves, by the token's SHA-256.  An identity may have up to
    four valid tokens at a time, so that tokens can be rotated.

    Raises ``ValueError`` for a file that others can read, or a token that is too short, unprintable or given twice.
    """
    check_private("tokens_file", path)
    table = _read_object("tokens_file", path, "sites", *sorted(ROLES))
    sites = table.get("sites", {})
    if not isinstance(sites, dict) or not all(re.fullmatch(_SITE, site) for site in sites):
        raise ValueError(f"tokens_file {path}: sites: wanted an object with a token for each site's name")
    holders = [(Identity(site=site), said) for site, said in sorted(sites.items())]
    holders += [(Identity(roles=frozenset({role})), table[role]) for role in sorted(ROLES & set(table))]
    found: dict[bytes, Identity] = {}
    for identity, said in holders:
        given = said if isinstance(said, list) and 1 <= len(said) <= TOKENS_EACH_MAX else [said]
        for token in given:
            if not isinstance(token, str) or len(token) < TOKEN_CHARS_MIN or not is_token(token):
                who = identity.site or identity.name
                raise ValueError(
                    f"tokens_file {path}: the token of {who} must be {TOKEN_CHARS_MIN} or more printable ASCII "
                    f"characters, or up to {TOKENS_EACH_MAX} of them in [ ]"
                )
            digest = hashlib.sha256(token.encode()).digest()
            if digest in found:
                raise ValueError(f"tokens_file {path}: one token is given twice")
            found[digest] = replace(identity, token_digest=digest)
    return found


def read_revoked(path: str) -> Revoked:
    """Read the revocation list, which ``diloco certs revoke`` writes.  Raises ``ValueError`` naming the wrong entry."""
    table = _read_object("revoked_file", path, "certificates", "ids")
    for name, pattern in (("certificates", _FINGERPRINT), ("ids", _ID)):
        listed = table.get(name, [])
        if not isinstance(listed, list) or len(listed) > REVOKED_MAX:
            raise ValueError(f"revoked_file {path}: {name}: wanted a list of at most {REVOKED_MAX}")
        for each in listed:
            if not isinstance(each, str) or not pattern.fullmatch(each):
                raise ValueError(f"revoked_file {path}: {name} has {each!r}")
    return Revoked(**{name: frozenset(listed) for name, listed in table.items()})


class Authenticator:
    """Determines the ``Identity`` of a call before any of its messages is read."""

    def __init__(self, options: SecurityOptions) -> None:
        self._options = options
        self._tokens = Watched.where("tokens_file", options.tokens_file, read_tokens, dict[bytes, Identity]())
        self._permissions = Watched.where("permissions", options.permissions, read_permissions, EVERYTHING)
        self._revoked = Watched.where("revoked_file", options.revoked_file, read_revoked, Revoked())
        self.watched = self._tokens, self._permissions, self._revoked
        """The files that it reads."""

    def identify(self, context: Any) -> Identity:
        """Return the caller's identity with its grant.

        Raises UNAUTHENTICATED for missing, unknown or revoked credentials and for TLS older than 1.3; PERMISSION_DENIED
        when the permissions file denies the caller.
        """
        transport = context.auth_context()
        for version in transport.get("ssl_tls_version", ()):
            if version != b"TLSv1.3":
                raise Refusal(Status.UNAUTHENTICATED, "TLS 1.3 is needed")
        if not self._options.tokens_file and not self._options.require_client_cert:
            return Identity(roles=ROLES, anyone=True)
        caller = self._holder_of_token(context.invocation_metadata()) if self._options.tokens_file else None
        if self._options.require_client_cert:
            ids = list(transport.get("peer_spiffe_id", ()))
            match = _SPIFFE.fullmatch(ids[0].decode("utf-8", "replace")) if len(ids) == 1 else None
            if match is None or (self._options.trust_domain and match["domain"] != self._options.trust_domain):
                raise Refusal(
                    Status.UNAUTHENTICATED,
                    "the client certificate does not hold one SPIFFE id of a site, observer, admin or standby",
                )
            certified = Identity(
                site=match["site"],
                roles=frozenset() if match["site"] else frozenset({match["role"]}),
                certificate=b"".join(transport.get("x509_pem_cert", ())),
                token_digest=caller.token_digest if caller is not None else b"",
            )
            if caller is not None and certified != caller:
                raise Refusal(Status.UNAUTHENTICATED, "the token and the client certificate name different callers")
            caller = certified
        assert caller is not None
        return self._granted(caller)

    def check_still(self, identity: Identity, method: str) -> None:
        """Raise as ``identify`` would if this caller called now, and as the permissions would for ``method``."""
        if self._options.tokens_file and self._tokens.value.get(identity.token_digest) != identity:
            raise Refusal(Status.UNAUTHENTICATED, "the token is no longer known")
        now = self._granted(identity)
        now.check_role(method)
        if method == "Push" and not now.grant.may_push:
            raise Refusal(Status.PERMISSION_DENIED, f"{now.name} may no longer push")

    def _granted(self, identity: Identity) -> Identity:
        """Return ``identity`` with its grant; refuse one that is revoked, or that the permissions deny."""
        revoked, table = self._revoked.value, self._permissions.value
        if identity.name in revoked.ids:
            raise Refusal(Status.UNAUTHENTICATED, f"{identity.name} was revoked")
        if revoked.certificates and identity.certificate:
            der = ssl.PEM_cert_to_DER_cert(identity.certificate.decode("ascii"))
            if hashlib.sha256(der).hexdigest() in revoked.certificates:
                raise Refusal(Status.UNAUTHENTICATED, f"this certificate of {identity.name} was revoked")
        if identity.anyone:
            return identity
        if identity.site is None:
            if not identity.roles <= table.roles:
                raise Refusal(Status.PERMISSION_DENIED, f"{identity.name} is not in the permissions of this run")
            return identity
        grant = table.sites.get(identity.site, table.default)
        if grant is None:
            raise Refusal(Status.PERMISSION_DENIED, f"site {identity.site} is not in the permissions of this run")
        return identity if grant is identity.grant else replace(identity, grant=grant)

    def _holder_of_token(self, metadata: Any) -> Identity:
        values = [value for key, value in metadata if key == "authorization"]
        if len(values) != 1 or not isinstance(values[0], str) or not values[0].startswith("Bearer "):
            raise Refusal(Status.UNAUTHENTICATED, "a token is needed: authorization: Bearer <token>")
        given = values[0].removeprefix("Bearer ").encode()
        # Found by its hash, so that timing reveals nothing of a token.
        found = self._tokens.value.get(hashlib.sha256(given).digest())
        if found is None:
            raise Refusal(Status.UNAUTHENTICATED, "the token is not known")
        return found
