from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from diloco.doctor.syncer import Visitor, visit
from diloco.wire.checkup import Checkup, Probed
from diloco.wire.messages import ProbeAnswer, ProbeAsk, Refusal, Refused, Status, Unreachable
from diloco.wire.options import ClientOptions, SecurityOptions, ServerOptions
from tests.loopback.cluster import free_port
from tests.wire.fake_syncer import RUN, FakeSyncer, serve

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from diloco.doctor.syncer import Visit

TOKEN = "a-token-of-site-a-0123456789"


@contextmanager
def served(security: SecurityOptions | None = None, *, ready: bool = True) -> Iterator[tuple[str, FakeSyncer]]:
    syncer = FakeSyncer()
    server = serve(syncer, ServerOptions(run_id=RUN), security or SecurityOptions(), ready=ready)
    try:
        yield server.address, syncer
    finally:
        server.stop(0.2)


def visitor(run_id: str = RUN, **changes: Any) -> Visitor:
    return Visitor("site-a", ProbeAsk(3, run_id), **({"bytes_each": 1 << 20} | changes))


def visited(address: str, run_id: str = RUN, token: str = "", **changes: Any) -> Visit:
    with Checkup(address, SecurityOptions(token=token), ClientOptions(control_timeout_s=5.0)) as checkup:
        return visit(checkup, visitor(run_id, **changes))


def said(found: Visit) -> str:
    return "\n".join(finding.line() for finding in found.findings)


def test_a_syncer_that_is_well_is_told_line_by_line_and_nothing_was_asked_of_its_run() -> None:
    with served() as (address, syncer):
        found = visited(address)
    wanted = ["grpc", "run", "rtt", "identity", "protocol", "settings", "clock", "bandwidth"]
    assert [(each.check, each.level.value) for each in found.findings] == [(check, "ok") for check in wanted]
    assert 0 < found.rtt_s < 10
    assert found.up_bytes_per_s > 1e6
    assert found.down_bytes_per_s > 1e6
    assert syncer.calls == []


def test_another_run_is_named() -> None:
    with served() as (address, _):
        found = said(visited(address, "run-2"))
        unsaid = said(visited(address, ""))
    assert f"fail  run         run run-2 is not served there, but run {RUN} -> give the run or the address" in found
    assert f"it serves run {RUN}; give run=NAME to have this site's settings compared" in unsaid


def test_one_that_takes_no_updates_is_a_warning() -> None:
    with served(ready=False) as (address, _):
        assert f"warn  run         it knows run {RUN} and takes no updates at present -> " in said(visited(address))


@pytest.mark.parametrize(
    ("token", "words"),
    [
        (TOKEN, "ok    identity    it takes us for site/site-a\n"),
        ("another-token-0123456789", "fail  identity    it does not let us in: the token is not known -> give site.to"),
        ("", "it does not let us in: a token is needed"),
    ],
)
def test_what_a_token_is_worth(token: str, words: str, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps({"sites": {"site-a": TOKEN}}))
    tokens.chmod(0o600)
    with served(SecurityOptions(tokens_file=str(tokens))) as (address, _):
        found = visited(address, token=token)
    assert words in said(found)
    assert found.answered


def test_who_is_not_there_did_not_answer() -> None:
    found = visited(f"127.0.0.1:{free_port()}")
    assert (found.answered, len(found.findings)) == (False, 1)
    assert said(found).startswith("fail  grpc        Check: ")


def test_a_syncer_that_goes_away_in_between_is_told_of() -> None:
    class Going(Checkup):
        def come_in(self) -> None:
            raise Unreachable("Watch: gone")

    with served() as (address, _), Going(address, SecurityOptions(), ClientOptions()) as checkup:
        found = visit(checkup, visitor())
    assert "fail  identity    it answered before, and not now: Watch: gone" in said(found)


