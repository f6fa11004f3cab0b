"""``diloco journal``, ``replay`` and ``restore``: what they say, leave behind, and refuse in words."""

from __future__ import annotations

import json
import shutil
import socket
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from diloco.codec.base import digest
from diloco.config import compose as configs
from diloco.config.run_dir import RunDir
from diloco.durable import locked
from diloco.observe.eventlog import EventLog, read_events
from diloco.sync.events import SyncerStarted
from diloco.sync.journal import Record
from diloco.sync.progress import FragmentProgress, LearnerState
from diloco.syncer.backups import Vault, back_up
from diloco.syncer.snapshots import read_image
from tests.cli.conftest import Cli
from tests.models.pasts import Hand, configured, play, with_a_past
from tests.models.test_read_warm_site import checkpointed
from tests.sync.format_1 import encode_record
from tests.syncer.building import files
from tests.syncer.test_store import told


def test_a_journal_is_shown_as_lines_whatever_names_it_a_torn_end_is_said_and_damage_is_an_error(
    tmp_path: Path, cli: Cli
) -> None:
    folder = tmp_path / "run" / "syncer" / "journal"
    folder.mkdir(parents=True)
    (tmp_path / "run" / "events.jsonl").touch()
    for number in (1, 2):
        record = encode_record(Record(number * 10**9, SyncerStarted(number), "0" * 16))
        (folder / f"journal-{number:06d}.log").write_bytes(record)
    for target in (tmp_path / "run", folder.parent):
        lines = cli.out("journal", "show", str(target)).splitlines()
        assert [lines[at].split()[:2] for at in (1, 3)] == [
            ["1.000000", "SyncerStarted"],
            ["2.000000", "SyncerStarted"],
        ]
    path = folder / "journal-000002.log"
    whole = path.read_bytes()
    copy = shutil.copy(path, folder / "journal-000002.bak.log")
    assert cli.out("journal", "show", str(copy)).count("SyncerStarted") == 1
    assert cli.out("journal", "show", str(tmp_path / "run")).count("SyncerStarted") == 2
    path.write_bytes(whole + whole[:20])
    said = cli.out("journal", "show", str(path))
    assert said.count("SyncerStarted") == 1
    assert "20 bytes of a turn that was being written" in said
    path.write_bytes(whole[:-3] + b"xxx" + whole)
    cli.refuses(1, "damaged", "journal", "show", str(path))


def test_everything_is_verified_and_the_first_damage_named(tmp_path: Path, cli: Cli) -> None:
    desk = told(tmp_path / "run" / "syncer", snapshots=2)
    (tmp_path / "run" / "events.jsonl").touch()
    for target in (tmp_path / "run", desk.store.folder):
        (line,) = cli.out("journal", "verify", str(target)).splitlines()
        assert line.startswith("whole: ")
        assert " 2 snapshots, " in line
        assert line.endswith(f"in {desk.store.folder}")
    path = max((desk.store.folder / "journal").glob("journal-*.log"))
    with path.open("ab") as file:
        file.write(b"torn")
    said = cli.out("journal", "verify", str(tmp_path / "run"))
    assert "the last 4 bytes are of a turn that was being written" in said
    with path.open("r+b") as file:
        file.seek(300)
        file.write(b"?")
    cli.refuses(1, str(path), "journal", "verify", str(tmp_path / "run"))


