"""A site whose ranks each hold a part and own fragments comes back as another number of ranks, and ranks may be killed:
the books balance, and no rank ever has the whole model's versions and updates.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from torch import Tensor

from diloco.inner import checkpoint
from diloco.inner.holding import Holding
from diloco.inner.parallel import SiteGroup
from diloco.inner.trainer import StepInfo
from diloco.learner.agent import Agent, Finished
from diloco.learner.exchange import Follower, Owner
from diloco.learner.ranks import deal
from diloco.outer.fragments import named_parameters_once
from diloco.runs.process import descendants
from diloco.wire.channel import SYNC_SERVICE
from tests.hunts import flooding
from tests.hunts.layouts import train
from tests.layouts import LAYOUTS, SHAPES, Odd, Started, fill, started, whole
from tests.loopback.audit import audit
from tests.loopback.cluster import Log, Process, free_port, serving
from tests.loopback.test_hostile import join
from tests.loopback.test_real_processes import balanced
from tests.loopback.toy import TOKENS_PER_STEP, Toy
from tests.runs.processes import Place, Verb, place_in, wait_for

BOUND_S = 90.0
EVERY = 5
NEVER = 1 << 60
NUMEL = sum(torch.Size(shape).numel() for shape in SHAPES.values())


def saved(folder: Path) -> tuple[str, list[checkpoint.Checkpoint]]:
    """The newest step of which every rank that there was has written its part."""
    ranks = sorted(folder.glob("rank-*"))
    common = set.intersection(*({path.name for path in rank.glob("step-*")} for rank in ranks)) if ranks else set()
    if not common:
        return "", []
    return max(common), [checkpoint.load(rank / max(common)) for rank in ranks if (rank / max(common)).is_dir()]


class Site:
    """One rank of it, with a checkpoint of its own, as a trainer's ranks have one together."""

    def __init__(self, group: SiteGroup, tell: Callable[[Any], None], toy: Toy, site: str, address: str, layout: str):
        self.group, self.tell, self.site = group, tell, site
        self.parameters = named_parameters_once(LAYOUTS[layout](Odd(), group.world))
        self.folder = Path(toy.folder) / site / "checkpoints"
        self.steps, self.redo = 0, None
        tensors, meta = self._restored()
        holding, fragments = Holding(self.parameters, group), toy.layout()
        self.dealt = deal(fragments, holding)
        self.share = sum(fragments.fragments[index].numel for index in self.dealt.of(group.rank))
        self.outer: Agent | Follower
        self.owned: list[Owner] = []
        if group.is_first:
            emit = lambda what, fields: tell({"what": what, **fields})  # noqa: E731
            both = (tensors, meta) if meta is not None else None
            mine: Any = {"redo": self.redo, "holding": holding, "dealt": self.dealt}
            self.outer = toy.agent(site, address, {}, emit, both, group, **mine)
        else:
            options, client = toy.agent_options(site), toy.sync_client(site, address)
            ways = (client, toy.run_id, site, tensors)
            self.owned = (
                [Owner(options, toy.adopt, fragments, holding, self.dealt, *ways)] if self.dealt.channels else []
            )
            self.outer = Follower([fragments], holding, toy.adopt, self.owned)

    def _restored(self) -> tuple[dict[str, Tensor], Any]:
        name, parts = saved(self.folder)
        self.group.barrier()  # All have seen it before one writes.
        if not name:
            fill(self.parameters, {each: torch.full(shape, float("nan")) for each, shape in SHAPES.items()})
            return {}, None
        fill(self.parameters, parts[0].part("parameters"))
        facts = parts[0].meta
        last = StepInfo(**facts["last"])
        self.steps, self.redo = last.step, None if facts["done"] else last
        return {each: value for part in parts for each, value in part.part("agent").items()}, facts["agent"]

    def save(self, info: StepInfo, done: bool) -> None:
        values = whole(self.parameters)
        tensors, meta = self.outer.state()
        told = {"agent": meta, "last": asdict(info), "done": done}
        named = {f"agent/{name}": value.clone() for name, value in tensors.items()} | {"own/rank": torch.ones(1)}
        if self.group.is_first:
            named |= {f"parameters/{name}": value.clone() for name, value in values.items()}
        name = f"step-{info.step:08d}" + ("-end" if done else "")
        checkpoint.save(self.folder / f"rank-{self.group.rank}", name, named, told, keep=2)
        self.tell(
            {
                "what": "saved",
                "step": info.step,
                "bytes": sum(value.nbytes for value in tensors.values()),
                "share": self.share,
            }
        )

    def run(self, leave_at: int) -> None:
        cursor = self.outer.start() if isinstance(self.outer, Agent) else self.outer.follow()
        self.steps = max(self.steps, self.group.broadcast_small([cursor or 0])[0])
        stop = self.redo is not None and self.outer.after_step(self.redo).stop
        while not stop:
            self.steps += 1
            train(self.parameters, self.site, self.steps)
            info = StepInfo(self.steps, 1.0, TOKENS_PER_STEP, 0, 1_000_000, self.steps, 1.0, 0.1, applied=True)
            if self.steps % EVERY == 0:
                self.save(info, done=False)
            if self.steps == leave_at and isinstance(self.outer, Agent):
                self.outer.leave()
            stop = self.outer.after_step(info).stop
            self.tell({"what": "trained", "step": self.steps})
            if stop:
                self.save(info, done=True)
        finished = self.outer.finish()
        self.tell({"what": "finished", **(asdict(finished) if finished is not None else {})})


