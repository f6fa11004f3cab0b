"""`diloco doctor`'s checks of a syncer that answers: its service, our identity there, round trip, clock, bandwidth."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from diloco.doctor.findings import Finding, fail, ok, warn
from diloco.sync.link import megabits
from diloco.wire.messages import PROBE_BYTES_MAX, ProbeAsk, Refused, Status, Unreachable

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco.wire.checkup import Checkup, Probed
    from diloco.wire.messages import ProbeAnswer

ROUND_TRIPS = 20
ROUND_TRIPS_S = 5.0
CLOCK_WARN_S = 1.0
CLOCK_FAIL_S = 300.0
"""Certificates are valid from five minutes before their creation (``certificates.SKEW``), and no earlier."""
SERVICES = ("grpc.", "diloco.wire.")


@dataclass(frozen=True, slots=True)
class Visitor:
    """The asking end: the site's name, the content of its join (without a run only its protocol), and the bytes of
    filler to send each way within ``limit_s``; no filler where that is 0."""

    site_id: str
    ask: ProbeAsk
    bytes_each: int = PROBE_BYTES_MAX
    limit_s: float = 3.0


@dataclass(frozen=True, slots=True)
class Visit:
    """The findings; ``answered`` is whether a syncer answered at all.  Rates of 0 were not measured."""

    findings: list[Finding]
    answered: bool
    rtt_s: float = 0.0
    up_bytes_per_s: float = 0.0
    down_bytes_per_s: float = 0.0


def visit(checkup: Checkup, visitor: Visitor) -> Visit:
    """Run all checks of the syncer.  A failed check does not stop the next, unless the first gets no answer."""
    try:
        process = checkup.serving("")
    except Unreachable as error:
        return Visit([fail("grpc", error.why, "is this the syncer's own port? its log says what it refused")], False)
    except Refused as error:
        return Visit([fail("grpc", f"no health service: {error.text}", "give the syncer's own host and port")], False)
    findings = [ok("grpc", "it answers")] if process else [warn("grpc", "it is going down", "ask again when it is up")]
    findings += _asked("run", lambda: [_run(checkup, visitor.ask.run_id)])
    taken: list[float] = []

    def measured() -> list[Finding]:
        taken.extend(checkup.round_trips(ROUND_TRIPS, ROUND_TRIPS_S))
        return [_round_trip(taken)]

    rates: list[float] = []

    def carried() -> list[Finding]:
        found, *both = _bandwidth(checkup, visitor)
        rates.extend(both)
        return [found]

    findings += _asked("rtt", measured)
    known = _asked("identity", lambda: _probed(checkup, visitor))
    findings += known
    if visitor.limit_s and any(each.check == "clock" for each in known):  # The syncer supports probes.
        findings += _asked("bandwidth", carried)
    return Visit(findings, True, median(taken) if taken else 0.0, *rates)


def _asked(name: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return check()
    except (Unreachable, Refused) as error:
        return [_broke_off(name, error)]


def _broke_off(check: str, error: Unreachable | Refused) -> Finding:
    why = error.text if isinstance(error, Refused) else error.why
    return fail(check, f"it answered before, and not now: {why}", "look whether it still runs, and ask again")


def _run(checkup: Checkup, run_id: str) -> Finding:
    """Check which run the syncer serves, and whether it is ours."""
    names = [name for name in checkup.names() if name and not name.startswith(SERVICES)]
    told = f"run {', '.join(names)}" if names else "a run whose name it does not tell"
    if not run_id:
        return ok("run", f"it serves {told}; give run=NAME to have this site's settings compared", runs=names)
    serves = checkup.serving(run_id)
    if serves is None:
        return fail("run", f"run {run_id} is not served there, but {told}", "give the run or the address that is meant")
    if serves:
        return ok("run", f"it serves run {run_id}", runs=names)
    remedy = "look at `diloco status` there: a standby before its time, or a syncer that waits for room or a backup"
    return warn("run", f"it knows run {run_id} and takes no updates at present", remedy, runs=names)


def _probed(checkup: Checkup, visitor: Visitor) -> list[Finding]:
    """Check the identity that the syncer gives us, its clock, and whether it has the same run."""
    try:
        checkup.come_in()
    except Refused as error:
        return [fail("identity", f"it does not let us in: {error.text}", _remedy(error))]
    try:
        probed = checkup.probe(visitor.ask if checkup.serving(visitor.ask.run_id) else replace(visitor.ask, run_id=""))
    except Refused as error:
        if error.status is not Status.UNIMPLEMENTED:
            raise
        says = "it is of an earlier release, which tells neither clock nor rates, and compares settings at a join only"
        remedy = "when the run can be upgraded: the syncer first, then its sites"
        return [ok("identity", "it lets us in"), warn("protocol", says, remedy)]
    return [_identity(probed.answer, visitor.site_id), *_meant(probed.answer, visitor.ask), _clock(probed)]


def _identity(answer: ProbeAnswer, site_id: str) -> Finding:
    who = answer.identity
    if who.startswith("site/") and who != f"site/{site_id}":
        remedy = f"set site.id={who.removeprefix('site/')}, or show what was made for {site_id}"
        return fail("identity", f"it takes us for {who}, and site.id is {site_id}", remedy, identity=who)
    told = f"it takes us for {who}" if who else "it tells nobody apart, and lets everybody in"
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
    remedy = "set both clocks by NTP (chrony, systemd-timesyncd)"
    if abs(ahead_s) - doubt_s > CLOCK_FAIL_S:
        return fail("clock", f"{told}: certificates are not good in time", remedy, **figures)
    if abs(ahead_s) - doubt_s > CLOCK_WARN_S:
        return warn("clock", f"{told}: logs of the two machines do not fit together", remedy, **figures)
    return ok("clock", f"its clock and ours agree to {max(abs(ahead_s), doubt_s):.2g} s", **figures)


def _bandwidth(checkup: Checkup, visitor: Visitor) -> tuple[Finding, float, float]:
    """Measure the bytes per second of one connection, up and down."""
    each, limit_ns = visitor.bytes_each, int(visitor.limit_s * 1e9)
    ask = ProbeAsk(visitor.ask.protocol, bytes_up=each, bytes_down=each, limit_ns=limit_ns)
    try:
        probed = checkup.probe(ask)
    except Refused as error:
        says = f"not measured: {error.text}"
        return warn("bandwidth", says, "ask with what a site that may push would show"), 0.0, 0.0
    except Unreachable as error:
        if error.retry_after_s is None:
            raise
        again = f"ask again in {error.retry_after_s:.0f} s"
        return warn("bandwidth", f"not measured: {error.why}", again), 0.0, 0.0
    up, down = (float(way.bytes_per_s) if way is not None else 0.0 for way in (probed.up, probed.down))
    carried = [f"{way.bytes / 1e6:.3g} MB" if way is not None else "nothing" for way in (probed.up, probed.down)]
    figures = {"up_bytes_per_s": up, "down_bytes_per_s": down}
    if not (up and down):
        says = (
            f"of filler {carried[0]} went up and {carried[1]} came down in {visitor.limit_s:g} s: too little to measure"
        )
        return warn("bandwidth", says, "give more time: --seconds 10", **figures), up, down
    says = f"up {megabits(up)}, down {megabits(down)} on one connection ({carried[0]} and {carried[1]} of filler)"
    return ok("bandwidth", says, **figures), up, down


def _remedy(error: Refused) -> str:
    if error.status is Status.PERMISSION_DENIED:
        return "have this identity listed in the syncer's cluster.syncer.permissions"
    if "revoked" in error.text:
        return "have a new token or certificate issued; this one was taken back"
    if "token" in error.text:
        return (
            "give site.token_file=FILE with this site's token, as it stands in the syncer's cluster.syncer.tokens_file"
        )
    if "certificate" in error.text:
        return "have a certificate issued for this site: diloco certs issue DIR --site NAME"
    return "ask whoever runs the syncer"


def _round_trip(taken: list[float]) -> Finding:
    usual, most = median(taken), sorted(taken)[min(len(taken) - 1, int(0.95 * len(taken)))]
    told = f"a small call takes {usual * 1e3:.3g} ms (median of {len(taken)}; 95 % within {most * 1e3:.3g} ms)"
    figures = {"median_ms": round(usual * 1e3, 3), "p95_ms": round(most * 1e3, 3)}
    if most > 3 * usual + 0.05:
        remedy = "a queue on the way fills up, or a machine is busy: look at what else uses this link"
        return warn("rtt", f"{told}: it varies much", remedy, **figures)
    return ok("rtt", told, **figures)
