from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console

from diloco.cli import status
from diloco.cli.main import main
from diloco.cli.status import (
    as_one,
    sites_table,
    syncer_address,
    syncer_addresses,
    whole_line,
)
from diloco.config.errors import ExitCode, VerbError
from diloco.config.run_dir import RunDir
from diloco.observe.text import details, heading
from tests.cli.conftest import Cli
from tests.observe.recorded import Recorder, append


def test_it_writes_the_report_and_prints_the_table(tmp_path: Path, cli: Cli) -> None:
    append(tmp_path / "events.jsonl", Recorder(10).record()[:200])
    out = cli.out("report", str(tmp_path))
    assert "the run has not reached its end" in out
    assert (tmp_path / "report.html").is_file()
    assert str(tmp_path / "report.html") in out


UNITS = {
    **dict.fromkeys(["partly", "in_hand", "given_back", "reissued", "repeated"], 0),
    **{"processed": 1201, "leased": 1300, "merged": 1200, "sequences": 64},
}
STATUS = {
    **{"run_id": "nimble-otter", "phase": "ending", "ending": "drained", "progress": 0.25, "run_tokens": 12000},
    **{"epoch": 3, "up_seconds": 12.3, "kernels": "native (AVX2)"},
    "fragments": [{"version": 4, "arrived": ["site-a"]}, {"version": 5, "arrived": []}],
    "sites": {
        "site-a": {
            **{"status": "live", "step": 120, "loss": 2.5, "tokens_per_s": 8120.0, "tokens_processed": 15000},
            **{"tokens_merged": 12000, "tokens_in_flight": 2000, "staleness": 1, "bytes_up": 2048, "bytes_down": 4096},
            **{"payload_bytes_up": 2000, "payload_bytes_down": 4000, "heard_seconds_ago": 0.4},
        },
        "site-b": {
            **{"status": "silent", "tokens_merged": 0, "payload_bytes_up": 0, "payload_bytes_down": 10},
            "heard_seconds_ago": None,
        },
    },
}


def test_the_table_shows_a_site_that_reports_and_one_that_never_did() -> None:
    console = Console(width=140)
    with console.capture() as told:
        console.print(heading(STATUS))
        console.print(sites_table(STATUS))
    text = told.get()
    for words in ("nimble-otter", "ending (drained)", "25%", "versions 4,5", "kernels native (AVX2)"):
        assert words in text, text
    for words in ("12,000", "8,120", "2.5000", "0.4 s ago", "never"):
        assert words in text, text


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_a_watch_ended_by_ctrl_c_has_not_failed(option: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stop = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(status, "status_of", lambda address, settings: STATUS)
    monkeypatch.setattr(status, "time", SimpleNamespace(sleep=stop, gmtime=time.gmtime, strftime=time.strftime))
    assert main(["status", "127.0.0.1:7077", "--watch", *option]) == 0


def test_a_syncer_is_named_by_address_or_by_run_folder(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "config.yaml").write_text("run: {name: x}")
    cli.refuses(3, "syncer.address is not there", "status", str(tmp_path))
    final = RunDir(tmp_path).final_model
    final.parent.mkdir(parents=True)
    final.touch()
    cli.refuses(3, f"the run has finished (diloco report {tmp_path})", "status", str(tmp_path))
    (tmp_path / "syncer.address").write_text("127.0.0.1:4000")
    assert syncer_address(str(tmp_path)) == "127.0.0.1:4000"
    cli.refuses(2, "no run folder", "status", "nowhere:at-all")
    for index, address in enumerate(("a:1", "b:2")):
        folder = tmp_path / "several" / "syncers" / str(index)
        folder.mkdir(parents=True)
        (folder / "syncer.address").write_text(address)
    assert syncer_addresses(str(tmp_path / "several")) == syncer_addresses("a:1/b:2") == ["a:1", "b:2"]
    assert syncer_addresses("a:1,b:2/c:3") == ["a:1,b:2", "c:3"], "of a syncer and its standby"


STANDBY = {"mode": "sync", "standby": "osl", "following": True, "away_seconds": None, "detached": False}
AWAY = {**STANDBY, "following": False, "away_seconds": 41.2}
BACKUP = {"age_s": 12.4, "failing": "", "last": "x", "url": "vault"}
NO_BACKUP = {**BACKUP, "age_s": None}
BROKEN = "permissions cannot be used, its last good content stays in force: permissions p: it is not JSON"
STANDSTILL = {"fragment": 1, "seconds": 31.4, "waits_for": ["site-b"], "why": "waiting for site-b"}
HELD = [{"fragment": 1, "sequence": 7, "seconds": 12.4, "why": "its norm is 400 times the usual one"}]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"not_ready": ["disk_full", "draining"]}, "TAKES NO UPDATES: disk_full, draining"),
        ({"sites": {"site-a": {"updates_corrupt": 2, "bases_differed": 1}}}, "site-a CORRUPTS DATA (2 updates and 1 b"),
        ({"identity_complaints": [BROKEN], "not_ready": ["disk_full"]}, f"  {BROKEN}  TAKES NO"),
        ({"behind": "if another syncer leads the run now"}, "  BEHIND: if another"),
        ({"replication": STANDBY}, "  standby osl follows"),
        ({"replication": AWAY}, "NO STANDBY for 41 s (start it, or: diloco standby detach)"),
        ({"replication": {**STANDBY, "detached": True}}, "ON ONE DISK until standby osl has"),
        ({"replication": {**AWAY, "detached": True}}, "ON ONE DISK without a standby (start"),
        ({"standstill": STANDSTILL}, "  NO VERSION of fragment 1 for 31 s: waiting for site-b"),
        (
            {"sites": {"site-a": {"held": HELD}, "site-b": {"held": []}}},
            "HELD for 12 s: site-a 1 7: its norm is 400 times the usual one (diloco admit, diloco refuse)",
        ),
        ({"lineage": 1_795_235_467, "backup": BACKUP}, "restored 2026-11-21 04:31:07 UTC  backup 12 s old"),
        (
            {"backup": {**NO_BACKUP, "without_s": 7200.0, "failing": "no route"}},
            "backup none for 7200 s, FAILING: no r",
        ),
        ({"backup": NO_BACKUP}, "backup none yet"),  # An earlier release's.
    ],
)
def test_what_must_be_seen_at_once_is_in_the_first_line(found: dict[str, object], words: str) -> None:
    assert words in heading({**STATUS, **found})