def site_rank(
    group: SiteGroup, tell: Callable[[Any], None], toy: Toy, site: str, address: str, layout: str, leave_at: int
) -> None:
    Site(group, tell, toy, site, address, layout).run(leave_at)


def listened(ranks: list[Started], logs: list[Log], until: Callable[[], bool] = lambda: False) -> None:
    """Hear what the ranks say until all have ended, or ``until``; errors are for whoever looks."""
    left = {rank.end: log for rank, log in zip(ranks, logs, strict=True)}
    while left and not until():
        ready = wait(list(left), BOUND_S)
        assert ready, f"nobody says anything for {BOUND_S:g} s"
        for end in ready:
            try:
                said = end.recv()  # type: ignore[union-attr]
            except (EOFError, OSError):
                del left[end]  # type: ignore[arg-type]
                continue
            left[end].emit(said.pop("what", "error"), said)  # type: ignore[index]


def toy_of(folder: Path, steps: int, sites: int = 1) -> Toy:
    return Toy(
        folder=str(folder),
        shapes=tuple(SHAPES.items()),
        inner_steps=4,
        outer={"num_fragments": 4, "grace": "fixed", "grace_ns": 0, "token_budget": steps * TOKENS_PER_STEP * sites},
        snapshot_every=10_000,
    )


def done_by(logs: list[Log]) -> Finished:
    (event,) = logs[0].of("finished")
    return Finished(**{name: value for name, value in event.items() if name != "what"})  # type: ignore[arg-type]


def lost(ledger: Mapping[str, int]) -> int:
    assert ledger["processed"] == sum(count for name, count in ledger.items() if name != "processed")
    return ledger["lost"]


