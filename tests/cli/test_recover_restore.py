"""``diloco restore``: the three ways, and what is refused in words."""

from __future__ import annotations

import json
import shutil
import socket
import time
from pathlib import Path

import pytest
import torch

from diloco.cli.main import main
from diloco.codec.base import digest
from diloco.config import compose as configs
from diloco.config.run_dir import RunDir
from diloco.durable import locked
from diloco.observe.eventlog import EventLog, read_events
from diloco.sync.progress import FragmentProgress, LearnerState
from diloco.syncer.backups import Vault, back_up
from tests.models.pasts import Hand, configured, with_a_past
from tests.models.test_read_warm_site import checkpointed
from tests.syncer.building import files


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return with_a_past(tmp_path)


def again(run: Path) -> Hand:
    """The run's syncer, started once more."""
    return Hand(configs.read(run / "config.yaml"))


def assert_goes_on(run: Path, expected: list[int]) -> Hand:
    hand = again(run)
    assert hand.versions() == expected
    lineage = hand.syncer.core.ask(lambda machine: machine.state.lineage)
    assert lineage > time.time() - 600
    assert json.loads((run / "syncer/run.json").read_text())["lineage"] == lineage
    assert hand.syncer.api.status()["lineage"] == lineage
    for site in "ab":
        hand.push(site, 0, hand.join(site))
    assert hand.versions() == [expected[0] + 2, expected[1]]
    return hand


