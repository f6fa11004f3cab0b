"""``diloco canary`` and ``diloco doctor`` say what they found, in their exit codes as well."""

from __future__ import annotations

import json
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.cli import doctor
from diloco.cli.main import main
from diloco.config import compose as configs
from diloco.config.errors import ExitCode, VerbError
from diloco.config.run_dir import RunDir
from diloco.doctor import syncer as link
from diloco.doctor import warn
from diloco.runs import canary
from tests.cli.conftest import Cli
from tests.loopback.cluster import closed_port, eventually, free_port
from tests.loopback.cluster import serving as serving_toy
from tests.runs.processes import TINY, place_in
from tests.runs.test_canary import digest_of, trained_site
from tests.syncer.building import Events, join, push, report, serving, update
from tests.syncer.test_standby import BOUND_S, a_toy, following
from tests.wire.fake_syncer import RUN, FakeSyncer, served


def test_a_digest_from_elsewhere_or_of_a_second_time_may_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    site = trained_site(tmp_path)
    assert cli.json("canary", str(site), "--steps", "2", "--expect", digest_of(site))["same"] is True
    digests = iter([(each * 64, 3) for each in "aaaab"])
    monkeypatch.setattr(canary, "digest_after", lambda *asked: next(digests))
    first, *rest = cli.out("canary", str(site), "--steps", "2").splitlines()
    assert "2 steps from step 3 on" in first
    assert [line.split() for line in rest] == [["digest", "a" * 64], ["again", "a" * 64], ["same"]]
    for expected in (["--expect", "0" * 64], []):
        assert "DIFFERENT" in cli.out("canary", str(site), *expected, code=1)


@pytest.fixture
def address() -> Iterator[str]:
    with served() as (there, _):
        yield there


@pytest.fixture
def mine(tmp_path: Path) -> list[str]:
    return [*TINY, f"run.dir={tmp_path}"]


def test_the_machine_alone_and_the_way_to_a_syncer(mine: list[str], address: str, cli: Cli) -> None:
    lines = cli.out("doctor", *mine).splitlines()
    assert [line.split()[1] for line in lines[:6]] == ["software", "devices", "format", "kernels", "limits", "store"]
    assert all(word in line for word, line in zip(["torch", "core", "bf16", "", "open files"], lines, strict=False))
    assert lines[-1].endswith(" 0 fail")
    assert not any(" tcp " in line for line in lines)

    told: dict[str, Any] = cli.json("doctor", f"server={address}", f"run={RUN}", *mine)
    levels = {each["check"]: each["level"] for each in told["checks"]}
    assert {"dns", "tcp", "grpc", "run", "identity", "rtt"} <= set(levels)
    assert (told["exit"], told["counts"]["fail"]) == (0, 0)
    [rtt] = [each for each in told["checks"] if each["check"] == "rtt"]
    assert rtt["address"] == address
    assert 0 < rtt["figures"]["median_ms"] < 1000

    out = cli.out("doctor", f"server={address}", *mine, "site.token_file=/nowhere/token", "--seconds", "0", code=1)
    assert "fail  files       site.token_file is '/nowhere/token': No such file" in out


def test_nobody_anywhere_is_3(mine: list[str], address: str, cli: Cli) -> None:
    dead = f"127.0.0.1:{closed_port()}"
    assert "Connection refused" in cli.out("doctor", f"server={dead}", *mine, code=3)
    # One of two is enough to have reached somebody; that the other is dead is a failure all the same.
    out = cli.out("doctor", f"server={dead},{address}", *mine, code=1)
    assert f"--    {dead}\n" in out
    assert f"--    {address}\n" in out