def test_what_is_well_says_nothing_in_the_first_line() -> None:
    told = heading({**STATUS, "lineage": 1, "backup": None, "replication": {**STANDBY, "mode": "off"}})
    assert not [words for words in ("NO UPDATES", "restored", "backup", "DISK", "CORRUPTS") if words in told]
    assert "site-b" not in heading({**STATUS, "sites": {"site-b": {"updates_corrupt": 0}}})
    told = heading({**STATUS, "replication": AWAY, "behind": "another leads"})
    assert "detach" not in told, "or it begins a second run"


def a_run(folder: Path, *events: dict[str, object]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("run: {log_every: 2}\n")
    (folder / "events.jsonl").write_text("".join(json.dumps({"at": 1.0} | event) + "\n" for event in events))
    return folder


STARTED: dict[str, object] = {"who": "syncer", "what": "syncer_started", "epoch": 1}
STEPS: list[dict[str, object]] = [
    {"who": site, "what": "step", "step": step, "loss": 2.0} for step in (1, 2, 3, 4) for site in ("fra", "iad")
]
PUBLISHED: dict[str, object] = {"who": "syncer", "what": "published", "version": 3, "run_tokens": 40960, "fragment": 0}
FINAL: dict[str, object] = {"who": "syncer", "what": "final", "ending": "finished"}


def test_the_runs_of_a_folder_are_listed_the_latest_first(tmp_path: Path, cli: Cli) -> None:
    for age, name in enumerate(("new", "live", "old")):
        folder = a_run(tmp_path / name, STARTED, *([PUBLISHED] if age else []))
        os.utime(folder / "events.jsonl", (1e9 - age, 1e9 - age))
    (tmp_path / "live" / "syncer.address").write_text("127.0.0.1:7077")
    final = tmp_path / "old" / "syncer" / "final" / "model.safetensors"
    final.parent.mkdir(parents=True)
    final.touch()
    (tmp_path / "latest").symlink_to("new")
    new, live, old = (line.split() for line in cli.out("runs", str(tmp_path)).splitlines())
    assert (new[0], new[1], new[-3:]) == ("new", "stopped", ["no", "version", "here"])
    assert (live[:4], live[-4:]) == (["live", "syncer", "at", "127.0.0.1:7077"], ["version", "3,", "40,960", "tokens"])
    assert old[:2] == ["old", "finished"]
    assert "syncer_started" in cli.out("logs", str(tmp_path / "old")), (
        "and then no more is waited for, whatever it says"
    )
    (tmp_path / "old" / "config.yaml").write_text("run: [")
    joined: dict[str, object] = {"who": "fra", "what": "joined", "versions": [0], "syncer": "10.0.0.1:7077"}
    a_run(tmp_path / "part", joined, *STEPS[:1])
    out = cli.out("runs", str(tmp_path))
    assert "cannot be read" in out, "one that is damaged hides no other"
    (part,) = (line for line in out.splitlines() if line.startswith("part"))
    assert "part, syncer at 10.0.0.1:7077" in part, "this machine does not know how the run stands"
    assert part.endswith("fra at step 1")
    cli.refuses(3, "whose syncer is at 10.0.0.1:7077 (diloco status 10.0.0.1:7077)", "status", str(tmp_path / "part"))
    cli.refuses(2, "holds no run", "runs", str(tmp_path / "new"))


def test_what_a_run_said_is_printed_and_followed_until_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    folder = a_run(tmp_path / "otter", STARTED, *STEPS, FINAL)
    assert cli.out("logs", str(folder), "iad", "--lines", "1").split()[:3] == ["[iad]", "step:", "4"]
    cli.refuses(2, "'osl' has no events in", "logs", str(folder), "osl")
    monkeypatch.setattr(status, "QUIET_S", 0.1)
    live = a_run(tmp_path / "live", STARTED, *STEPS[:4])
    later = ["".join(json.dumps({"at": 2.0} | event) + "\n" for event in (*STEPS[4:], FINAL))]

    def sleep(seconds: float) -> None:
        with (live / "events.jsonl").open("a") as file:
            file.write(later.pop() if later else "")
        time.sleep(0.01)

    monkeypatch.setattr(status, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    said = cli.out("logs", str(live), "--lines", "0")
    assert "[fra] step:      4" in said
    assert "[syncer] final: ending finished" in said
    assert "[fra] step:      2" not in said, "that was there before"


def of(held: list[int], tokens: int, progress: float) -> dict[str, Any]:
    fragments = [{"version": 10 + place, "arrived": []} for place in held]
    return {**STATUS, "held": held, "run_tokens": tokens, "progress": progress, "fragments": fragments}


def test_the_tokens_of_the_whole_are_the_mean_over_fragments() -> None:
    found = {"a:1": of([0, 2, 3], 100, 0.25), "b:2": of([1], 200, 0.5)}
    one = as_one(found)
    assert one["run_tokens"] == (3 * 100 + 200) // 4
    assert one["versions"] == {"0": 10, "1": 11, "2": 12, "3": 13}
    assert one["progress"] == [0.25, 0.5]
    line = whole_line(found)
    assert "on 2 syncers  25% to 50% of the run  versions 0:10,1:11,2:12,3:13  125 tokens merged, the mean" in line


def test_a_syncer_that_is_away_is_named_and_the_others_are_shown_but_a_refusal_is_no_absence(
    monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    answers: dict[str, Any] = {"a:1": of([0], 100, 0.25), "b:2": of([1], 100, 0.25)}

    def answer(address: str, settings: object) -> Any:
        if isinstance(found := answers[address], VerbError):
            raise found
        return found

    monkeypatch.setattr(status, "status_of", answer)
    told = cli.out("status", "a:1/b:2")
    assert "on 2 syncers  25% of the run" in told
    assert told.count("nimble-otter") == 3
    assert "\nsyncer b:2 holds fragments 1 of the model, and counts them from 0:\n" in told
    assert json.loads(cli.out("status", "a:1", "b:2", "--json"))["run_tokens"] == 100

    answers["b:2"] = VerbError(ExitCode.UNREACHABLE, "the syncer at b:2 does not answer: refused")
    first, *_, last = cli.out("status", "a:1/b:2", code=ExitCode.UNREACHABLE).splitlines()
    assert first.endswith("100 tokens merged, the mean over these fragments  DOES NOT ANSWER: b:2")
    assert "does not answer: refused" in last
    assert as_one({"b:2": {"unreachable": "gone"}})["run_tokens"] is None
    assert whole_line({"b:2": {"unreachable": "gone"}}) == "1 syncers  DOES NOT ANSWER: b:2"

    answers["b:2"] = VerbError(ExitCode.FAILED, "it does not tell")
    cli.refuses(ExitCode.FAILED, "does not tell", "status", "a:1/b:2")
    assert status.leading("b:2,a:1", [])[0] == "a:1", "of several addresses of one, who refuses hides no other"
    answers["a:1"] = VerbError(ExitCode.UNREACHABLE, "a:1 does not answer")
    with pytest.raises(VerbError, match="it does not tell"):
        status.leading("a:1,b:2", [])


FOLLOWER = {"role": "standby", "name": "iad", "following": True, "primary": "a:1", "versions": [4], "epoch": 1}
ALONE = {"turns_behind": 0, "failed": None}
OTHERS: list[tuple[dict[str, dict[str, Any]], str, str]] = [
    ({"a:1": {}, "b:2": {"epoch": 90}}, "b:2", "the syncer at a:1 is AN OLD ONE: stop it (lineage 1, epoch 3)"),
    ({"a:1": {"epoch": 90}, "b:2": {"epoch": 2, "lineage": 7}}, "b:2", "the syncer at a:1 is AN OLD ONE: stop it (lin"),
    ({"a:1": {}, "b:2": {}}, "a:1", "the syncer at b:2 is the same one, or a copy of it (lineage 1, epoch 3)"),
    ({"a:1": {}, "b:2": {"run_id": "other"}}, "a:1", "the syncer at b:2 serves another run, other"),
    ({"a:1": FOLLOWER, "b:2": {}}, "b:2", "a:1: standby iad follows a:1  versions 4"),
    ({"b:2": {}}, "b:2", "the syncer at a:1 does not answer: refused"),
    ({"b:2": FOLLOWER}, "b:2", "the syncer at a:1 does not answer: refused"),
]


@pytest.mark.parametrize(("there", "leads", "said"), OTHERS)
def test_of_several_addresses_the_syncer_of_the_highest_epoch_is_shown_and_told_and_what_the_others_are(
    there: dict[str, dict[str, Any]], leads: str, said: str, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """The first is an old syncer that an operator has started again after a failover, for one."""
    drained = []

    @contextmanager
    def asking(address: str, *given: object, **more: object) -> Iterator[SimpleNamespace]:
        if address not in there:
            raise VerbError(ExitCode.UNREACHABLE, f"the syncer at {address} does not answer: refused")
        found = {**STATUS, **there[address]} if there[address] is not FOLLOWER else {**FOLLOWER, **ALONE}
        yield SimpleNamespace(status=lambda: found, drain=lambda: drained.append(address))

    monkeypatch.setattr(status, "asking", asking)
    first, second, *_ = cli.out("status", "a:1, b:2").splitlines()
    assert first.startswith("standby iad" if there[leads] is FOLLOWER else "run nimble-otter")
    assert second.startswith(said)
    assert main(["drain", "a:1,b:2"]) == ExitCode.OK
    assert drained == [leads]


def test_units_and_rounds_are_shown_where_there_are_any() -> None:
    assert details(STATUS) == details({**STATUS, "units": None}) == ""
    assert details({**STATUS, "units": UNITS}).startswith("units of 64 sequences: 1,300 leased, 1,201 processed, ")
    costs = {"receive_s": 1.25, "read_s": 0.001, "publish_s": 0.0125}
    opened = {"version": 4, "arrived": ["fra"], "awaited": ["iad", "osl"], "open_seconds": 2.5, "merging": False}
    met = {**opened, "awaited": [], "grace_seconds_left": 0.75}
    earlier = {"version": 3, "arrived": ["site-a"], "members": [], "merging": True}  # It is no open round.
    fragments = [{"version": 4, "costs": costs}, opened, met, {"version": 5, "costs": None}, earlier]
    assert details({**STATUS, "fragments": fragments}).splitlines() == [
        "open: fragment 1, next version 5, arrived fra, awaited iad, osl, open for 2.5 s, grace left no quorum yet",
        "open: fragment 2, next version 5, arrived fra, awaited -, open for 2.5 s, grace left 0.8 s",
        "round 4 of fragment 0: receive 1,250.0 ms, read 1.0 ms, publish 12.5 ms",
    ]


def test_what_the_syncer_says_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    backup = {"age_s": 1.0, "without_s": 1.0, "last": "", "failing": "cannot write [/mnt/b]: [bold]gone"}
    status._print({**STATUS, "backup": backup}, False)
    assert backup["failing"] in capsys.readouterr().out


def test_a_dashboard_takes_no_other_syncer_for_the_first() -> None:
    watches = [SimpleNamespace(address=each, latest={**STATUS}, answered_s=time.monotonic()) for each in ("a:1", "b:2")]
    page = status.dashboard_of("otter", None, None, watches)  # type: ignore[arg-type]
    assert page.ask()[0] is not None
    watches[0].answered_s -= 60.0
    answered, found = page.ask()
    assert answered is None
    assert found == {"a:1": {"unreachable": "a:1 does not answer"}, "b:2": STATUS}
