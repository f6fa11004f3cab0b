"""``diloco standby``: its words, and a run that goes on after its syncer was killed."""

from __future__ import annotations

import json
import re
import shlex
import signal
from pathlib import Path
from urllib.request import urlopen

import pytest

from diloco.cli.main import main
from diloco.observe.text import standby_line
from tests.cli.conftest import Cli
from tests.loopback.cluster import eventually, free_port, serving
from tests.runs.processes import START_S, TINY, place_in, wait_for
from tests.syncer.test_standby import BOUND_S, a_toy
from tests.syncer.test_standby_alone import standing_by

pytestmark = pytest.mark.usefixtures("here")
FOLLOW = ["follow", *TINY, "run.name=otter", "cluster.syncer.listen=127.0.0.1:0"]


def test_what_an_operator_says_to_a_standby_and_to_a_syncer(tmp_path: Path, cli: Cli) -> None:
    toy = a_toy(tmp_path)
    with serving(toy) as (_, first, log):
        standing = standing_by(toy, first, 0)
        address = standing.start()
        try:
            log.wait_for("standby_follows", 1, BOUND_S)
            eventually(lambda: standing.standby.connected, BOUND_S, "it knows that it follows")
            assert cli.json("standby", "status", address)["primary"] == first
            for verb in (["standby", "status"], ["status"]):
                assert f"standby standby follows {first}  versions " in cli.out(*verb, address)
            cli.refuses(1, "is the syncer, not a standby", "standby", "status", first)
            cli.refuses(1, "this is the syncer, not a standby", "standby", "promote", first)
            cli.refuses(3, f"this is the standby of {first}: ask there", "standby", "detach", address)
            eventually(lambda: standing.standby.state() is not None, BOUND_S, "it has a state")
            assert main(["standby", "promote", address, "--lossy"]) == 0
            assert standing.promoted.is_set()
            assert standing.lossy
            assert "continues without a standby" in cli.out("standby", "detach", first)
        finally:
            warm = standing.wait(0.0)
            if warm is not None:
                warm.taken.close()
            standing.stop()
    assert main(["standby", "promote", f"127.0.0.1:{free_port()}"]) == 3


def test_a_standby_that_does_not_follow_shows_it() -> None:
    status = {"name": "iad", "following": False, "heard_seconds_ago": 9.4, "failed": "other bits", "versions": []}
    line = standby_line({**status, "primary": "fra:1", "epoch": 0, "turns_behind": 0})
    assert "standby iad DOES NOT FOLLOW (heard 9 s ago) fra:1  versions none yet" in line
    assert line.endswith("FAILED: other bits")
    trouble = {"trouble": "disk full: 3 MB are free", "failed": None, "primary": "fra:1", "epoch": 0, "turns_behind": 0}
    assert standby_line({**status, **trouble, "identity_complaints": ["tokens_file cannot be used"]}).endswith(
        "3 MB are free  tokens_file cannot be used"
    )
    assert standby_line({**status, **trouble}).endswith("0 turns to carry out  disk full: 3 MB are free")


@pytest.mark.slow
def test_a_run_goes_on_after_its_syncer_was_killed(tmp_path: Path) -> None:
    with place_in(tmp_path) as place:
        replication = ["cluster.replication.mode=sync", "cluster.replication.timeout_s=3"]
        syncer, first = place.syncer("otter", *replication, "run.seconds=20")
        second = f"127.0.0.1:{free_port()}"
        own = [f"cluster.standby.primary={first}", f"cluster.syncer.listen={second}", "run.seconds=20"]
        page = f"127.0.0.1:{free_port()}"
        watched = [*own, f"cluster.syncer.metrics={page}"]  # It learns how to replicate from the syncer.
        standby = place.start("standby", "standby", "follow", *TINY, "run.name=otter", *watched)
        alone = ["run.seconds=20", "site.index=0", "site.num_sites=1", "site.slowdown=4"]
        site = place.site("otter", f"{first},{second}", "site-a", *alone)
        wait_for(lambda: len(place.seen("otter", "syncer", "published")) >= 3, "versions", site.text)
        syncer.kill()
        code, said = place.run("standby", "promote", second)
        assert code == 0, said
        moved = tmp_path / "runs" / "otter" / "syncer.folder"
        wait_for(moved.is_file, "the record of where the run goes on", standby.text)
        wait_for(lambda: f"\nmetrics at http://{page}/metrics\n" in standby.text(), "the syncer's page", standby.text)
        with urlopen(f"http://{page}/metrics", timeout=START_S) as answer:
            assert b"\ndiloco_syncer_epoch 1." in answer.read()
        assert moved.read_text() == "standby"
        code, said = place.run("status", second, "--json")
        assert (code, json.loads(said)["replication"]["mode"]) == (0, "sync"), "the next standby can follow it"
        code, said = place.run("restore", "otter", "--from", "any")
        assert (code, "stop this run's syncer first" in said) == (1, True), said
        assert site.end() == 0, site.text()
        assert standby.end() == 0, standby.text()
        assert "run otter has finished; final version in runs/otter/standby/final" in standby.text()
        assert "the same command" not in standby.text()
        epochs = [event["epoch"] for event in place.seen("otter", "syncer", "syncer_started")]
        assert epochs == sorted(set(epochs))
        assert len(epochs) == 2
        syncers = {event["syncer"] for event in place.seen("otter", "site-a", "joined")}
        assert syncers == {first, second}
        begin = standby.text().index("`diloco syncer ") + 1
        command = shlex.split(standby.text()[begin : standby.text().index("` resumes it")])
        assert command[-1] == "cluster.replication.mode=sync"
        code, said = place.run(*command[1:])
        assert (code, "run otter has finished; final version in runs/otter/standby/final" in said) == (0, True), said


def test_ctrl_c_while_it_follows(tmp_path: Path) -> None:
    with place_in(tmp_path) as place:
        primary = f"cluster.standby.primary=127.0.0.1:{free_port()}"
        standby = place.start("standby", "standby", *FOLLOW, primary, "cluster.syncer.metrics=127.0.0.1:0")
        wait_for(lambda: "it takes over on the command" in standby.text(), "its first words", standby.text)
        wait_for(lambda: "metrics at http" in standby.text(), "the address of its page", standby.text)
        (page,) = re.findall(r"metrics at (http://\S+), and those of the syncer once", standby.text())
        with urlopen(page, timeout=START_S) as answer:
            assert b"\ndiloco_standby_following 0.0\n" in answer.read()
        standby.signal(signal.SIGINT)
        assert standby.end() == 75
        assert "the same command resumes" in standby.text()


@pytest.mark.slow
def test_it_ends_when_the_run_has_finished_and_its_syncer_has_stopped(tmp_path: Path) -> None:
    with place_in(tmp_path) as place:
        budget = ["cluster.replication.mode=sync", "run.seconds=6"]
        syncer, first = place.syncer("otter", *budget)
        primary = f"cluster.standby.primary={first}"
        standby = place.start("standby", "standby", *FOLLOW, primary, *budget)
        site = place.site("otter", first, "site-a", "run.seconds=6", "site.index=0", "site.num_sites=1")
        for verb in (site, syncer, standby):
            assert verb.end() == 0, verb.text()
        assert standby.text().endswith("its syncer has stopped: there is nothing to stand by for\n")
