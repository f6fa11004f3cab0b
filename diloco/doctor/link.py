"""`diloco doctor`'s checks of the path to one address: DNS, TCP, TLS, and the protocol spoken there."""

from __future__ import annotations

import datetime
import ssl
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.doctor.findings import Finding, Level, fail, ok, warn
from diloco.wire.checkup import Greeting, Heard, greet, resolve, speaks_tls
from diloco.wire.options import SYSTEM_ROOTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diloco.deploy.certificates import Facts
    from diloco.wire.options import SecurityOptions

GREET_S = 3.0
ENDS_SOON_DAYS = 10
HERE = ("127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Way:
    """How far the checks got: ``reached`` is whether the other end answered, ``open`` whether gRPC can be tried."""

    findings: list[Finding]
    reached: bool
    open: bool


def way_to(address: str, security: SecurityOptions) -> Way:
    """Check every step from name resolution to the first byte of the answer."""
    if address.startswith("unix:"):
        return Way([ok("dns", f"{address} is a socket of this machine")], reached=True, open=True)
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        found = resolve(host, int(port))
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        remedy = "give the right name, or an IP address; look at /etc/resolv.conf and at VPNs"
        return Way([fail("dns", f"{host} does not resolve: {why}", remedy)], reached=False, open=False)
    names = ", ".join(found)
    dns = ok("dns", names if host == names else f"{host}: {names}", addresses=list(found))
    greetings = _greetings(found, int(port), host, security)
    tcp = _tcp(port, greetings)
    begun = [each for each in greetings.values() if isinstance(each, Greeting)]
    if not begun:
        return Way([dns, tcp], reached=False, open=False)
    best = next((each for each in begun if each.heard is Heard.HTTP2), begun[0])
    spoken = _spoken(address, host, security, best)
    return Way([dns, tcp, *spoken], reached=best.heard is not Heard.SILENCE, open=best.heard is Heard.HTTP2)


def _greetings(
    addresses: tuple[str, ...], port: int, host: str, security: SecurityOptions
) -> dict[str, Greeting | OSError]:
    """Greet all addresses in parallel; return each one's greeting or error."""

    def one(address: str) -> Greeting | OSError:
        try:
            return greet(address, port, host, security, GREET_S)
        except OSError as error:
            return error

    with ThreadPoolExecutor(max_workers=len(addresses)) as threads:
        return dict(zip(addresses, threads.map(one, addresses), strict=True))


def _tcp(port: str, greetings: Mapping[str, Greeting | OSError]) -> Finding:
    told, failed, figures = [], [], {}
    for address, greeting in greetings.items():
        if isinstance(greeting, Greeting):
            figures[address] = round(greeting.connect_s * 1e3, 3)
            told.append(f"{address} port {port} connects in {greeting.connect_s * 1e3:.3g} ms")
        else:
            failed.append(f"{address} port {port}: {_in_words(greeting)}")
    says = "; ".join([*told, *failed])
    if not told:
        refused = any(isinstance(each, ConnectionRefusedError) for each in greetings.values())
        start = "start the syncer, or give the port that it said it listens at"
        remedy = start if refused else "let a firewall or security group on the way pass this port, outwards from here"
        return fail("tcp", says, remedy)
    # A name such as localhost has two loopback addresses: a syncer listens at one of them, and gRPC finds it.
    if failed and not set(greetings) <= set(HERE):
        remedy = "take the dead address out of DNS: each connection may try it first"
        return warn("tcp", says, remedy, connect_ms=figures)
    return ok("tcp", "; ".join(told), connect_ms=figures)


def _in_words(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer (dropped on the way?)"
    return error.strerror or str(error) or type(error).__name__


def _spoken(address: str, host: str, security: SecurityOptions, greeting: Greeting) -> list[Finding]:
    """Check TLS, and the protocol spoken over it."""
    findings = []
    if security.tls_ca:
        findings.append(_tls(address, host, security, greeting))
        if findings[-1].level is Level.FAIL:
            return findings
    if greeting.heard is Heard.HTTP2:
        return findings
    silent = greeting.heard is Heard.SILENCE
    if not (security.tls_ca or silent) and speaks_tls(address):
        remedy = "give site.tls_ca=FILE, and site.tls_cert and site.tls_key if it asks for them"
        return [*findings, fail("tls", "it speaks TLS, and this end is told to do without", remedy)]
    says = f"{greeting.heard.value if greeting.heard else 'nothing'} answers, where a syncer speaks HTTP/2"
    if silent:
        remedy = "it accepts and says nothing: a proxy or firewall that holds connections back, or a stuck process"
    elif greeting.heard is Heard.HTTP1:
        remedy = "this is a web server or proxy: give the syncer's own port, or let the proxy pass HTTP/2 (gRPC)"
    else:
        remedy = "give the syncer's own host and port"
    return [*findings, fail("http2", says, remedy)]


def _tls(address: str, host: str, security: SecurityOptions, greeting: Greeting) -> Finding:
    facts = _facts(greeting.shown)
    if greeting.unverified:
        return _unverified(host, security, greeting.alert, facts)
    if greeting.alert:
        return _alerted(address, security, greeting.alert)
    if greeting.heard is Heard.CLOSED:
        remedy = _TAKES_ANOTHER if security.tls_cert else _WANTS_ONE
        return fail("tls", "it ends the connection when it has seen what this end shows", remedy)
    assert facts is not None, "a handshake that stands has a certificate"
    left = facts.ends - datetime.datetime.now(datetime.UTC)
    both = "both ends known" if security.tls_cert else "the syncer known"
    says = (
        f"{greeting.tls_version}, {both}, certificate of {', '.join(facts.hosts) or facts.subject} "
        f"by {facts.issuer}, good until {facts.ends:%Y-%m-%d} ({left.days} days)"
    )
    figures = {"handshake_ms": round(greeting.handshake_s * 1e3, 3), "ends": facts.ends.isoformat()}
    if left < datetime.timedelta(days=ENDS_SOON_DAYS):
        return warn("tls", says, _RENEW.format(host=host), **figures)
    return ok("tls", says, **figures)


_WANTS_ONE = "it may want to see a certificate: give site.tls_cert and site.tls_key"
_TAKES_ANOTHER = "have site.tls_cert issued by the authority that the syncer knows (its cluster.syncer.tls_ca)"
_RENEW = (
    "where the authority is: diloco certs issue DIR --syncer --host {host}; the syncer reads the new files by itself"
)


def _unverified(host: str, security: SecurityOptions, alert: str, facts: Facts | None) -> Finding:
    """Say why this end refused the syncer's certificate: its dates, its host names or its signer."""
    now = datetime.datetime.now(datetime.UTC)
    if facts is not None and now > facts.ends:
        return fail(
            "tls", f"the syncer's certificate ended on {facts.ends:%Y-%m-%d %H:%M} UTC", _RENEW.format(host=host)
        )
    if facts is not None and now < facts.begins:
        says = (
            f"the syncer's certificate is good from {facts.begins:%Y-%m-%d %H:%M} UTC only, and here it is {now:%H:%M}"
        )
        return fail("tls", says, "set the clocks of both machines (chrony, systemd-timesyncd)")
    if "mismatch" in alert.lower():
        names = ", ".join(facts.hosts) if facts is not None else ""
        remedy = f"give one of these names, or: diloco certs issue DIR --syncer --host {host}"
        return fail("tls", f"the syncer's certificate is not for {host}: it names {names or 'nobody'}", remedy)
    signer = facts.issuer if facts is not None else "somebody else"
    what = "this machine's roots" if security.tls_ca == SYSTEM_ROOTS else f"site.tls_ca {security.tls_ca}"
    remedy = "give the authority.pem of the run as site.tls_ca; if nothing changed on your side, somebody is in between"
    return fail("tls", f"{what} did not sign the syncer's certificate, {signer} did: {alert}", remedy)


def _alerted(address: str, security: SecurityOptions, alert: str) -> Finding:
    """Say why the handshake failed, or why the other end refused this end's certificate."""
    alert = alert.upper().replace(" ", "_")
    if "CERTIFICATE_REQUIRED" in alert:
        return fail("tls", "the syncer wants to see a certificate of this site", "give site.tls_cert and site.tls_key")
    if "UNKNOWN_CA" in alert or "BAD_CERTIFICATE" in alert or "CERTIFICATE_UNKNOWN" in alert:
        what = f"the syncer does not know who signed {security.tls_cert or 'this end'}"
        return fail("tls", what, _TAKES_ANOTHER)
    if "CERTIFICATE_EXPIRED" in alert:
        return fail("tls", f"the syncer says that {security.tls_cert} is over", "diloco certs issue DIR --site NAME")
    if "WRONG_VERSION_NUMBER" in alert or speaks_tls(address) is False:
        return fail("tls", "it does not speak TLS", "leave site.tls_ca out, or give the port that speaks it")
    return fail("tls", f"the handshake failed: {alert}", "TLS 1.3 must reach the syncer itself: is a proxy in between?")


def _facts(der: bytes) -> Facts | None:
    from diloco.deploy.certificates import CertificateError, describe

    try:
        return describe(ssl.DER_cert_to_PEM_cert(der).encode()) if der else None
    except CertificateError:
        return None


def own_files(security: SecurityOptions, site_id: str) -> list[Finding]:
    """Check this end's own credentials, as far as is possible without the syncer."""
    if security.token_file and not security.tls_cert:
        return [ok("files", f"a token, from {security.token_file}")]
    if not security.tls_cert:
        return [ok("files", "nothing to show: no token and no certificate")]
    from pathlib import Path

    from diloco.deploy.certificates import CertificateError, describe

    try:
        facts = describe(Path(security.tls_cert).read_bytes())
    except CertificateError as error:
        return [fail("files", f"site.tls_cert {security.tls_cert}: {error}", "diloco certs issue DIR --site NAME")]
    left = facts.ends - datetime.datetime.now(datetime.UTC)
    says = (
        f"certificate of {', '.join(facts.ids) or facts.subject}, good until {facts.ends:%Y-%m-%d} ({left.days} days)"
    )
    remedy = f"where the authority is: diloco certs issue DIR --site {site_id}"
    if left < datetime.timedelta(0):
        return [fail("files", f"site.tls_cert {security.tls_cert} ended on {facts.ends:%Y-%m-%d %H:%M} UTC", remedy)]
    if len(facts.ids) != 1:
        return [fail("files", f"{says}: exactly one SPIFFE id is wanted in it", remedy)]
    if left < datetime.timedelta(days=ENDS_SOON_DAYS):
        return [warn("files", says, remedy)]
    return [ok("files", says, ids=list(facts.ids))]