def test_a_round_trip_that_varies_much_is_a_warning() -> None:
    class Varying(Checkup):
        def round_trips(self, count: int, limit_s: float) -> list[float]:
            return [0.1] * 17 + [0.9] * 3

    with served() as (address, _), Varying(address, SecurityOptions(), ClientOptions()) as checkup:
        found = visit(checkup, visitor(limit_s=0.0))
    assert "warn  rtt         a small call takes 100 ms (median of 20; 95 % within 900 ms): it varies much" in said(
        found
    )
    assert found.rtt_s == 0.1


class Telling(FakeSyncer):
    """Answers probes with what it is given."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.answer = ProbeAnswer(**({"protocol": 3, "protocol_oldest": 2, "run_id": RUN} | changes))

    def probe(self, ask: ProbeAsk) -> ProbeAnswer:
        return self.answer


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (
            {"difference": "outer.lr is 1.0 at the site and 0.7 at the syncer"},
            "fail  settings    outer.lr is 1.0 at the",
        ),
        (
            {"protocol": 2, "protocol_oldest": 1},
            "fail  protocol    it speaks 1 to 2, and this end 3 -> install the same",
        ),
        ({"standby_of": "10.0.0.1:7077"}, "ok    role        it is the standby of 10.0.0.1:7077\n"),
    ],
)
def test_what_a_probe_tells(told: dict[str, Any], words: str) -> None:
    server = serve(Telling(**told), ServerOptions(run_id=RUN))
    try:
        assert words in said(visited(server.address, limit_s=0.0))
    finally:
        server.stop(0.2)


@pytest.mark.parametrize(
    ("ahead_s", "words"),
    [
        (0.4, "ok    clock       its clock and ours agree to 0.4 s"),
        (-90.0, "warn  clock       its clock is 90 s behind ours (to 0.05 s): logs of the two machines do not"),
        (4000.0, "fail  clock       its clock is 4e+03 s ahead of ours (to 0.05 s): certificates are not good in time"),
    ],
)
def test_a_clock_that_is_off_is_told_of(ahead_s: float, words: str) -> None:
    class Off(Checkup):
        def probe(self, ask: ProbeAsk) -> Probed:
            return Probed(ProbeAnswer(3, 2, RUN), 0.1, int(ahead_s * 1e9), None, None)

    with served() as (address, _), Off(address, SecurityOptions(), ClientOptions()) as checkup:
        assert words in said(visit(checkup, visitor(limit_s=0.0)))


def test_somebody_elses_token_is_told_of(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps({"sites": {"site-b": TOKEN}}))
    tokens.chmod(0o600)
    with served(SecurityOptions(tokens_file=str(tokens))) as (address, _):
        found = said(visited(address, token=TOKEN))
    assert "fail  identity    it takes us for site/site-b, and site.id is site-a -> set site.id=site-b, or" in found


def test_a_syncer_of_an_earlier_release_is_a_warning() -> None:
    class Earlier(Checkup):
        def probe(self, ask: ProbeAsk) -> Probed:
            raise Refused(Status.UNIMPLEMENTED, "Method not found!")

    with served() as (address, _), Earlier(address, SecurityOptions(), ClientOptions()) as checkup:
        found = visit(checkup, visitor())
    assert [each.level.value for each in found.findings] == ["ok", "ok", "ok", "ok", "warn"]
    assert "warn  protocol    it is of an earlier release" in said(found)


def test_a_rate_that_may_not_be_measured_is_a_warning() -> None:
    with served() as (address, syncer), Checkup(address, SecurityOptions(), ClientOptions()) as checkup:
        found = [visit(checkup, visitor(bytes_each=1 << 16)) for _ in range(4)][-1]
        assert "warn  bandwidth   not measured: Probe: probes of this caller is used up" in said(found)
        assert " -> ask again in " in said(found)
        syncer.probe_fails = Refusal(Status.PERMISSION_DENIED, "site/a may not push, nor send filler")
        assert "it answered before, and not now: site/a may not push" in said(visit(checkup, visitor()))