def test_every_version_is_compared_with_its_digest_and_without_an_update_it_says_what_is_gone_and_keeps_an_image(
    run: Path, tmp_path: Path, cli: Cli
) -> None:
    before = files(run)
    said = cli.out("replay", str(run), "--verify")
    assert "versions 0 0 to 8 8" in said
    assert "16 versions match the journal's digests, bit for bit" in said
    assert "1 snapshots match the replayed values" in said
    facts = cli.json("replay", str(run), "--to", "3")
    assert (facts["versions"], facts["versions_compared"]) == ([3, 3], 6)

    out = tmp_path / "image"
    chosen = ["--without", "site=b:versions=3..4:fragment=1"]
    said = cli.out("replay", str(run), *chosen, "--out", str(out))
    assert "left out: b, fragment 1, sequence 2, merged into version 4, 100 tokens" in said
    assert "skipped: version 4 of fragment 1: no update remained; it keeps its number" in said
    assert "4 later updates were trained on a base that has those (a 2, b 2) and are merged unchanged" in said
    assert f"diloco restore {run} --from {out}" in said
    image = read_image(out)
    assert [values.version for values in image.fragments] == [8, 8]
    assert image.card["run_id"] == "past"
    facts = cli.json("replay", str(run), *chosen)
    assert facts["digests"] == [values.digest for values in image.fragments]
    left_out = {"site": "b", "fragment": 1, "sequence": 2, "version": 4, "tokens": 100, "chosen": True}
    assert facts["left_out"] == [left_out]
    assert facts["skipped"] == [{"fragment": 1, "version": 4}]
    final = load_file(out / "model.safetensors")
    assert sum(values.numel() for values in final.values()) == sum(v.published.numel() for v in image.fragments)
    assert all(bool(torch.isfinite(values).all()) for values in final.values())
    assert files(run) == before, "the folder is only read"


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
def test_from_an_image_a_run_goes_on_also_a_finished_one(run: Path, tmp_path: Path, cli: Cli) -> None:
    """`diloco up` would not have gone on with one that has finished."""
    final = RunDir(run).final_model
    final.parent.mkdir()
    final.write_bytes(b"of before")
    image = tmp_path / "image"
    told = cli.json("replay", str(run), "--without", "site=b:versions=3..4", "--out", str(image))
    said = cli.out("restore", str(run), "--from", str(image), "--why", "b was poisoned")
    assert "begins with versions 9 9" in said
    assert "without site=b:versions=3..4" in said
    assert "momentum as it was then" in said
    (before,) = (run / "syncer").glob("final-before-*/model.safetensors")
    assert f"the run had finished and now continues; its final model until now is in {before.parent}" in said
    assert before.read_bytes() == b"of before"
    assert not final.exists()
    hand = again(run)
    assert hand.digests() == told["digests"]
    merged = hand.syncer.core.ask(lambda machine: [line.tokens_merged for line in machine.state.sites["b"].lines])
    assert merged == [300, 300], "what was left out is merged no more"
    hand.stop()
    assert_goes_on(run, [9, 9]).stop()
    (event,) = [event for event in read_events(run / "events.jsonl") if event["what"] == "restored"]
    assert event["held"] == [["a", 0, 400, 4], ["a", 1, 400, 4], ["b", 0, 300, 3], ["b", 1, 300, 3]]


def test_from_a_backup_into_a_lost_folder(run: Path, tmp_path: Path, cli: Cli) -> None:
    url = str(tmp_path / "vault")
    made, _ = back_up(run / "syncer", Vault(url))
    first = "20440101T000000.000000Z"  # By the release before, when the clock was ahead.
    (tmp_path / "vault/past" / made).rename(tmp_path / "vault/past" / first)
    hand = again(run)  # Its start is in the journal.
    digests = hand.digests()
    hand.stop()
    newest, _ = back_up(run / "syncer", Vault(url))
    cli.refuses(1, "is not empty", "restore", str(run), "--from", url)
    unknown = "how many tokens it loses is unknown here: 800 tokens are merged"
    for source, wanted, lost in (
        (url, newest, unknown),
        (f"{url}/past", newest, unknown),
        (f"{url}/past/{first}", first, "it loses 200 tokens of the 1,000 that the run had published"),
    ):
        shutil.rmtree(run / "syncer")
        if wanted == first:
            log = EventLog(run / "events.jsonl", "syncer")
            for told in "ef":  # A backup has what it has, whatever the events say.
                log.emit("published", {"fragment": 0, "version": 10, "digest": told * 64, "run_tokens": 1000})
            log.close()
        said = cli.out("restore", str(run), "--from", source)
        assert f"backup {wanted}" in said
        assert lost in said
    hand = assert_goes_on(run, [9, 9])
    hand.stop()
    assert hand.syncer.holdings.values[1].digest == digests[1]
    said = cli.out("restore", str(run), "--list", "--from", url)
    assert first in said
    assert "2 backups of past" in said
    assert set(cli.json("restore", str(run), "--list", "--from", url)) == {first, newest}


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


@pytest.fixture
def told_run(tmp_path: Path) -> Path:
    """A run whose syncer wrote its events down."""
    config = configured(tmp_path)
    log = EventLog(tmp_path / "past" / "events.jsonl", "syncer")
    play(Hand(config, log.emit), 3)
    log.close()
    return tmp_path / "past"


def test_from_a_warm_site_whose_bases_are_what_was_published(told_run: Path, tmp_path: Path, cli: Cli) -> None:
    site, digests = warm(told_run, tmp_path / "site")
    shutil.rmtree(told_run / "syncer")
    said = cli.out("restore", str(told_run), "--from-site", str(site))
    assert "begins with versions 7 7" in said
    assert "momentum is lost" in said
    assert "no other evidence confirms" not in said
    assert "is not known" not in said
    assert "it loses no tokens that the run had published" in said
    hand = again(told_run)
    assert hand.digests() == digests
    state = hand.syncer.core.ask(lambda machine: machine.state)
    merged = {name: [line.tokens_merged for line in site.lines] for name, site in state.sites.items()}
    assert merged == {"a": [300, 300], "b": [300, 300]}, "the run's events say what is inside"
    assert state.epoch == 31
    hand.stop()
    assert_goes_on(told_run, [7, 7]).stop()