@pytest.mark.slow
def test_a_real_syncer_is_examined_and_what_differs_is_named_without_a_join(tmp_path: Path, cli: Cli) -> None:
    with place_in(tmp_path) as place:
        _, there = place.syncer("first")
        asked = ["doctor", f"site.syncer={there}", "site.id=fra", "run=first", f"run.dir={tmp_path}/runs"]
        assert "ok    settings    layout and shared settings are those of run first" in cli.out(*asked)
        for setting, words in (
            ("outer.lr=0.1", "fail  settings    outer.lr is 0.1 at the site and 0.7 at the syncer -> "),
            ("model.dim=64", "model.dim is 64 at the site and"),
        ):
            assert words in cli.out(*asked, setting, "--seconds", "0", code=1)
        assert cli.json("status", there)["sites"] == {}


def test_each_of_several_syncers_is_examined_as_the_one_that_it_should_be(mine: list[str], cli: Cli) -> None:
    asked: list[str] = []

    class Telling(FakeSyncer):
        def probe(self, ask: Any) -> Any:
            asked.extend([ask.shared_config["cluster.syncer.index"]] if ask.shared_config else [])
            return super().probe(ask)

    two = [*mine, "run.name=small", "outer.num_fragments=2", "outer.num_syncers=2"]
    with served(fake=Telling()) as (one, _), served(fake=Telling()) as (other, _):
        where = f"{one}/{other}"
        main(["doctor", f"server={where}", *two])
    assert sorted(set(asked)) == ["0", "1"]
    assert asked == sorted(asked)
    said = cli.out("doctor", where, *mine, code=3)  # No setting tells how many there are.
    assert said.count("Connection refused") == 2


# --- A run that is watched -------------------------------------------------------------------------------------------


