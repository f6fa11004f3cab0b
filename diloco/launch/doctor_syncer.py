"""What `diloco doctor` finds of the syncer that answers: whether it serves, whom it takes us for, and how far it is."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from diloco.launch.findings import Finding, fail, ok, warn
from diloco.wire.messages import Refused, Status, Unreachable

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco.wire.checkup import Checkup

ROUND_TRIPS = 20
ROUND_TRIPS_S = 5.0
SERVICES = ("grpc.", "diloco.wire.")


@dataclass(frozen=True, slots=True)
class Visit:
    """What was found; ``answered`` is whether it was a syncer at all."""

    findings: list[Finding]
    answered: bool
    rtt_s: float = 0.0


def visit(checkup: Checkup, run_id: str | None) -> Visit:
    """Ask it everything.  What one question brings out never keeps the next from being asked, but for silence."""
    try:
        process = checkup.serving("")
    except Unreachable as error:
        return Visit([fail("grpc", error.why, "is this the syncer's own port? its log says what it refused")], False)
    except Refused as error:
        return Visit([fail("grpc", f"no health service: {error.text}", "give the syncer's own host and port")], False)
    findings = [ok("grpc", "it answers")] if process else [warn("grpc", "it is going down", "ask again when it is up")]
    findings += _asked("run", lambda: _run(checkup, run_id))
    findings += _asked("identity", lambda: _known(checkup))
    taken: list[float] = []

    def measured() -> Finding:
        taken.extend(checkup.round_trips(ROUND_TRIPS, ROUND_TRIPS_S))
        return _round_trip(taken)

    findings += _asked("rtt", measured)
    return Visit(findings, True, median(taken) if taken else 0.0)


def _asked(name: str, check: Callable[[], Finding]) -> list[Finding]:
    try:
        return [check()]
    except (Unreachable, Refused) as error:
        return [_broke_off(name, error)]


def _broke_off(check: str, error: Unreachable | Refused) -> Finding:
    why = error.text if isinstance(error, Refused) else error.why
    return fail(check, f"it answered before, and not now: {why}", "look whether it still runs, and ask again")


def _run(checkup: Checkup, run_id: str | None) -> Finding:
    """Which run is served there, and whether it is ours."""
    names = [name for name in checkup.names() if name and not name.startswith(SERVICES)]
    told = f"run {', '.join(names)}" if names else "a run whose name it does not tell"
    if run_id is None:
        return ok("run", f"it serves {told}; give run=NAME to have this site's settings compared", runs=names)
    serves = checkup.serving(run_id)
    if serves is None:
        return fail("run", f"run {run_id} is not served there, but {told}", "give the run or the address that is meant")
    if serves:
        return ok("run", f"it serves run {run_id}", runs=names)
    remedy = "look at `diloco status` there: a standby before its time, or a syncer that waits for room or a backup"
    return warn("run", f"it knows run {run_id} and takes no updates at present", remedy, runs=names)


def _known(checkup: Checkup) -> Finding:
    """Whether what this end shows is taken."""
    try:
        checkup.come_in()
    except Refused as error:
        return fail("identity", f"it does not let us in: {error.text}", _remedy(error))
    return ok("identity", "it lets us in")


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