@pytest.mark.slow
def test_a_site_of_four_ranks_that_stops_and_goes_on_as_two_loses_no_token(tmp_path: Path) -> None:
    toy = toy_of(tmp_path, 40)
    with serving(toy) as (_, address, syncer_log):
        four, two = [Log() for _ in range(4)], [Log() for _ in range(2)]
        with started(site_rank, 4, toy, "a", address, "fsdp", 18) as ranks:
            listened(ranks, four)
        assert not any(log.of("error") for log in four), [log.of("error") for log in four]
        first = done_by(four)
        assert (first.ending, lost(first.ledger)) == ("left", 0)
        with started(site_rank, 2, toy, "a", address, "fsdp", NEVER) as ranks:
            listened(ranks, two)
        assert not any(log.of("error") for log in two), [log.of("error") for log in two]
    second = done_by(two)
    assert (second.ending, lost(second.ledger)) == ("finished", 0)
    told = audit(toy, [syncer_log], {"a": [four[0], two[0]]}, {"a": second})
    assert min(version for _, version in told.published) == 1
    sent = [{event["fragment"] for event in log.of("pushed")} for log in (four[0], two[0])]
    assert sent == [{0, 1, 2, 3}] * 2, "those of all owners are told by rank 0"
    # Of a fragment a rank has a base and at most two updates in flight, and of what others own nothing.
    for logs, most in ((four, 0.4), (two, 0.6)):
        shares = [int(str(log.of("saved")[-1]["share"])) for log in logs]
        assert sum(shares) == NUMEL
        assert max(shares) < most * NUMEL
        for log, share in zip(logs, shares, strict=True):
            assert all(0 < int(str(event["bytes"])) <= 3 * 4 * share for event in log.of("saved"))


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_that_is_killed_ends_the_site_in_words_and_it_comes_back_as_two(tmp_path: Path, victim: int) -> None:
    toy = toy_of(tmp_path, 60)
    with serving(toy) as (_, address, syncer_log):
        before, after = [Log() for _ in range(4)], [Log() for _ in range(2)]
        with started(site_rank, 4, toy, "a", address, "fsdp", NEVER) as ranks:
            listened(ranks, before, until=lambda: len(before[0].of("trained")) >= 2 * EVERY + 2)
            ranks[victim].process.kill()
            listened(ranks, before)
            assert ranks[victim].process.exitcode in (None, -signal.SIGKILL)
        assert all(log.of("error") for rank, log in enumerate(before) if rank != victim), "all have ended, in words"
        with started(site_rank, 2, toy, "a", address, "fsdp", NEVER) as ranks:
            listened(ranks, after)
        assert not any(log.of("error") for log in after), [log.of("error") for log in after]
    done = done_by(after)
    assert done.ending == "finished"
    trained = len(before[0].of("trained")) * TOKENS_PER_STEP
    assert 0 <= lost(done.ledger) <= trained
    audit(toy, [syncer_log], {"a": [before[0], after[0]]}, {})  # The ledger is in whole tokens, of quarters.


# --- A site of two machines ------------------------------------------------------------------------------------------

MACHINES_BOUND_S = 120.0
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
    wait_for(lambda: count(place, "checkpoint") >= 2, "checkpoints", second.text, MACHINES_BOUND_S)
    (rank,) = ranks_of(second)
    os.kill(rank, signal.SIGKILL)
    wait_for(lambda: count(place, "joined") >= 2, "the return", first.text, MACHINES_BOUND_S)
    versions = len(place.seen("machines", "syncer", "published"))
    wait_for(
        lambda: len(place.seen("machines", "syncer", "published")) > versions + 1,
        "versions",
        first.text,
        MACHINES_BOUND_S,
    )
    first.signal(signal.SIGTERM)
    assert [first.end(MACHINES_BOUND_S), second.end(MACHINES_BOUND_S)] == [75, 75], first.text()
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
    assert [first.end(MACHINES_BOUND_S), second.end(MACHINES_BOUND_S)] == [2, 2], first.text()
    for verb in (first, second):
        assert "rank 1, on " in verb.text()
        assert ": data: path is 'nowhere': there is no such file or folder" in verb.text()
        assert "started again" not in verb.text()


@pytest.mark.slow
def test_a_machine_that_is_lost_is_waited_for_and_each_can_be_asked_to_stop(place: Place) -> None:
    _, address = place.syncer("machines", *SETTINGS)
    first, second = (machine(place, address, node_rank) for node_rank in (0, 1))
    wait_for(lambda: count(place, "checkpoint") >= 2, "checkpoints", first.text, MACHINES_BOUND_S)
    second.kill()
    wait_for(
        lambda: "waits for machine 1 of 2, at most 600 s" in first.text(), "the wait", first.text, MACHINES_BOUND_S
    )
    second = machine(place, address, 1)
    wait_for(lambda: count(place, "joined") >= 2, "the return", first.text, MACHINES_BOUND_S)
    steps = count(place, "step")
    wait_for(lambda: count(place, "step") > steps + 5, "steps after it", first.text, MACHINES_BOUND_S)
    second.signal(signal.SIGTERM)
    assert [first.end(MACHINES_BOUND_S), second.end(MACHINES_BOUND_S)] == [75, 75], first.text()
    (done,) = place.seen("machines", "site-a", "site_done")
    assert balanced(done)


