"""`diloco doctor`'s checks of the path to one address, and of the syncer that answers there, once or during a run."""

from __future__ import annotations

import datetime
import ssl
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from diloco.deploy.certificates import CertificateError, Facts, describe
from diloco.doctor import Finding, Level, fail, ok, warn
from diloco.observe.text import size, standby_line
from diloco.sync.link import megabits
from diloco.wire.checkup import Greeting, Heard, greet, resolve, speaks_tls
from diloco.wire.messages import PROBE_BYTES_MAX, ProbeAsk, Refused, Status, Unreachable
from diloco.wire.options import SYSTEM_ROOTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from diloco.wire.checkup import Checkup, Probed
    from diloco.wire.messages import ProbeAnswer
    from diloco.wire.options import SecurityOptions


ROUND_TRIPS = 20
ROUND_TRIPS_S = 5.0
CLOCK_WARN_S = 1.0
CLOCK_FAIL_S = 300.0
"""Certificates are valid from five minutes before their creation (``certificates.SKEW``), and no earlier."""
SERVICES = ("grpc.", "diloco.wire.")


def visit(
    checkup: Checkup, site_id: str, ask: ProbeAsk, limit_s: float, bytes_each: int = PROBE_BYTES_MAX
) -> list[Finding]:
    """Run all checks of the syncer.  A failed check does not stop the next, unless the first gets no answer.

    ``ask`` is the content of the site's join, without a run only its protocol.  ``bytes_each`` bytes of filler go each
    way within ``limit_s``; none where that is 0.
    """
    try:
        process = checkup.serving("")
    except Unreachable as error:
        return [fail("grpc", error.why, "is this the syncer's own port? its log says what it refused")]
    except Refused as error:
        return [fail("grpc", f"no health service: {error.text}", "give the syncer's own host and port")]
    findings = [ok("grpc", "it answers")] if process else [warn("grpc", "it shuts down", "ask again when it is back")]
    findings += _asked("run", lambda: [_run(checkup, ask.run_id)])
    findings += _asked("rtt", lambda: [_round_trip(checkup)])
    known = _asked("identity", lambda: _probed(checkup, site_id, ask))
    findings += known
    if limit_s and any(each.check == "clock" for each in known):  # The syncer supports probes.
        findings += _asked("bandwidth", lambda: [_bandwidth(checkup, ask.protocol, limit_s, bytes_each)])
    return findings