def watched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], target: str, *steps: Callable[[], object]
) -> list[str]:
    """The names of what begins and ends.  ``steps`` come between the looks, 700 s apart by the watch's own clock."""
    left, clock = iter(steps), iter(range(0, 1 << 30, 700))

    def sleep(seconds: float) -> None:
        step = next(left, None)
        if step is None:
            raise KeyboardInterrupt
        step()

    own = SimpleNamespace(sleep=sleep, monotonic=lambda: next(clock), time=time.time, strftime=time.strftime)
    monkeypatch.setattr(doctor, "time", own)
    assert main(["doctor", "--watch", target, "--json"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [f"{each['state']} {each['check']} {each['figures'].get('site', '')}".strip() for each in told]


def test_a_watch_of_a_real_syncer_reports_what_begins_and_what_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(link, "SILENT_S", 0.5)
    events, address = Events(), f"127.0.0.1:{free_port()}"
    with serving(tmp_path, events, address=address) as syncer:

        def heard(**changes: Any) -> None:
            syncer.api.report(report("b", **changes))

        def both(**changes: Any) -> None:
            heard(**changes)
            syncer.api.report(report("a"))

        def behind() -> None:
            for sequence in range(1, 6):
                push(syncer, *update("a", sequence, base_version=sequence - 1))
                events.wait_for("published", sequence)
            both()

        def fills_up() -> None:
            syncer.memory_bytes_max = 1 << 62
            both()

        for name in "ab":
            join(syncer, name)
        both()
        told = watched(
            monkeypatch,
            capsys,
            address,
            both,
            lambda: both(loss=2.1),
            lambda: both(loss=2.1),  # LossDiverges begins.
            lambda: (time.sleep(0.6), heard()),  # It ends.
            lambda: (time.sleep(0.6), heard()),  # SiteSilent begins.
            both,  # It ends.
            behind,
            both,  # SiteStale begins for both.
            fills_up,
            both,  # DiskFilling begins.
            lambda: syncer.api.evict("b"),  # SiteStale ends.
            lambda: syncer.stop(0.1),
            lambda: None,  # SyncerAway begins.
        )
    assert told == [
        "begins LossDiverges b",
        "ends LossDiverges b",
        "begins SiteSilent a",
        "ends SiteSilent a",
        "begins SiteStale a",
        "begins SiteStale b",
        "begins DiskFilling",
        "ends SiteStale b",
        "begins SyncerAway",
    ]


def test_a_standby_that_has_gone_is_reported_and_the_watch_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    toy = a_toy(tmp_path, mode="async")
    with serving_toy(toy) as (syncer, address, _):
        with following(toy, address) as (standby, _):
            eventually(lambda: standby.state() is not None, BOUND_S, "it follows")
            first = watched(monkeypatch, capsys, address, lambda: None)
        eventually(lambda: not syncer.replicator.status()["following"], BOUND_S, "it has gone")
        second = watched(monkeypatch, capsys, address, lambda: None)
        syncer.api.drain()
        eventually(lambda: syncer.status()["phase"] == "ended", BOUND_S, "the last version")
        third = watched(monkeypatch, capsys, address, syncer.stop, lambda: pytest.fail("it goes on"))
    assert first == []
    assert second == ["begins StandbyAway"]
    assert third == []


def test_one_syncer_that_refuses_the_watch_hides_no_other_and_a_run_folder_tells_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both = {"a:1": {"phase": "running", "fragments": []}, "b:2": {"phase": "running", "fragments": []}}

    def asked(addresses: list[str], settings: object) -> dict[str, dict[str, Any]]:
        found = {address: both[address] for address in addresses}
        if any("refused" in each for each in found.values()):
            raise VerbError(ExitCode.FAILED, "your token is revoked")
        return found

    monkeypatch.setattr(doctor, "asked_all", asked)
    told = watched(monkeypatch, capsys, "a:1/b:2", lambda: both.update({"b:2": {"refused": True}}), lambda: None)
    assert told == ["begins SyncerAway"], "b's alone"

    run = RunDir(tmp_path)
    configs.write(configs.compose([]), run.config)
    run.address.write_text("a:1")
    both["a:1"] = {"phase": "running", "fragments": []}

    def end() -> None:
        both["a:1"] = {"unreachable": "it has ended"}
        run.final_model.parent.mkdir(parents=True)
        run.final_model.touch()

    assert watched(monkeypatch, capsys, str(tmp_path), end, lambda: pytest.fail("it goes on")) == []


def test_alerts_go_to_a_webhook_and_a_command_and_one_that_fails_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken: list[dict[str, Any]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    monkeypatch.setattr(doctor, "NOTIFY_S", 1.0)
    file, failing = tmp_path / "taken", set[str]()
    given = Namespace(
        json=False, webhook=f"http://127.0.0.1:{closed_port()}/secret", command=f"tee -a {file}; sleep 60"
    )

    def reported(state: str) -> str:
        began = time.monotonic()
        doctor._report(given, "otter", [(state, warn("SiteSilent", "fra", "look", site="fra"))], failing)
        assert time.monotonic() - began < 20.0
        return capsys.readouterr().err

    first = reported("begins")
    assert "the webhook takes no alerts, the watch goes on: [Errno 111] Connection refused" in first
    assert "the command takes no alerts, the watch goes on: it did not end within 1 s" in first
    assert "secret" not in first
    assert reported("ends") == ""
    given.command = f'printf "%s\n" "$DILOCO_ALERT" >> {file}'
    with ThreadingHTTPServer(("127.0.0.1", 0), Hook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        given.webhook = f"http://127.0.0.1:{server.server_address[1]}/secret"
        assert reported("begins").splitlines() == ["the webhook takes alerts again", "the command takes alerts again"]
        server.shutdown()
    [posted] = taken
    assert posted["watching"] == "otter"
    assert "begins  warn  SiteSilent  fra -> look" in posted["text"]
    [alert] = posted["alerts"]
    assert (alert["state"], alert["check"], alert["figures"]) == ("begins", "SiteSilent", {"site": "fra"})
    *piped, line = file.read_text().splitlines()
    assert "".join(piped).count('"state": "begins"') == 1, "a command that does not end has read it all the same"
    assert line == posted["text"]