# --- Strangers who open as many connections as they can do not keep a syncer from merging, nor from answering --------

PEERS = 1007
ROUNDS = 5
JOINS = 4000
DESCRIPTORS_BOUND_S = 60.0


@pytest.mark.slow
@pytest.mark.parametrize("files", [256, 1024])
def test_a_thousand_idle_connections_leave_descriptors_for_merges_and_for_an_operator(
    files: int, tmp_path: Path
) -> None:
    port = free_port()
    with place_in(tmp_path) as place, contextlib.ExitStack() as stack:
        place.open_files = (files, files)
        syncer, address = place.syncer("crowded", f"cluster.syncer.metrics={port}")
        place.open_files = None
        place.site("crowded", address, "site-a", "site.num_sites=1")

        def merged(count: int) -> bool:
            return len(place.seen("crowded", "syncer", "published")) >= count

        wait_for(lambda: merged(2), "the first versions", syncer.text)
        for target, dial in ((address, flooding.hello), (f"127.0.0.1:{port}", flooding.dial)):
            peers = [stack.enter_context(dial(target)) for _ in range(PEERS)]
            known = len(place.seen("crowded", "syncer", "published"))
            wait_for(lambda known=known: merged(known + ROUNDS), "merges go on", syncer.text)

            def few(peers: list[socket.socket] = peers) -> bool:
                return sum(not flooding.is_over(each) for each in peers) <= files * 3 // 8

            wait_for(few, "the others are hung up on", syncer.text)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
            assert b"diloco_connections_hung_up_total" in page.read()
        code, text = place.run("status", address)
        assert code == 0, text

        def said() -> list[str]:
            notes = [event for event in place.seen("crowded", "syncer", "note") if event["note"] == "crowded"]
            return [str(event["why"]).partition(" so far")[0] for event in notes]

        told = ["connections closed", "cluster.syncer.metrics: connections closed"]
        wait_for(lambda: set(told) <= set(said()), "it is said", lambda: str(said()))
        assert len(said()) <= 4, "once a minute for each port"


@pytest.mark.slow
def test_four_thousand_joins_at_once_are_all_answered(tmp_path: Path) -> None:
    """Each on a connection of its own: by a status where there is a place for it, else by its end."""
    toy, over = Toy(folder=str(tmp_path)), threading.Semaphore(0)
    codes: Counter[str] = Counter()

    def answered(call: grpc.Future) -> None:
        codes[call.code().name] += 1
        over.release()

    with Process("syncer", toy, files=1024) as syncer, contextlib.ExitStack() as stack:
        address = str(syncer.log.wait_for("listening", 1, DESCRIPTORS_BOUND_S)[0]["address"])
        site = stack.enter_context(Process("site", toy, site="a", address=address, step_s=0.02))
        site.log.wait_for("adopted", 2, DESCRIPTORS_BOUND_S)
        for number in range(JOINS):
            channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
            stack.callback(channel.close)
            call = channel.unary_unary(f"/{SYNC_SERVICE}/Join")
            call.future(join(site_id=f"s{number}"), timeout=DESCRIPTORS_BOUND_S).add_done_callback(answered)
        assert all(over.acquire(timeout=DESCRIPTORS_BOUND_S) for _ in range(JOINS)), codes
        assert set(codes) <= {"OK", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "CANCELLED"}, codes
        site.log.wait_for("adopted", len(site.log.of("adopted")) + 3, DESCRIPTORS_BOUND_S)
