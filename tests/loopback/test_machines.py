"""A site of two machines: two `diloco site` processes that meet, over loopback, with a real syncer."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.runs.process import descendants
from tests.loopback.test_real_processes import balanced
from tests.runs.processes import Place, Verb, place_in, wait_for

BOUND_S = 120.0
SETTINGS = ["outer.num_fragments=2", "inner.checkpoint_every_steps=10", "run.seconds=1000"]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with place_in(tmp_path) as made:
        yield made


def machine(place: Place, address: str, node_rank: int, *settings: str) -> Verb:
    several = ["site.nodes=2", f"site.node_rank={node_rank}", "site.rendezvous=127.0.0.1:0", "site.parallel=fsdp"]
    name = f"machine-{node_rank}-{len(place.verbs)}"
    verb = place.site("machines", address, "site-a", *SETTINGS, *several, *settings)
    verb.name = name
    return verb


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
def test_a_rank_lost_on_the_second_machine_is_a_new_start_of_all(place: Place) -> None:
    _, address = place.syncer("machines", *SETTINGS)
    second, first = (machine(place, address, node_rank) for node_rank in (1, 0))
    wait_for(lambda: count(place, "checkpoint") >= 2, "checkpoints", second.text, BOUND_S)
    (rank,) = ranks_of(second)
    os.kill(rank, signal.SIGKILL)
    wait_for(lambda: count(place, "joined") >= 2, "the return", first.text, BOUND_S)
    versions = len(place.seen("machines", "syncer", "published"))
    wait_for(lambda: len(place.seen("machines", "syncer", "published")) > versions + 1, "versions", first.text, BOUND_S)
    first.signal(signal.SIGTERM)
    assert [first.end(BOUND_S), second.end(BOUND_S)] == [75, 75], first.text()
    (done,) = place.seen("machines", "site-a", "site_done")
    assert balanced(done)
    assert count(place, "checkpoint_read") >= 1
    # Rank 0 notices it as well, and either machine's ranks may be the first to have ended.
    assert "ended with code 1" in first.text()
    assert "all ranks are started again" in first.text()


@pytest.mark.slow
def test_a_mistake_on_the_second_machine_alone_ends_the_site_with_its_reason(place: Place) -> None:
    own = ["data.path=nowhere", "data.cache=elsewhere"]
    _, address = place.syncer("machines", *SETTINGS)
    second, first = (machine(place, address, node_rank, *own[: 2 * node_rank]) for node_rank in (1, 0))
    assert [first.end(BOUND_S), second.end(BOUND_S)] == [2, 2], first.text()
    for verb in (first, second):
        assert "rank 1, on " in verb.text()
        assert ": data: path is 'nowhere': there is no such file or folder" in verb.text()
        assert "started again" not in verb.text()


@pytest.mark.slow
def test_a_machine_that_is_lost_is_waited_for_and_each_can_be_asked_to_stop(place: Place) -> None:
    _, address = place.syncer("machines", *SETTINGS)
    first, second = (machine(place, address, node_rank) for node_rank in (0, 1))
    wait_for(lambda: count(place, "checkpoint") >= 2, "checkpoints", first.text, BOUND_S)
    second.kill()
    wait_for(lambda: "waits for machine 1 of 2, at most 600 s" in first.text(), "the wait", first.text, BOUND_S)
    second = machine(place, address, 1)
    wait_for(lambda: count(place, "joined") >= 2, "the return", first.text, BOUND_S)
    steps = count(place, "step")
    wait_for(lambda: count(place, "step") > steps + 5, "steps after it", first.text, BOUND_S)
    second.signal(signal.SIGTERM)
    assert [first.end(BOUND_S), second.end(BOUND_S)] == [75, 75], first.text()
    (done,) = place.seen("machines", "site-a", "site_done")
    assert balanced(done)