def _asked(name: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return check()
    except (Unreachable, Refused) as error:
        return [fail(name, f"it answered before, but not now: {error}", "check that it still runs, and ask again")]


def _run(checkup: Checkup, run_id: str) -> Finding:
    """Check which run the syncer serves, and whether it is ours."""
    names = [name for name in checkup.names() if name and not name.startswith(SERVICES)]
    told = f"run {', '.join(names)}" if names else "a run whose name it does not give"
    if not run_id:
        return ok("run", f"it serves {told}; give run=NAME to have this site's settings compared", runs=names)
    serves = checkup.serving(run_id)
    if serves is None:
        return fail("run", f"run {run_id} is not served there, but {told}", "give the right run or address")
    if serves:
        return ok("run", f"it serves run {run_id}", runs=names)
    remedy = "look at `diloco status` there: a standby, or a syncer that waits for disk space or a backup"
    return warn("run", f"it knows run {run_id} and takes no updates at present", remedy, runs=names)


def _probed(checkup: Checkup, site_id: str, ask: ProbeAsk) -> list[Finding]:
    """Check the identity that the syncer gives us, its clock, and whether it has the same run."""
    try:
        checkup.come_in()
    except Refused as error:
        return [fail("identity", f"it refuses us: {error.text}", _remedy(error))]
    try:
        probed = checkup.probe(ask if checkup.serving(ask.run_id) else replace(ask, run_id=""))
    except Refused as error:
        if error.status is not Status.UNIMPLEMENTED:
            raise
        says = "an earlier release: it reports neither clock nor rates, and compares settings only at a join"
        remedy = "upgrade when the run allows it: the syncer first, then its sites"
        return [ok("identity", "it lets us in"), warn("protocol", says, remedy)]
    return [_identity(probed.answer, site_id), *_meant(probed.answer, ask), _clock(probed)]


def _identity(answer: ProbeAnswer, site_id: str) -> Finding:
    who = answer.identity
    if who.startswith("site/") and who != f"site/{site_id}":
        remedy = f"set site.id={who.removeprefix('site/')}, or show the credentials made for {site_id}"
        return fail("identity", f"it takes us for {who}, but site.id is {site_id}", remedy, identity=who)
    told = f"it takes us for {who}" if who else "authentication is off: any client may join"
    return ok("identity", told, identity=who)


def _meant(answer: ProbeAnswer, ask: ProbeAsk) -> list[Finding]:
    """Check whether it is a standby, which protocols it speaks, and whether it would accept a join."""
    findings = []
    if answer.standby_of:
        findings.append(ok("role", f"it is the standby of {answer.standby_of}", standby_of=answer.standby_of))
    spoken = f"{answer.protocol_oldest} to {answer.protocol}"
    if not answer.protocol_oldest <= ask.protocol <= answer.protocol:
        remedy = "install the same release at both ends; in a running run the syncer first"
        return [*findings, fail("protocol", f"it speaks {spoken}, and this end {ask.protocol}", remedy)]
    findings.append(ok("protocol", f"it speaks {spoken}, and this end {ask.protocol}"))
    if not ask.run_id:
        return findings
    if answer.difference:
        remedy = "start this site from the run's own config.yaml (--config), or with the settings of its syncer"
        return [*findings, fail("settings", answer.difference, remedy)]
    return [*findings, ok("settings", f"layout and shared settings are those of run {answer.run_id}")]


def _clock(probed: Probed) -> Finding:
    ahead_s, doubt_s = probed.ahead_ns / 1e9, probed.round_s / 2
    figures = {"ahead_s": ahead_s, "doubt_s": doubt_s}
    order = "ahead of" if ahead_s > 0 else "behind"
    told = f"its clock is {abs(ahead_s):.3g} s {order} ours (to {doubt_s:.2g} s)"
    if abs(ahead_s) - doubt_s > CLOCK_FAIL_S:
        return fail("clock", f"{told}: certificates may not be valid yet", _SET_CLOCKS, **figures)
    if abs(ahead_s) - doubt_s > CLOCK_WARN_S:
        return warn("clock", f"{told}: the times in the two machines' logs cannot be compared", _SET_CLOCKS, **figures)
    return ok("clock", f"its clock and ours agree to {max(abs(ahead_s), doubt_s):.2g} s", **figures)


def _bandwidth(checkup: Checkup, protocol: int, limit_s: float, bytes_each: int) -> Finding:
    """Measure the bytes per second of one connection, up and down."""
    ask = ProbeAsk(protocol, bytes_up=bytes_each, bytes_down=bytes_each, limit_ns=int(limit_s * 1e9))
    try:
        probed = checkup.probe(ask)
    except Refused as error:
        return warn("bandwidth", f"not measured: {error.text}", "use the credentials of a site that may push")
    except Unreachable as error:
        if error.retry_after_s is None:
            raise
        return warn("bandwidth", f"not measured: {error.why}", f"ask again in {error.retry_after_s:.0f} s")
    up, down = (float(way.bytes_per_s) if way is not None else 0.0 for way in (probed.up, probed.down))
    carried = [f"{way.bytes / 1e6:.3g} MB" if way is not None else "nothing" for way in (probed.up, probed.down)]
    figures = {"up_bytes_per_s": up, "down_bytes_per_s": down}
    if not (up and down):
        says = f"only {carried[0]} of filler went up and {carried[1]} down in {limit_s:g} s"
        return warn("bandwidth", f"{says}: too little to measure", "give more time: --seconds 10", **figures)
    says = f"up {megabits(up)}, down {megabits(down)} on one connection ({carried[0]} and {carried[1]} of filler)"
    return ok("bandwidth", says, **figures)


def _remedy(error: Refused) -> str:
    if error.status is Status.PERMISSION_DENIED:
        return "have this identity listed in the syncer's cluster.syncer.permissions"
    if "revoked" in error.text:
        return "have a new token or certificate issued; this one was revoked"
    if "token" in error.text:
        return "give site.token_file=FILE with this site's token, one of the syncer's cluster.syncer.tokens_file"
    if "certificate" in error.text:
        return "have a certificate issued for this site: diloco certs issue DIR --site NAME"
    return "ask the operator of the syncer"


def _round_trip(checkup: Checkup) -> Finding:
    taken = checkup.round_trips(ROUND_TRIPS, ROUND_TRIPS_S)
    usual, most = median(taken), sorted(taken)[min(len(taken) - 1, int(0.95 * len(taken)))]
    told = f"a small call takes {usual * 1e3:.3g} ms (median of {len(taken)}; 95 % within {most * 1e3:.3g} ms)"
    figures = {"median_ms": round(usual * 1e3, 3), "p95_ms": round(most * 1e3, 3)}
    if most > 3 * usual + 0.05:
        remedy = "a queue on the path fills up, or a machine is busy: find what else uses this link"
        return warn("rtt", f"{told}: it varies much", remedy, **figures)
    return ok("rtt", told, **figures)


# --- `diloco doctor`'s checks of the path to one address -------------------------------------------------------------

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

    def greeted(number: str) -> Greeting | OSError:
        try:
            return greet(number, int(port), host, security, GREET_S)
        except OSError as error:
            return error

    with ThreadPoolExecutor(max_workers=len(found)) as threads:
        greetings = dict(zip(found, threads.map(greeted, found), strict=True))
    tcp = _tcp(port, greetings)
    begun = [each for each in greetings.values() if isinstance(each, Greeting)]
    if not begun:
        return Way([dns, tcp], reached=False, open=False)
    best = next((each for each in begun if each.heard is Heard.HTTP2), begun[0])
    spoken = _spoken(address, host, security, best)
    return Way([dns, tcp, *spoken], reached=best.heard is not Heard.SILENCE, open=best.heard is Heard.HTTP2)


def _tcp(port: str, greetings: Mapping[str, Greeting | OSError]) -> Finding:
    told, failed, figures = [], [], {}
    for address, greeting in greetings.items():
        if isinstance(greeting, Greeting):
            figures[address] = round(greeting.connect_s * 1e3, 3)
            told.append(f"{address} port {port} connects in {greeting.connect_s * 1e3:.3g} ms")
        else:
            dropped = "no answer (dropped on the way?)" if isinstance(greeting, TimeoutError) else ""
            why = dropped or greeting.strerror or str(greeting) or type(greeting).__name__
            failed.append(f"{address} port {port}: {why}")
    says = "; ".join([*told, *failed])
    if not told:
        refused = any(isinstance(each, ConnectionRefusedError) for each in greetings.values())
        start = "start the syncer, or give the port on which it said that it listens"
        remedy = start if refused else "let firewalls and security groups on the path pass this port outwards"
        return fail("tcp", says, remedy)
    # A name such as localhost has two loopback addresses: a syncer listens at one of them, and gRPC finds it.
    if failed and not set(greetings) <= set(HERE):
        remedy = "take the dead address out of DNS: each connection may try it first"
        return warn("tcp", says, remedy, connect_ms=figures)
    return ok("tcp", "; ".join(told), connect_ms=figures)


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
        return [*findings, fail("tls", "it speaks TLS, but this end is set to do without", remedy)]
    says = f"{greeting.heard.value if greeting.heard else 'nothing'} answers, where a syncer speaks HTTP/2"
    if silent:
        remedy = "it accepts and says nothing: a proxy or firewall that holds connections back, or a stuck process"
    elif greeting.heard is Heard.HTTP1:
        remedy = "this is a web server or proxy: give the syncer's own port, or let the proxy pass HTTP/2 (gRPC)"
    else:
        remedy = "give the syncer's own host and port"
    return [*findings, fail("http2", says, remedy)]


def _tls(address: str, host: str, security: SecurityOptions, greeting: Greeting) -> Finding:
    facts = None
    if greeting.shown:
        with suppress(CertificateError):
            facts = describe(ssl.DER_cert_to_PEM_cert(greeting.shown).encode())
    if greeting.unverified:
        return _unverified(host, security, greeting.alert, facts)
    if greeting.alert:
        return _alerted(address, security, greeting.alert)
    if greeting.heard is Heard.CLOSED:
        remedy = _TAKES_ANOTHER if security.tls_cert else _WANTS_ONE
        return fail("tls", "it closed the connection after it saw this end's credentials", remedy)
    assert facts is not None, "a completed handshake has a certificate"
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


_WANTS_ONE = "it may require a certificate: give site.tls_cert and site.tls_key"
_TAKES_ANOTHER = "have site.tls_cert issued by the authority that the syncer trusts (its cluster.syncer.tls_ca)"
_SET_CLOCKS = "set the clocks of both machines by NTP (chrony, systemd-timesyncd)"
_RENEW = (
    "on the authority's machine: diloco certs issue DIR --syncer --host {host}; the syncer reloads its files itself"
)


def _unverified(host: str, security: SecurityOptions, alert: str, facts: Facts | None) -> Finding:
    """Say why this end refused the syncer's certificate: its dates, its host names or its signer."""
    now = datetime.datetime.now(datetime.UTC)
    if facts is not None and now > facts.ends:
        says = f"the syncer's certificate ended on {facts.ends:%Y-%m-%d %H:%M} UTC"
        return fail("tls", says, _RENEW.format(host=host), ends=facts.ends.isoformat())
    if facts is not None and now < facts.begins:
        valid = f"valid from {facts.begins:%Y-%m-%d %H:%M} UTC only"
        return fail("tls", f"the syncer's certificate is {valid}, and here it is {now:%H:%M}", _SET_CLOCKS)
    if "mismatch" in alert.lower():
        names = ", ".join(facts.hosts) if facts is not None else ""
        remedy = f"give one of these names, or: diloco certs issue DIR --syncer --host {host}"
        return fail("tls", f"the syncer's certificate is not for {host}: it names {names or 'no host'}", remedy)
    signer = facts.issuer if facts is not None else "another authority"
    what = "this machine's roots" if security.tls_ca == SYSTEM_ROOTS else f"site.tls_ca {security.tls_ca}"
    remedy = "give the run's authority.pem as site.tls_ca; if nothing changed on your side, an attacker is in between"
    return fail("tls", f"{what} did not sign the syncer's certificate, {signer} did: {alert}", remedy)


def _alerted(address: str, security: SecurityOptions, alert: str) -> Finding:
    """Say why the handshake failed, or why the other end refused this end's certificate."""
    alert = alert.upper().replace(" ", "_")
    if "CERTIFICATE_REQUIRED" in alert:
        return fail("tls", "the syncer requires a certificate of this site", "give site.tls_cert and site.tls_key")
    if "UNKNOWN_CA" in alert or "BAD_CERTIFICATE" in alert or "CERTIFICATE_UNKNOWN" in alert:
        return fail("tls", f"the syncer does not trust the signer of {security.tls_cert or 'this end'}", _TAKES_ANOTHER)
    if "CERTIFICATE_EXPIRED" in alert:
        return fail("tls", f"the syncer says: {security.tls_cert} has expired", "diloco certs issue DIR --site NAME")
    if "WRONG_VERSION_NUMBER" in alert or speaks_tls(address) is False:
        return fail("tls", "it does not speak TLS", "leave site.tls_ca out, or give the port that speaks TLS")
    return fail("tls", f"the handshake failed: {alert}", "TLS 1.3 must reach the syncer itself: is a proxy in between?")


def own_files(security: SecurityOptions, site_id: str) -> list[Finding]:
    """Check this end's own credentials, as far as is possible without the syncer."""
    if security.token_file and not security.tls_cert:
        return [ok("files", f"a token, from {security.token_file}")]
    if not security.tls_cert:
        return [ok("files", "nothing to show: no token and no certificate")]
    try:
        facts = describe(Path(security.tls_cert).read_bytes())
    except (CertificateError, OSError) as error:
        return [fail("files", f"site.tls_cert {security.tls_cert}: {error}", "diloco certs issue DIR --site NAME")]
    left = facts.ends - datetime.datetime.now(datetime.UTC)
    whose = ", ".join(facts.ids) or facts.subject
    says = f"certificate of {whose}, good until {facts.ends:%Y-%m-%d} ({left.days} days)"
    remedy = f"on the authority's machine: diloco certs issue DIR --site {site_id}"
    if left < datetime.timedelta(0):
        says = f"site.tls_cert {security.tls_cert} ended on {facts.ends:%Y-%m-%d %H:%M} UTC"
        return [fail("files", says, remedy, ends=facts.ends.isoformat())]
    if len(facts.ids) != 1:
        return [fail("files", f"{says}: it must have exactly one SPIFFE id", remedy)]
    if left < datetime.timedelta(days=ENDS_SOON_DAYS):
        return [warn("files", says, remedy, ends=facts.ends.isoformat())]
    return [ok("files", says, ids=list(facts.ids))]


# --- `diloco doctor --watch`: what is wrong with a run that is under way ---------------------------------------------

HOLDS_S: Mapping[str, float] = {
    **{"SyncerAway": 120.0, "SiteSilent": 60.0, "SiteStale": 600.0, "LossDiverges": 600.0, "DiskFilling": 300.0},
    **{"StandbyAway": 60.0, "StandbySlow": 600.0, "NoStandby": 1800.0, "StandbyDoesNotFollow": 120.0},
    "CertificateExpires": 0.0,
}
"""How long a condition holds before it is reported.  These names, times and the thresholds below are those of the rules
in ``configs/monitoring/alerts.yaml``; a certificate has no metric, so no rule."""
OF_ANY = ("SyncerAway", "StandbyDoesNotFollow", "CertificateExpires")
"""The conditions that do not need the answer of a syncer."""
SILENT_S = 30.0
STALE_SHARE = 0.5
"""Share of ``outer.staleness_max`` that a site may be behind."""
LOSS_RISE = 0.5
"""Nats a token above the site's lowest loss."""
BEHIND_BYTES = 64e6


def conditions(status: Mapping[str, Any], lowest: dict[str, float]) -> Iterator[Finding]:
    """Yield what is wrong by a syncer's or a standby's ``status``, or by ``{"unreachable": why}``.

    ``lowest`` keeps the lowest loss of each site.  The figure ``site`` names the site, where there is one.
    """
    if "unreachable" in status:
        yield fail("SyncerAway", status["unreachable"], "start it with the same command, or promote its standby")
    if status.get("role") == "standby" and (status["failed"] or not status["following"]):
        remedy = "if the syncer is lost for good: diloco standby promote"
        yield fail("StandbyDoesNotFollow", standby_line(status), remedy)
    limit = status.get("staleness_max", inf)  # A syncer of an earlier release does not report it.
    for name, site in status.get("sites", {}).items():
        heard_s, loss, behind = (site.get(key) for key in ("heard_seconds_ago", "loss", "staleness"))
        if site["status"] in ("left", "evicted") or (heard_s is None and site["status"] != "silent"):
            continue
        if heard_s is None or heard_s > SILENT_S:
            since = f"for {heard_s:.0f} s" if heard_s is not None else "since the syncer's start"
            remedy = "look at its link and its process; the other sites train on"
            yield warn("SiteSilent", f"the syncer has not heard {name} {since}", remedy, site=name)
            continue
        if (behind or 0) > STALE_SHARE * limit:
            says = f"{name} is {behind} versions behind; updates more than {limit} behind are refused"
            yield warn("SiteStale", says, "diloco status shows its link: a faster one or a smaller codec", site=name)
        best = lowest.get(name, inf)
        if loss is not None and loss <= best + LOSS_RISE:
            lowest[name] = min(best, loss)
        elif best < inf:
            says = f"the loss of {name} was {best:.3f}, and is {'no number' if loss is None else f'{loss:.3f}'}"
            remedy = "compare its data, learning rate and machine (diloco canary) with the other sites', or evict it"
            yield fail("LossDiverges", says, remedy, site=name, loss=loss, lowest=best)
    free, most = status.get("disk_free_bytes"), status.get("memory_bytes_max")
    if free is not None and most is not None and free < most:
        says = f"the syncer's disk has {size(free)} free, less than the {size(most)} that the run may take in memory"
        yield fail("DiskFilling", says, "make room: the next snapshot may not fit", free_bytes=free)
    standby = status.get("replication") or {}
    if standby.get("mode", "off") == "off":
        return
    if standby["detached"]:
        yield warn("NoStandby", "the run is on one disk", "start a standby: diloco standby follow")
    elif not standby["following"]:
        remedy = "start it again, or go on without it: diloco standby detach"
        yield fail("StandbyAway", f"the syncer has heard no standby for {standby['away_seconds']:.0f} s", remedy)
    lacks = standby.get("behind_bytes") or 0
    if standby.get("slow") or lacks > BEHIND_BYTES:
        says = f"standby {standby['standby']} does not keep up: it lacks {size(lacks)} of the journal"
        yield warn("StandbySlow", says, "look at its disk and at the link between them", behind_bytes=lacks)


def certificates(addresses: Sequence[str], security: SecurityOptions) -> list[Finding]:
    """Return which certificates of the syncers, and of this end, end soon or have ended; [] without TLS.

    Each of ``addresses`` is one syncer's, or its and its standby's.  The figure ``of`` says whose certificate it is.
    """
    if not security.tls_ca:
        return []
    own = own_files(security, "NAME") if security.tls_cert else []
    found = [(addresses[0], security.tls_cert, each) for each in own]
    for address in addresses:
        for one in map(str.strip, address.split(",")):
            found += [(address, one, each) for each in way_to(one, security).findings if each.check == "tls"]
    return [
        replace(each, check="CertificateExpires", says=f"{of}: {each.says}", figures={"of": of}, address=address)
        for address, of, each in found
        if each.level is not Level.OK and "ends" in each.figures
    ]


@dataclass(slots=True)
class Alerts:
    """The conditions of a run: when each was seen first, and which have been reported; and each site's lowest loss."""

    since_s: dict[tuple[object, ...], float] = field(default_factory=dict)
    told: dict[tuple[object, ...], Finding] = field(default_factory=dict)
    lowest: dict[str, float] = field(default_factory=dict)

    def changes(
        self, found: Mapping[str, Mapping[str, Any]], others: Iterable[Finding], now_s: float
    ) -> list[tuple[str, Finding]]:
        """Return the conditions that begin, having held for ``HOLDS_S``, and those that end, each with that word.

        ``found`` has each syncer's status by its address.  Without an answer its conditions stay as they are.
        """
        holding = dict[tuple[object, ...], Finding]()
        for address, status in found.items():
            for each in (*conditions(status, self.lowest), *(each for each in others if each.address == address)):
                about = each.figures.get("site") or each.figures.get("of")
                holding[address, each.check, about] = replace(each, address=address)
        # A standby may answer in its syncer's place; it does not know the run's state.
        silent = [each for each, status in found.items() if "unreachable" in status or status.get("role") == "standby"]
        for key in list(self.since_s):
            if key not in holding and (key[0] not in silent or key[1] in OF_ANY):
                del self.since_s[key]
        begun = []
        for key, each in holding.items():
            held_s = now_s - self.since_s.setdefault(key, now_s)
            if key not in self.told and held_s >= HOLDS_S[each.check]:
                self.told[key] = each
                begun.append(("begins", each))
        ended = [key for key in self.told if key not in self.since_s]
        return [("ends", self.told.pop(key)) for key in ended] + begun
