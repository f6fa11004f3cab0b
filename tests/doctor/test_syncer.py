"""What the doctor says on the way to an address, and of the syncer that answers there."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from cryptography import x509

from diloco.doctor import Finding, Level, syncer
from diloco.doctor.machine import link_of
from diloco.doctor.syncer import HOLDS_S, Alerts, Way, certificates, own_files, visit, way_to
from diloco.wire.checkup import Checkup, Greeting, Heard, Probed
from diloco.wire.messages import ProbeAnswer, ProbeAsk, Refusal, Refused, Status, Unreachable
from diloco.wire.options import ClientOptions, SecurityOptions
from tests.loopback.cluster import closed_port, eventually
from tests.runs.processes import ROOT
from tests.wire.certificates import LOOPBACK, Authority
from tests.wire.fake_syncer import RUN, served

PLAIN = SecurityOptions()
TOKEN = "a-token-of-site-a-0123456789"


def visit_as(checkup: Checkup, run_id: str = RUN, limit_s: float = 3.0, bytes_each: int = 1 << 20) -> list[Finding]:
    return visit(checkup, "site-a", ProbeAsk(3, run_id), limit_s, bytes_each)


def visited(address: str, run_id: str = RUN, token: str = "") -> list[Finding]:
    with Checkup(address, SecurityOptions(token=token), ClientOptions(control_timeout_s=5.0)) as checkup:
        return visit_as(checkup, run_id)


def said(found: list[Finding] | Way) -> str:
    return "\n".join(finding.line() for finding in (found.findings if isinstance(found, Way) else found))


def test_a_syncer_that_is_well_is_told_line_by_line_and_nothing_was_asked_of_its_run() -> None:
    with served() as (address, fake):
        way, found = way_to(address, PLAIN), visited(address)
    assert (way.reached, way.open, [each.check for each in way.findings]) == (True, True, ["dns", "tcp"])
    assert "connects in" in said(way)
    wanted = ["grpc", "run", "rtt", "identity", "protocol", "settings", "clock", "bandwidth"]
    assert [each.check for each in found] == wanted
    unwell = [each.line() for each in found if each.level is not Level.OK]
    assert all("it varies much" in line for line in unwell), "only a busy machine's round trips may"
    link = link_of(found)
    assert link is not None
    assert 0 < link.rtt_s < 10
    assert link.up_bytes_per_s > 1e6
    assert link.down_bytes_per_s > 1e6
    assert fake.calls == []


def test_another_run_or_one_that_takes_no_updates_is_told_of() -> None:
    with served() as (address, _):
        found = said(visited(address, "run-2"))
        unsaid = said(visited(address, ""))
    assert f"fail  run         run run-2 is not served there, but run {RUN} -> give the right run or address" in found
    assert f"it serves run {RUN}; give run=NAME to have this site's settings compared" in unsaid
    with served(ready=False) as (address, _):
        assert f"warn  run         it knows run {RUN} and takes no updates at present -> " in said(visited(address))
    found = visited(f"127.0.0.1:{closed_port()}")
    assert (link_of(found), len(found)) == (None, 1)
    assert said(found).startswith("fail  grpc        Check: ")


@pytest.mark.parametrize(
    ("owner", "token", "words"),
    [
        ("site-a", TOKEN, "ok    identity    it takes us for site/site-a\n"),
        ("site-a", "another-token-012345", "fail  identity    it refuses us: the token is not known -> give"),
        ("site-a", "", "it refuses us: a token is needed"),
        ("site-b", TOKEN, "takes us for site/site-b, but site.id is site-a -> set site.id=site-b, or"),
    ],
)
def test_what_a_token_is_worth(owner: str, token: str, words: str, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps({"sites": {owner: TOKEN}}))
    tokens.chmod(0o600)
    with served(SecurityOptions(tokens_file=str(tokens))) as (address, _):
        found = visited(address, token=token)
    assert words in said(found)
    assert link_of(found) is not None


def probed(ahead_s: float = 0.0, **told: Any) -> Callable[..., Probed]:
    answer = ProbeAnswer(**({"protocol": 3, "protocol_oldest": 2, "run_id": RUN} | told))
    return lambda *_: Probed(answer, 0.1, int(ahead_s * 1e9), None, None)


@pytest.mark.parametrize(
    ("method", "found", "words"),
    [
        (
            "come_in",
            Mock(side_effect=Unreachable("Watch: gone")),
            "fail  identity    it answered before, but not now: Watch: ",
        ),
        ("round_trips", lambda *_: [0.1] * 17 + [0.9] * 3, "warn  rtt         a small call takes 100 ms (median of 20"),
        ("probe", Mock(side_effect=Refused(Status.UNIMPLEMENTED, "")), "warn  protocol    an earlier release"),
        ("probe", probed(difference="outer.lr is 1.0 at the site"), "fail  settings    outer.lr is 1.0 at the site"),
        ("probe", probed(protocol=2, protocol_oldest=1), "fail  protocol    it speaks 1 to 2, and this end 3 -> insta"),
        ("probe", probed(standby_of="10.0.0.1:7077"), "ok    role        it is the standby of 10.0.0.1:7077\n"),
        ("probe", probed(0.4), "ok    clock       its clock and ours agree to 0.4 s"),
        ("probe", probed(-90.0), "warn  clock       its clock is 90 s behind ours (to 0.05 s): the times in the two"),
        ("probe", probed(4000.0), "fail  clock       its clock is 4e+03 s ahead of ours (to 0.05 s): certificates"),
    ],
)
def test_what_a_syncer_answers_is_told(method: str, found: Callable[..., Any], words: str) -> None:
    answering = type("Answering", (Checkup,), {method: found})
    with served() as (address, _), answering(address, SecurityOptions(), ClientOptions()) as checkup:
        assert words in said(visit_as(checkup, limit_s=0.0))


def test_a_rate_that_may_not_be_measured_is_a_warning() -> None:
    with served() as (address, fake), Checkup(address, SecurityOptions(), ClientOptions()) as checkup:
        found = [visit_as(checkup, bytes_each=1 << 16) for _ in range(4)][-1]
        assert "warn  bandwidth   not measured: Probe: caller is over its limit of probes" in said(found)
        assert " -> ask again in " in said(found)
        fake.probe_fails = Refusal(Status.PERMISSION_DENIED, "site/a may not push, nor send filler")
        assert "it answered before, but not now: site/a may not push" in said(visit_as(checkup))


# --- The way to an address, against real ends on the loopback ---------------------------------------------------------


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def mutual(authority: Authority) -> SecurityOptions:
    cert, key = authority.issue("syncer", *LOOPBACK)
    return SecurityOptions(tls_cert=cert, tls_key=key, tls_ca=authority.ca, require_client_cert=True)


def test_a_name_that_is_none_a_closed_port_and_a_silent_one_are_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    assert way_to("unix:/run/diloco.sock", PLAIN).open, "a socket of this machine needs no way"
    monkeypatch.setattr(syncer, "GREET_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for address, words in (
            ("nohost.invalid:7077", "fail  dns         nohost.invalid does not resolve: .* -> give the right name"),
            (f"localhost:{closed_port()}", "Connection refused -> start the syncer, or give the port"),
            (f"127.0.0.1:{silent.getsockname()[1]}", "nothing answers, where a syncer speaks HTTP/2 -> it accepts"),
        ):
            way = way_to(address, PLAIN)
            assert (way.reached, way.open) == (False, False)
            assert re.search(words, said(way)), said(way)


@pytest.mark.parametrize(
    ("ids", "ends_in_s", "level", "words"),
    [
        (("site/a",), 86400 * 90, Level.OK, "certificate of spiffe://example.org/site/a, good until"),
        (("site/a",), 3600, Level.WARN, "diloco certs issue DIR --site a"),
        (("site/a",), -60, Level.FAIL, "ended on 2"),
        ((), 86400 * 90, Level.FAIL, "it must have exactly one SPIFFE id"),
    ],
)
def test_what_this_end_shows_is_judged_here_and_a_token_is_never_told(
    ids: tuple[str, ...], ends_in_s: float, level: Level, words: str, authority: Authority
) -> None:
    uris = [x509.UniformResourceIdentifier(f"spiffe://example.org/{each}") for each in ids]
    cert, key = authority.issue("client", *uris, ends_in_s=ends_in_s)
    [found] = own_files(SecurityOptions(tls_cert=cert, tls_key=key, tls_ca=authority.ca), "a")
    assert found.level is level
    assert words in found.line()
    [found] = own_files(SecurityOptions(token_file="/secrets/token"), "a")
    assert found.line() == "ok    files       a token, from /secrets/token"
    assert "nothing to show" in own_files(PLAIN, "a")[0].says


def test_a_web_server_is_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            for _ in range(2):  # The doctor, and the one that asks whether TLS is spoken.
                line, _ = listening.accept()
                with line:
                    line.recv(64)
                    line.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        way = way_to(f"127.0.0.1:{listening.getsockname()[1]}", PLAIN)
    assert (way.reached, way.open) == (True, False)
    assert "HTTP/1 answers, where a syncer speaks HTTP/2 -> this is a web server or proxy" in said(way)


def test_mutual_tls_that_stands_is_told_with_its_certificate(authority: Authority) -> None:
    cert, key = authority.site("site/a")
    with served(mutual(authority)) as (address, _):
        way = way_to(address, SecurityOptions(tls_ca=authority.ca, tls_cert=cert, tls_key=key))
    assert way.open
    assert "TLSv1.3, both ends known, certificate of localhost, 127.0.0.1 by CN=authority, good until" in said(way)
    tls = way.findings[-1]
    assert (tls.check, tls.level) == ("tls", Level.WARN)  # It ends within the hour.
    assert "diloco certs issue DIR --syncer --host 127.0.0.1" in tls.remedy


def test_tls_that_does_not_stand_is_told_with_what_to_change(authority: Authority, tmp_path: Path) -> None:
    def ends(pair: tuple[str, str], ca: str = "") -> SecurityOptions:
        return SecurityOptions(tls_cert=pair[0], tls_key=pair[1], tls_ca=ca)

    both, other, own = mutual(authority), Authority(tmp_path, "other"), authority.site("site/a")
    bare, foreign = SecurityOptions(tls_ca=authority.ca), ends(other.site("site/a"), authority.ca)
    over = ends(authority.issue("over", *LOOPBACK, ends_in_s=-60))
    named = ends(authority.issue("named", x509.DNSName("syncer.example")))
    good, elsewhere = ends(own, authority.ca), "the syncer's certificate is not for 127.0.0.1: it names syncer.example"
    for there, here, words in (
        (both, PLAIN, "it speaks TLS, but this end is set to do without -> give site.tls_ca=FILE"),
        (both, bare, "give site.tls_cert and site.tls_key"),
        (both, foreign, "-> have site.tls_cert issued by the authority that the syncer trusts"),
        (both, ends(own, other.ca), "did not sign the syncer's certificate, CN=authority did: "),
        (over, good, "the syncer's certificate ended on 2"),
        (named, good, f"{elsewhere} -> give one of these"),
        (PLAIN, good, "it does not speak TLS -> leave site.tls_ca out"),
    ):
        with served(there) as (address, _):
            way = way_to(address, here)
        assert (way.reached, way.open) == (True, False), said(way)
        assert way.findings[-1].level is Level.FAIL
        assert words in said(way)


def test_one_dead_address_of_several_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def greet(address: str, *_: object) -> Greeting:
        if address == "10.0.0.2":
            raise TimeoutError
        return Greeting(0.08, heard=Heard.HTTP2)

    monkeypatch.setattr(syncer, "resolve", lambda host, port: ("10.0.0.1", "10.0.0.2"))
    monkeypatch.setattr(syncer, "greet", greet)
    way = way_to("syncer.example:7077", PLAIN)
    assert way.open
    assert said(way).splitlines() == [
        "ok    dns         syncer.example: 10.0.0.1, 10.0.0.2",
        "warn  tcp         10.0.0.1 port 7077 connects in 80 ms; 10.0.0.2 port 7077: no answer (dropped on the way?)"
        " -> take the dead address out of DNS: each connection may try it first",
    ]


# --- A run that is watched -------------------------------------------------------------------------------------------

WELL: dict[str, Any] = {"status": "live", "heard_seconds_ago": 1.0, "loss": 2.0, "staleness": 1}
MIRRORED: dict[str, Any] = {
    **{"mode": "async", "standby": "osl", "following": True, "detached": False, "slow": False},
    **{"away_seconds": None, "behind_bytes": 0},
}
STATUS: dict[str, Any] = {
    **{"staleness_max": 8, "disk_free_bytes": 9e9, "memory_bytes_max": 3e9, "replication": MIRRORED},
    "sites": {"fra": WELL, "iad": WELL},
}
STANDBY: dict[str, Any] = {
    **{"role": "standby", "name": "osl", "following": True, "heard_seconds_ago": 40.0, "primary": "a:1"},
    **{"versions": [4], "epoch": 1, "turns_behind": 0, "failed": None},
}


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("SiteSilent", {"sites": {"fra": {**WELL, "heard_seconds_ago": 41.0}}}, "has not heard fra for 41 s"),
        ("SiteSilent", {"sites": {"fra": {"status": "silent"}}}, "has not heard fra since the syncer's start"),
        ("SiteStale", {"sites": {"fra": {**WELL, "staleness": 5}}}, "fra is 5 versions behind; updates more than 8"),
        ("LossDiverges", {"sites": {"fra": {**WELL, "loss": 2.6}}}, "the loss of fra was 2.000, and is 2.600"),
        ("LossDiverges", {"sites": {"fra": {**WELL, "loss": None}}}, "the loss of fra was 2.000, and is no number"),
        ("DiskFilling", {"disk_free_bytes": 2e9}, "2.00 GB free, less than the 3.00 GB"),
        ("StandbyAway", {"replication": {**MIRRORED, "following": False, "away_seconds": 7.0}}, "no standby for 7 s"),
        ("StandbySlow", {"replication": {**MIRRORED, "behind_bytes": 70e6}}, "osl does not keep up: it lacks 70.0 MB"),
        ("StandbySlow", {"replication": {**MIRRORED, "slow": True}}, "osl does not keep up"),
        ("NoStandby", {"replication": {**MIRRORED, "detached": True}}, "the run is on one disk"),
        ("StandbyDoesNotFollow", {**STANDBY, "following": False}, "DOES NOT FOLLOW (heard 40 s ago) a:1"),
        ("SyncerAway", {"unreachable": "a:1 does not answer"}, "a:1 does not answer"),
    ],
)
def test_a_condition_begins_when_it_has_held_for_its_time_and_ends_once(
    name: str, wrong: dict[str, Any], words: str
) -> None:
    well, alerts = STANDBY if "role" in wrong else STATUS, Alerts()
    bad = {"a:1": wrong if {"role", "unreachable"} & wrong.keys() else {**STATUS, **wrong}}
    at_s = HOLDS_S[name]
    assert alerts.changes({"a:1": well}, [], 0.0) == alerts.changes(bad, [], 1.0) == []
    assert alerts.changes(bad, [], at_s) == []
    [(state, found)] = alerts.changes(bad, [], at_s + 1.0)
    assert (state, found.check, found.address) == ("begins", name, "a:1")
    assert words in found.line()
    assert alerts.changes(bad, [], at_s + 2.0) == []
    assert alerts.changes({"a:1": well}, [], at_s + 3.0) == [("ends", found)]
    assert alerts.changes({"a:1": well}, [], at_s + 4.0) == []


def test_without_an_answer_the_conditions_stay_and_a_site_that_has_left_is_not_silent() -> None:
    alerts, full = Alerts(), {"a:1": {**STATUS, "disk_free_bytes": 1.0}, "b:2": STATUS}
    gone = {"a:1": {"unreachable": "it is away"}, "b:2": STATUS}
    alerts.changes(full, [], 0.0)
    assert [(state, each.address) for state, each in alerts.changes(full, [], 300.0)] == [("begins", "a:1")]
    assert alerts.changes(gone, [], 310.0) == []
    assert alerts.changes({"a:1": STANDBY, "b:2": STATUS}, [], 315.0) == [], "the standby answers in its place"
    assert alerts.changes(full, [], 320.0) == [], "it was away for less than its time"
    left = {"a:1": {**STATUS, "sites": {"fra": {**WELL, "status": "left", "heard_seconds_ago": 9e9}}}, "b:2": STATUS}
    assert [(state, each.check) for state, each in alerts.changes(left, [], 330.0)] == [("ends", "DiskFilling")]
    assert alerts.changes(left, [], 930.0) == []


def test_a_certificate_that_ends_within_days_is_a_condition_until_it_is_renewed(authority: Authority) -> None:
    cert, key = authority.issue("syncer", *LOOPBACK, ends_in_s=86400 * 3 + 60)
    here, alerts = SecurityOptions(tls_ca=authority.ca), Alerts()
    with served(SecurityOptions(tls_cert=cert, tls_key=key)) as (address, _):
        [(state, found)] = alerts.changes({address: STATUS}, certificates([address], here), 0.0)
        assert (state, found.check) == ("begins", "CertificateExpires")
        assert found.says.startswith(f"{address}: TLSv1.3")
        assert "(3 days)" in found.says
        assert "the syncer reloads its files itself" in found.remedy
        assert alerts.changes({address: STATUS}, certificates([address], here), 1.0) == []
        authority.issue("syncer", *LOOPBACK, ends_in_s=86400 * 90)
        eventually(lambda: not certificates([address], here), 20.0, "the syncer has read its files again")
        assert alerts.changes({address: STATUS}, certificates([address], here), 2.0) == [("ends", found)]
        other = SecurityOptions(tls_ca=cert)
        assert certificates([address], other) == [], "who signed it is not the watch's question, but SyncerAway's"
    assert certificates([address], PLAIN) == []


def test_prometheus_has_the_same_rules() -> None:
    rules = yaml.safe_load((ROOT / "configs" / "monitoring" / "alerts.yaml").read_text())["groups"][0]["rules"]
    by_name = {rule["alert"]: rule for rule in rules}
    seconds = {"s": 1, "m": 60}
    for name, holds_s in HOLDS_S.items():
        if name != "CertificateExpires":
            lasting = by_name[name]["for"]
            assert int(lasting[:-1]) * seconds[lasting[-1]] == holds_s, name
    for name, words in {
        "SiteSilent": f"> {syncer.SILENT_S:g}",
        "SiteStale": f"{syncer.STALE_SHARE:g} * diloco_staleness_max_versions\nunless",
        "LossDiverges": f"> {syncer.LOSS_RISE:g}",
        "StandbySlow": f"behind_bytes > {syncer.BEHIND_BYTES / 1e6:g}e6",
        "DiskFilling": "diloco_syncer_disk_free_bytes < diloco_syncer_memory_bytes_max",
    }.items():
        assert words.replace("\n", " ") in " ".join(by_name[name]["expr"].split()), name
