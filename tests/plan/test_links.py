"""Links for ``diloco plan`` that somebody has measured."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from diloco.cli.main import main
from diloco.plan import studies
from diloco.wire.options import ServerOptions
from tests.runs.processes import TINY
from tests.wire.fake_syncer import RUN, FakeSyncer, serve

if TYPE_CHECKING:
    from pathlib import Path

SMALL = ["parameters=1e9", "step_s=2", "fragments=4"]


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studies, "SITE_ROUNDS", 100)


def check(name: str, address: str = "a:1", **figures: float) -> dict[str, Any]:
    return {"check": name, "address": address, "level": "ok", "says": "", "remedy": "", "figures": figures}


def rates(up: float, down: float, address: str = "a:1") -> dict[str, Any]:
    return check("bandwidth", address, up_bytes_per_s=up, down_bytes_per_s=down)


def rtt(median_ms: float, address: str = "a:1") -> dict[str, Any]:
    return check("rtt", address, median_ms=median_ms, p95_ms=2 * median_ms)


def written(place: Path, name: str, *checks: dict[str, Any]) -> str:
    file = place / f"{name}.json"
    file.write_text(json.dumps({"checks": [check("software", ""), *checks], "counts": {}, "exit": 0}))
    return str(file)


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


@pytest.mark.slow
def test_a_link_is_what_doctor_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = serve(FakeSyncer(), ServerOptions(run_id=RUN))
    try:
        assert main(["doctor", f"server={server.address}", "--json", *TINY, f"run.dir={tmp_path}"]) == 0
    finally:
        server.stop(0.2)
    said = capsys.readouterr().out
    (file := tmp_path / "fra.json").write_text(said)
    checks = {each["check"]: each["figures"] for each in json.loads(said)["checks"]}
    found = told(capsys, *SMALL, "sites=3", "--link", str(file))
    up, down = (checks["bandwidth"][f"{way}_bytes_per_s"] * 8e-9 for way in ("up", "down"))
    [link] = found["measured"]
    assert link["file"] == str(file)
    assert (link["up_gbps"], link["down_gbps"]) == pytest.approx((up, down), rel=1e-3)
    assert link["rtt_ms"] == pytest.approx(checks["rtt"]["median_ms"], rel=1e-3)
    asked = found["asked"]
    assert (asked["sites"], asked["up_gbps"], asked["down_gbps"]) == (3, [link["up_gbps"]], [link["down_gbps"]])
    assert asked["rtt_ms"] == link["rtt_ms"]


def test_a_link_of_each_site(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    near = written(tmp_path, "near", rates(1.25e9, 2.5e8), rtt(12.0))
    far = written(tmp_path, "far", rates(0.0, 1e8, "b:1"), rates(1.25e7, 2.5e8), rtt(3.0, "b:1"), rtt(140.0))
    links = ["--link", near, "--link", far]
    found = told(capsys, *SMALL, *links)
    asked = found["asked"]
    assert (asked["sites"], asked["up_gbps"], asked["down_gbps"]) == (2, [10, 0.1], [2, 2])
    assert asked["rtt_ms"] == 140, "of the farthest, and of the syncer of which the rate is"
    stated = told(capsys, *SMALL, "sites=2", "up_gbps=10,.1", "down_gbps=2,2", "rtt_ms=140")
    assert stated.pop("measured") == []
    measured = found.pop("measured")
    assert [link["file"] for link in measured] == [near, far]
    assert {**stated, "took_s": 0} == {**found, "took_s": 0}
    assert main(["plan", *SMALL, *links]) == 0
    assert f"measured   0.1 Gbit/s up, 2 down, 140 ms ({far})\n" in capsys.readouterr().out


def test_a_preset_is_planned_on_the_links_that_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [written(tmp_path, f"site-{index}", rates(1e9, 1e9), rtt(10.0 + index)) for index in range(3)]
    links = [word for file in files for word in ("--link", file)]
    asked = told(capsys, "+experiment=10b_8dc", *links)["asked"]
    assert (asked["sites"], asked["up_gbps"], asked["rtt_ms"]) == (3, [8, 8, 8], 12)


@pytest.mark.parametrize(
    ("arguments", "checks", "words"),
    [
        (["up_gbps=1"], [rates(1e9, 1e9), rtt(1)], "up_gbps is set, and --link measures it: one of the two"),
        (["rtt_ms=1"], [rates(1e9, 1e9), rtt(1)], "rtt_ms is set, and --link measures it: one of the two"),
        (["sites=3"], [rates(1e9, 1e9), rtt(1)], "sites is 3, and 2 links are given: one for all, or one for each"),
        ([], [rtt(1)], "link.json: no rate was measured both ways: diloco doctor HOST:PORT --json > FILE"),
        ([], [rates(1e9, 0.0), rtt(1)], "link.json: no rate was measured both ways"),
        ([], [rates(1e9, 1e9)], "link.json: not what diloco doctor prints"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], checks: list[dict[str, Any]], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, "link", *checks)
    assert main(["plan", *SMALL, "--link", file, "--link", file, *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize("content", [b"", b"[]", b'{"checks": [{}]}', b'{"checks": 3}', b"\xff", b'{"checks": [4]}'])
def test_a_file_of_something_else_is_one_line(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "link.json").write_bytes(content)
    assert main(["plan", *SMALL, "--link", str(file)]) == 2
    assert "link.json: not what diloco doctor prints" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, "--link", str(tmp_path / "none.json")]) == 2
    assert "none.json: No such file or directory" in capsys.readouterr().err
