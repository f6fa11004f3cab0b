"""What a site does again after a kill -9, in lock-step with a checkpoint before each update."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from diloco.learner.agent import Finished
from diloco.learner.seal import Outbox
from diloco.sync.events import Outcome
from diloco.wire.client import SyncClient
from tests.loopback.audit import History, audit
from tests.loopback.cluster import Process, SiteThread, serving
from tests.loopback.toy import RUN, Toy

BOUND_S = 60.0
ROUNDS = 5
Result = tuple[History, list[str]]


def the_toy(folder: Path) -> Toy:
    everybody = {"quorum": "all", "quorum_min": 2, "grace": "fixed", "grace_ns": 0, "weights": "uniform"}
    outer = {**everybody, "num_fragments": 2, "token_budget": ROUNDS * 2 * 6 * 10, "site_timeout_ns": 600 * 10**9}
    every: dict[str, object] = {"inner_steps": 6, "lock_step": True, "snapshot_every": 1_000_000}
    optimizer = {"kind": "nesterov", "lr": 0.7, "momentum": 0.9}
    return Toy(folder=str(folder), seed=5, outer=outer, optimizer=optimizer, **every)  # type: ignore[arg-type]


def whole_run(folder: Path, deaths: list[tuple[str, int]]) -> tuple[History, list[str], dict[tuple[int, int], str]]:
    """The history, the digests of the final versions, and those of the updates that a killed site had sealed."""
    toy, logs, sealed = the_toy(folder), [], {}
    with serving(toy) as (syncer, address, log), ExitStack() as alive:
        other = alive.enter_context(SiteThread(toy, "b", address))
        for death in [*deaths, None]:
            life = alive.enter_context(Process("site", toy, death, site="a", address=address, checkpoint_every=3))
            logs.append(life.log)
            assert life.wait(BOUND_S) == (-9 if death else 0), life.errors
            if death is not None:
                sealed |= Outbox(folder / "a" / "outbox").digests()
        (event,) = logs[-1].of("finished")
        finished = {"b": other.join(BOUND_S), "a": Finished("finished", "", event["ledger"])}  # type: ignore[arg-type]
    told = audit(toy, [log], {"a": logs, "b": [other.log]}, finished)
    return told, [values.digest for values in syncer.holdings.values], sealed


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Result:
    told, final, _ = whole_run(tmp_path_factory.mktemp("twin"), [])
    return told, final


DEATHS = {
    "before it is acknowledged": [("outbox.put", 12), ("push", 3)],
    "after it was acknowledged": [("pushed", 2), ("adopt", 3), ("checkpoint.rename", 2)],
}


@pytest.mark.slow
@pytest.mark.parametrize("when", DEATHS)
def test_invariant_11b_what_is_done_again_is_the_same_to_the_bit(tmp_path: Path, twin: Result, when: str) -> None:
    told, final, sealed = whole_run(tmp_path, DEATHS[when])
    assert told.accepted == twin[0].accepted
    assert told.published == twin[0].published
    assert final == twin[1]
    for (fragment, sequence), digest in sealed.items():
        assert told.accepted["a", fragment, sequence] == digest, "what was done again has another content"
    assert sealed, "no site was killed with an update in its outbox"


def test_invariant_11b_what_was_sealed_before_the_kill_is_answered_as_a_duplicate(tmp_path: Path) -> None:
    toy = the_toy(tmp_path)
    with serving(toy) as (_, address, _), ExitStack() as alive:
        alive.enter_context(SiteThread(toy, "b", address))
        mine = {"site": "a", "address": address, "checkpoint_every": 3}
        with Process("site", toy, ("push", 3), **mine) as killed:
            assert killed.wait(BOUND_S) == -9
        outbox = Outbox(tmp_path / "a" / "outbox")
        ((fragment, sequence),) = outbox.digests()
        header, payload = outbox.get(fragment, sequence, 1)
        again = alive.enter_context(Process("site", toy, None, **mine))
        again.log.wait_for("pushed", 1, BOUND_S, where=lambda event: event["sequence"] == sequence)
        with SyncClient(address, "a", RUN) as client:
            answer = client.push(header, bytes(payload))
        assert answer.outcome is Outcome.DUPLICATE
        assert again.wait(BOUND_S) == 0