@pytest.mark.slow
def test_from_an_image(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = tmp_path / "image"
    assert main(["replay", str(run), "--without", "site=b:versions=3..4", "--out", str(image), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert main(["restore", str(run), "--from", str(image), "--why", "b was poisoned"]) == 0
    said = capsys.readouterr().out
    assert "begins with versions 9 9" in said
    assert "without site=b:versions=3..4" in said
    assert "momentum as it was then" in said
    hand = again(run)
    assert hand.digests() == told["digests"]
    merged = hand.syncer.core.ask(lambda machine: [line.tokens_merged for line in machine.state.sites["b"].lines])
    assert merged == [300, 300], "what was left out is merged no more"
    hand.stop()
    assert_goes_on(run, [9, 9]).stop()
    (event,) = [event for event in read_events(run / "events.jsonl")[0] if event["what"] == "restored"]
    assert event["held"] == [["a", 0, 400, 4], ["a", 1, 400, 4], ["b", 0, 300, 3], ["b", 1, 300, 3]]


@pytest.mark.slow
def test_a_finished_run_that_is_restored_has_not_finished(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`diloco up` would not have gone on with it."""
    final = RunDir(run).final_model
    final.parent.mkdir()
    final.write_bytes(b"of before")
    image = tmp_path / "image"
    assert main(["replay", str(run), "--without", "site=b:versions=3..4", "--out", str(image)]) == 0
    assert main(["restore", str(run), "--from", str(image)]) == 0
    (before,) = (run / "syncer").glob("final-before-*/model.safetensors")
    assert f"the run had finished and goes on; the final model that it had is in {before.parent}" in (
        capsys.readouterr().out
    )
    assert before.read_bytes() == b"of before"
    assert not final.exists()
    assert_goes_on(run, [9, 9]).stop()


def test_from_a_backup_into_a_lost_folder(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = str(tmp_path / "vault")
    made, _ = back_up(run / "syncer", Vault(url))
    first = "20440101T000000.000000Z"  # By the release before, when the clock was ahead.
    (tmp_path / "vault/past" / made).rename(tmp_path / "vault/past" / first)
    again(run).stop()  # Its start is in the journal.
    newest, _ = back_up(run / "syncer", Vault(url))
    assert Vault(url).names("past") == [first, newest]
    assert main(["restore", str(run), "--from", url]) == 1
    assert "is not empty" in capsys.readouterr().err
    hand = again(run)
    digests = hand.digests()
    hand.stop()
    for source, wanted in ((url, newest), (f"{url}/past", newest), (f"{url}/past/{first}", first)):
        shutil.rmtree(run / "syncer")
        assert main(["restore", str(run), "--from", source]) == 0
        assert f"backup {wanted}" in capsys.readouterr().out
    hand = assert_goes_on(run, [9, 9])
    hand.stop()
    assert hand.syncer.holdings.values[1].digest == digests[1]
    assert main(["restore", str(run), "--list", "--from", url]) == 0
    said = capsys.readouterr().out
    assert first in said
    assert "2 backups of past" in said
    assert main(["restore", str(run), "--list", "--from", url, "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {first, newest}


def warm(run: Path, folder: Path, *, flip: bool = False) -> tuple[Path, list[str]]:
    """A site that holds what the run has published last."""
    hand = again(run)
    values = hand.syncer.holdings.values
    parts = [FragmentProgress(each.version, next_sequence=5, tokens_merged=400, updates_merged=4) for each in values]
    bases = [each.published.clone() for each in values]
    if flip:
        bases[1].view(torch.int32)[0] ^= 1
    known = {"run_id": "past", "layout_fingerprint": hand.layout.fingerprint, "digests": [digest(b) for b in bases]}
    hand.stop()
    checkpointed(folder, LearnerState(parts, epoch=30, step=9), bases=tuple(bases), **known)
    return folder, [each.digest for each in values]


def with_events(run: Path, tmp_path: Path) -> Path:
    """The same run with its syncer's events written down."""
    log = EventLog(run / "events.jsonl", "syncer")
    shutil.rmtree(run / "syncer")
    hand = Hand(configs.read(run / "config.yaml"), log.emit)
    for site in "ab":
        hand.join(site)
    for _ in range(3):
        for site in "ab":
            for fragment in range(2):
                hand.push(site, fragment)
    hand.stop()
    log.close()
    return run


def test_from_a_warm_site_whose_bases_are_what_was_published(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_events(run, tmp_path)
    site, digests = warm(run, tmp_path / "site")
    shutil.rmtree(run / "syncer")
    assert main(["restore", str(run), "--from-site", str(site)]) == 0
    said = capsys.readouterr().out
    assert "begins with versions 7 7" in said
    assert "momentum is lost" in said
    assert "nothing else knows" not in said
    assert "is not known" not in said
    hand = again(run)
    assert hand.digests() == digests
    merged = hand.syncer.core.ask(
        lambda machine: {
            name: [line.tokens_merged for line in site.lines] for name, site in machine.state.sites.items()
        }
    )
    assert merged == {"a": [300, 300], "b": [300, 300]}, "the run's events say what is inside"
    assert hand.syncer.core.ask(lambda machine: machine.state.epoch) == 31
    hand.stop()
    assert_goes_on(run, [7, 7]).stop()


def test_a_site_alone_is_taken_and_that_is_said(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site, _ = warm(run, tmp_path / "site")
    shutil.rmtree(run / "syncer")
    assert main(["restore", str(run), "--from-site", str(site), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["versions"] == [9, 9]
    assert "nothing else knows its version of fragment 1" in told["said"]
    assert told["held"] == [["b", 0, 400, 4], ["b", 1, 400, 4]]


@pytest.mark.slow
def test_a_site_that_says_otherwise_than_what_was_published_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_events(run, tmp_path)
    site, _ = warm(run, tmp_path / "site", flip=True)
    shutil.copytree(run / "syncer", tmp_path / "old")
    shutil.rmtree(run / "syncer")
    assert main(["restore", str(run), "--from-site", str(site)]) == 1
    assert "it is not what was published" in capsys.readouterr().err
    (run / "events.jsonl").unlink()
    assert main(["restore", str(run), "--from-site", str(site), "--evidence", str(tmp_path / "old")]) == 1
    assert f"in {tmp_path / 'old'}: it is not what was published" in capsys.readouterr().err
    assert not [path for path in (run / "syncer").iterdir() if path.name != "lock"], "nothing was restored"


def test_a_site_of_an_earlier_lineage_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site, _ = warm(run, tmp_path / "site")
    log = EventLog(run / "events.jsonl", "restore")
    log.emit("restored", {"lineage": 77, "versions": [3, 3], "held": []})
    log.close()
    shutil.rmtree(run / "syncer")
    assert main(["restore", str(run), "--from-site", str(site)]) == 1
    assert "is of lineage 1, and lineage 77 has begun since" in capsys.readouterr().err


def test_a_running_syncer_is_left_alone(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = tmp_path / "image"
    assert main(["replay", str(run), "--out", str(image)]) == 0
    before = files(run / "syncer")
    with locked(run / "syncer"):
        assert main(["restore", str(run), "--from", str(image)]) == 1
    said = capsys.readouterr().err
    assert "is in use by process" in said
    assert "stop this run's syncer first" in said
    assert {name for name, data in files(run / "syncer").items() if before.get(name) != data} <= {"lock"}


def moved(run: Path) -> Path:
    """The folder in which the run went on after a failover: that of the standby, ahead of the dead one."""
    shutil.copytree(run / "syncer", run / "standby")
    RunDir(run).move_to(run / "standby")
    hand = again(run)
    hand.push("a", 0, hand.join("a"))
    assert hand.versions() == [9, 8]
    hand.stop()
    return run / "standby"


def test_after_a_failover_all_that_look_back_look_where_the_run_went_on(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved(run)
    before = files(run / "syncer")
    image = tmp_path / "image"
    assert main(["replay", str(run), "--out", str(image), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["versions"] == [9, 8]
    assert main(["journal", "verify", str(run)]) == 0
    assert f"in {run / 'standby'}" in capsys.readouterr().out
    assert main(["restore", str(run), "--from", str(image)]) == 0
    assert "begins with versions 10 9" in capsys.readouterr().out
    hand = again(run)
    assert hand.versions() == [10, 9]
    hand.stop()
    assert {name for name, data in files(run / "syncer").items() if before.get(name) != data} <= {"lock"}


def test_a_run_that_another_process_leads_or_follows_is_left_alone(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = tmp_path / "image"
    assert main(["replay", str(run), "--out", str(image)]) == 0
    standby = moved(run)
    before = files(standby)
    for asked, held in ((run, run / "syncer"), (run / "syncer", standby)):
        with locked(held):
            assert main(["restore", str(asked), "--from", str(image)]) == 1
        assert f"{held} is in use by process" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as server:
        RunDir(run).address.write_text(f"127.0.0.1:{server.getsockname()[1]}")
        assert main(["restore", str(run), "--from", str(image)]) == 1
        assert "the run's syncer answers at 127.0.0.1:" in capsys.readouterr().err
    assert {name for name, data in files(standby).items() if before.get(name) != data} <= {"lock"}
    assert main(["restore", str(run), "--from", str(image)]) == 0, "an address that nobody serves is a dead one's"


@pytest.mark.slow
def test_a_data_folder_that_is_named_is_where_the_run_goes_on(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved(run)
    image = tmp_path / "image"
    assert main(["replay", str(run / "syncer"), "--out", str(image)]) == 0
    assert main(["restore", str(run / "syncer"), "--from", str(image)]) == 0
    assert f"the run goes on in {run / 'syncer'} from now on" in capsys.readouterr().out
    assert_goes_on(run, [9, 9]).stop()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "give --from IMAGE|BACKUP or --from-site FOLDER"),
        (["--from", "x", "--from-site", "y"], 2, "one of them"),
        (["--list"], 2, "cluster.syncer.backup is ''"),
        (["--from", "nowhere"], 1, "holds neither an image nor a backup of run past"),
        (["--from", "zz://x"], 1, "Protocol not known"),
        (["--from-site", "nowhere"], 1, "nowhere is not there"),
    ],
)
def test_nonsense_is_one_line(
    tmp_path: Path, arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    configured(tmp_path)
    assert main(["restore", str(tmp_path / "past"), *arguments]) == code
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_a_lineage_above_what_a_site_names(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = tmp_path / "image"
    assert main(["replay", str(run), "--out", str(image)]) == 0
    capsys.readouterr()
    above = str(int(time.time()) + 10**6)
    assert main(["restore", str(run), "--from", str(image), "--above", above, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lineage"] == int(above) + 1
