"""A syncer and sites as the processes that a user starts, over real gRPC on loopback."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.observe.eventlog import Event
from tests.runs.processes import TINY, Place, place_in, wait_for


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with place_in(tmp_path) as made:
        yield made


def balanced(done: Event) -> bool:
    ledger = done["ledger"]
    assert isinstance(ledger, dict)
    parts = sum(count for name, count in ledger.items() if name != "tokens_processed")
    return bool(ledger["tokens_processed"] == parts)


def one_line(text: str) -> str:
    lines = text.strip().splitlines()
    assert len(lines) == 1, text
    return lines[0]


@pytest.mark.slow
def test_a_syncer_and_two_sites_train_to_a_budget_and_tell_a_stranger_what_differs(place: Place) -> None:
    settings = ["run.tokens=30000", "outer.quorum=2"]
    syncer, address = place.syncer("pair", *settings)
    # Who means another run is told so before it trains a step.
    wrong = place.site("pair", address, "site-c", *settings, "outer.lr=0.1")
    # Each multiplies in the format that its machine is fast at; it is one run all the same.
    formats = {"site-a": "fp32", "site-b": "bf16"}
    sites = [place.site("pair", address, name, *settings, f"inner.precision={formats[name]}") for name in formats]
    status = place.start("status", "status", address, "--json")
    follower = place.start("follower", "eval", "runs/pair", "--follow", "--every", "0.5")
    assert status.end() == 0, status.text()
    assert "version" in json.loads(status.text())["fragments"][0]
    assert wrong.end() == 4, wrong.text()
    assert "outer.lr is 0.7 in run pair and 0.1 here: leave that setting out" in one_line(wrong.text())
    assert [site.end() for site in sites] == [0, 0], sites[0].text() + sites[1].text()
    assert syncer.end() == 0, syncer.text()

    for name in formats:
        assert [event["products"] for event in place.seen("pair", name, "number_format")] == [formats[name]]
        (done,) = place.seen("pair", name, "site_done")
        assert balanced(done)
        assert "loss:" in (place.folder / "runs/pair/sites" / name / "site.log").read_text()
    published = place.seen("pair", "syncer", "published")
    assert [event["version"] for event in published] == list(range(1, len(published) + 1))
    losses = [event["loss"] for event in place.seen("pair", "site-a", "step")]
    assert float(str(losses[-1])) < float(str(losses[0])) - 1, losses

    # The same command again finds a finished run, and the final version is there to be looked at.
    again = place.start("again", "syncer", *TINY, *settings, "run.name=pair", "cluster.syncer.listen=127.0.0.1:0")
    code, text = place.run("journal", "show", "runs/pair")
    assert code == 0, text
    assert "OuterStepDone" in text
    assert follower.end() == 0, follower.text()
    scores = place.seen("pair", "eval", "eval")
    assert [score["whole"] for score in scores] == [False] * (len(scores) - 1) + [True]
    assert scores[-1]["versions"] == [len(published)]
    assert len(scores) > 1
    assert float(str(scores[-1]["val_loss"])) < 5.0
    assert again.end() == 0, again.text()


@pytest.mark.slow
def test_a_killed_site_goes_on_and_ctrl_c_leaves_in_order(place: Place) -> None:
    syncer, address = place.syncer("again")
    site = place.site("again", address, "site-a")
    wait_for(lambda: len(place.seen("again", "site-a", "checkpoint")) >= 3, "checkpoints", site.text)
    site.kill()
    site = place.site("again", address, "site-a")
    wait_for(lambda: len(place.seen("again", "site-a", "joined")) == 2, "a second join", site.text)
    (resumed,) = place.seen("again", "site-a", "checkpoint_read")
    assert int(str(resumed["step"])) >= 20
    wait_for(lambda: place.seen("again", "site-a", "resumed"), "a word about what was lost", site.text)
    (told,) = place.seen("again", "site-a", "resumed")
    assert int(str(told["tokens_lost"])) >= 0
    steps = len(place.seen("again", "site-a", "step"))
    wait_for(lambda: len(place.seen("again", "site-a", "step")) > steps + 10, "steps after the return", site.text)
    site.signal(signal.SIGINT)
    assert site.end() == 75, site.text()
    (done,) = place.seen("again", "site-a", "site_done")
    assert balanced(done)
    assert "the same command resumes" in site.text()

    syncer.signal(signal.SIGTERM)
    assert syncer.end() == 75, syncer.text()
    versions = len(place.seen("again", "syncer", "published"))
    assert versions >= 1
    syncer, _ = place.syncer("again")
    wait_for(lambda: len(place.seen("again", "syncer", "syncer_started")) == 2, "a second start", syncer.text)
    started = place.seen("again", "syncer", "syncer_started")[1]
    assert started["epoch"] == 2
    assert started["versions"] == [versions]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_of_torchrun_join_the_run_of_a_single_process(place: Place, parallel: str) -> None:
    settings = ["run.tokens=30000", "outer.quorum=2"]
    syncer, address = place.syncer("ranks", *settings)
    both = place.site("ranks", address, "site-a", *settings, "site.nproc=2", f"site.parallel={parallel}")
    alone = place.site("ranks", address, "site-b", *settings)
    assert both.end(90) == 0, both.text()
    assert alone.end() == 0, alone.text()
    assert syncer.end() == 0, syncer.text()
    compared = place.seen("ranks", "site-a", "ranks_compared")
    assert len(compared) == (parallel == "ddp")  # Of parts no two ranks have the same.
    for each in compared:
        digests = each["digests"]
        assert isinstance(digests, list)
        assert len(digests) == 2
        assert len(set(digests)) == 1
    assert place.seen("ranks", "site-a", "adopted")
    for name in ("site-a", "site-b"):
        (done,) = place.seen("ranks", name, "site_done")
        assert balanced(done)


@pytest.mark.slow
def test_a_request_to_stop_reaches_the_ranks_and_a_kill_does_not_leave_them_behind(place: Place) -> None:
    _, address = place.syncer("stop")
    asked = place.site("stop", address, "site-a", "site.nproc=2")
    killed = place.site("stop", address, "site-b", "site.nproc=2")
    for site in (asked, killed):
        wait_for(lambda site=site: len(place.seen("stop", site.name, "step")) > 10, "steps", site.text)  # type: ignore[misc]
    ranks = [int((place.folder / f"runs/stop/sites/{name}/rank-0.pid").read_text()) for name in ("site-a", "site-b")]
    os.kill(killed.process.pid, signal.SIGKILL)
    asked.signal(signal.SIGTERM)
    assert asked.end() == 75, asked.text()
    wait_for(lambda: not any(alive(rank) for rank in ranks), "the ranks to end with their sites", bound_s=10)
    (done,) = place.seen("stop", "site-a", "site_done")
    assert balanced(done)


@pytest.mark.slow
def test_twice_is_at_once(place: Place) -> None:
    syncer, address = place.syncer("twice")
    site = place.site("twice", address, "site-a", "site.finish_timeout_s=60")
    wait_for(lambda: place.seen("twice", "site-a", "step"), "a step", site.text)
    syncer.signal(signal.SIGSTOP)  # nobody answers, so that one request would take its time
    site.signal(signal.SIGINT)
    wait_for(lambda: "again: stop at once" in site.text(), "a word about the first request", site.text)
    time.sleep(0.5)
    assert site.process.poll() is None, site.text()
    site.signal(signal.SIGINT)
    assert site.end(5) == 1


@pytest.mark.slow
def test_a_syncer_that_is_not_there_is_said_once(place: Place) -> None:
    site = place.site("none", "127.0.0.1:1", "site-a", "site.join_timeout_s=0.1")
    status = place.start("status", "status", "127.0.0.1:1")
    assert status.end() == 3
    assert "the syncer at 127.0.0.1:1 does not answer" in one_line(status.text())
    assert site.end() == 3
    assert "cannot reach the syncer at 127.0.0.1:1" in one_line(site.text())


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
