"""A syncer and sites as the processes that a user starts, over real gRPC on loopback."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco.runs.process import descendants
from tests.loopback.upgrading import SITES, Upgrade
from tests.runs.processes import ROOT, TINY, Place, Verb, all_end, balanced, wait_for
from tests.runs.test_supervise import alive

MACHINES_BOUND_S = 120.0


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
    assert len(wrong.text().splitlines()) == 1, wrong.text()
    assert "outer.lr is 0.7 in run pair and 0.1 here: leave that setting out" in wrong.text()
    all_end(*sites, syncer)

    for name in formats:
        assert [event["products"] for event in place.seen("pair", name, "number_format")] == [formats[name]]
        (done,) = place.seen("pair", name, "site_done")
        balanced(done)
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
    all_end(follower, again)
    scores = place.seen("pair", "eval", "eval")
    assert [score["whole"] for score in scores] == [False] * (len(scores) - 1) + [True]
    assert scores[-1]["versions"] == [len(published)]
    assert len(scores) > 1
    assert float(str(scores[-1]["val_loss"])) < 5.0


@pytest.mark.slow
def test_a_site_of_four_ranks_that_leaves_and_goes_on_as_two_loses_no_token(place: Place) -> None:
    """Each rank holds a part of the model, and owns fragments; the other site is a single process."""
    settings = ["run.seconds=1000", "outer.num_fragments=4"]
    syncer, address = place.syncer("ranks", *settings)
    alone = place.site("ranks", address, "site-b", *settings, "site.slowdown=4")
    sites = []
    for ranks in (4, 2):
        adopted = len(place.seen("ranks", "site-a", "adopted"))
        own = ["site.parallel=fsdp", f"site.nproc={ranks}"]
        sites.append(place.site("ranks", address, "site-a", *settings, *own))
        more = lambda adopted=adopted: len(place.seen("ranks", "site-a", "adopted")) >= adopted + 4  # noqa: E731
        wait_for(more, "versions", sites[-1].text, MACHINES_BOUND_S)
        leaves = sites[-1] if ranks == 4 else syncer
        leaves.signal(signal.SIGTERM)
        all_end(leaves, code=75)
    all_end(*sites, alone, code=75)
    left, done = place.seen("ranks", "site-a", "site_done")
    for each in (left, done, *place.seen("ranks", "site-b", "site_done")):
        assert balanced(each)["tokens_lost"] == 0
    sent = {event["fragment"] for event in place.seen("ranks", "site-a", "pushed")}
    assert sent == {0, 1, 2, 3}, "those of all owners are told by rank 0"
    assert not place.seen("ranks", "site-a", "ranks_compared"), "of parts no two ranks have the same"


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
    balanced(done)


# --- A site of two machines ------------------------------------------------------------------------------------------

SETTINGS = ["outer.num_fragments=2", "inner.checkpoint_every_steps=10", "run.seconds=1000"]


def machine(place: Place, address: str, node_rank: int) -> Verb:
    several = ["site.nodes=2", f"site.node_rank={node_rank}", "site.rendezvous=127.0.0.1:0", "site.parallel=fsdp"]
    return place.site("machines", address, "site-a", *SETTINGS, *several)


def ranks_of(verb: Verb) -> list[int]:
    """The ranks that a machine runs: what torchrun has started."""
    found = []
    for pid in descendants(verb.process.pid):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):  # It has ended since.
            continue
        if b"diloco.runs.site_rank" in words and b"torch.distributed.run" not in words:
            found.append(pid)
    return found


def count(place: Place, what: str) -> int:
    return len(place.seen("machines", "site-a", what))


@pytest.mark.slow
def test_a_lost_rank_is_a_new_start_of_all_machines_and_a_lost_machine_is_waited_for(place: Place) -> None:
    _, address = place.syncer("machines", *SETTINGS)
    second, first = (machine(place, address, node_rank) for node_rank in (1, 0))

    def waits(condition: Callable[[], object], what: str) -> None:
        wait_for(condition, what, first.text, MACHINES_BOUND_S)

    waits(lambda: count(place, "checkpoint") >= 2, "checkpoints")
    (rank,) = ranks_of(second)
    os.kill(rank, signal.SIGKILL)
    waits(lambda: count(place, "joined") >= 2, "the return")
    # Rank 0 notices it as well, and either machine's ranks may be the first to have ended.
    assert "ended with code 1" in first.text()
    assert "all ranks are started again" in first.text()
    second.kill()
    waits(lambda: "waits for machine 1 of 2, at most 600 s" in first.text(), "the wait")
    second = machine(place, address, 1)
    waits(lambda: count(place, "joined") >= 3, "the return")
    assert count(place, "checkpoint_read") >= 1
    versions = len(place.seen("machines", "syncer", "published"))
    waits(lambda: len(place.seen("machines", "syncer", "published")) > versions + 1, "versions")
    second.signal(signal.SIGTERM)  # Each machine can be asked to stop.
    all_end(first, second, code=75)
    (done,) = place.seen("machines", "site-a", "site_done")
    balanced(done)


@pytest.mark.slow
def test_syncer_and_sites_are_replaced_one_by_one_and_nothing_is_lost(place: Place) -> None:
    told = Upgrade(place, ROOT, ROOT).run()
    assert told["stages"] == 3 + len(SITES)
    assert told["drain_s"] < 20 + 20, "promise P10 says 20 s; the machine may be busy"
    assert all(told[site]["merged"] > 0 for site in SITES)