@pytest.mark.slow
def test_a_site_that_says_otherwise_than_what_was_published_is_refused(
    told_run: Path, tmp_path: Path, cli: Cli
) -> None:
    site, _ = warm(told_run, tmp_path / "site", flip=True)
    shutil.copytree(told_run / "syncer", tmp_path / "old")
    shutil.rmtree(told_run / "syncer")
    asked, old = ["restore", str(told_run), "--from-site", str(site)], tmp_path / "old"
    cli.refuses(1, "it is not what was published", *asked)
    (told_run / "events.jsonl").unlink()
    cli.refuses(1, f"in {old}: it is not what was published", *asked, "--evidence", str(old))
    assert not [path for path in (told_run / "syncer").iterdir() if path.name != "lock"], "nothing was restored"


def moved(run: Path) -> Path:
    """The folder in which the run went on after a failover: that of the standby, ahead of the dead one."""
    shutil.copytree(run / "syncer", run / "standby")
    RunDir(run).move_to(run / "standby")
    hand = again(run)
    hand.push("a", 0, hand.join("a"))
    assert hand.versions() == [9, 8]
    hand.stop()
    return run / "standby"


def test_after_a_failover_all_that_look_back_look_where_the_run_went_on_unless_a_folder_is_named(
    run: Path, tmp_path: Path, cli: Cli
) -> None:
    moved(run)
    before = files(run / "syncer")
    image = tmp_path / "image"
    assert cli.json("replay", str(run), "--out", str(image))["versions"] == [9, 8]
    assert f"in {run / 'standby'}" in cli.out("journal", "verify", str(run))
    assert "begins with versions 10 9" in cli.out("restore", str(run), "--from", str(image))
    hand = again(run)
    assert hand.versions() == [10, 9]
    hand.stop()
    assert_unchanged(run / "syncer", before)
    assert f"the run continues in {run / 'syncer'}" in cli.out("restore", str(run / "syncer"), "--from", str(image))
    assert_goes_on(run, [9, 9]).stop()


def test_a_run_that_another_process_leads_or_follows_is_left_alone(run: Path, tmp_path: Path, cli: Cli) -> None:
    image = str(tmp_path / "image")
    cli.json("replay", str(run), "--out", image)
    before = files(run / "syncer")
    with locked(run / "syncer"):
        cli.refuses(1, "stop this run's syncer first", "restore", str(run), "--from", image)
    assert_unchanged(run / "syncer", before)
    standby = moved(run)
    before = files(standby)
    for asked, held in ((run, run / "syncer"), (run / "syncer", standby)):
        with locked(held):
            cli.refuses(1, f"{held} is in use by process", "restore", str(asked), "--from", image)
    with socket.create_server(("127.0.0.1", 0)) as server:
        RunDir(run).address.write_text(f"127.0.0.1:{server.getsockname()[1]}")
        cli.refuses(1, "the run's syncer answers at 127.0.0.1:", "restore", str(run), "--from", image)
    assert_unchanged(standby, before)
    above = int(time.time()) + 10**6  # An address that nobody serves is a dead one's.
    assert cli.json("restore", str(run), "--from", image, "--above", str(above))["lineage"] == above + 1


def assert_unchanged(folder: Path, before: dict[str, bytes]) -> None:
    assert {name for name, data in files(folder).items() if before.get(name) != data} <= {"lock"}


def test_a_site_alone_is_taken_but_none_of_an_earlier_lineage(run: Path, tmp_path: Path, cli: Cli) -> None:
    site, _ = warm(run, tmp_path / "site")
    shutil.rmtree(run / "syncer")
    told = cli.json("restore", str(run), "--from-site", str(site))
    assert told["versions"] == [9, 9]
    assert "no other evidence confirms its version of fragment 1" in told["said"]
    assert told["held"] == [["b", 0, 400, 4], ["b", 1, 400, 4]]
    shutil.rmtree(run / "syncer")
    words = f"is of lineage 1, and lineage {told['lineage']} has begun since"
    cli.refuses(1, words, "restore", str(run), "--from-site", str(site))
    log = EventLog(run / "events.jsonl", "syncer")
    for told in "ef":
        log.emit("published", {"fragment": 0, "version": 1, "digest": told * 64})
    log.close()
    cli.refuses(2, "the evidence contradicts itself: version 1", "restore", str(run), "--from-site", str(site))
