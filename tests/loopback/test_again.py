"""What a site does again after a kill -9, in lock-step with a checkpoint before each update."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from diloco.durable import locked
from diloco.learner.agent import Finished
from diloco.learner.seal import Outbox
from diloco.sync.events import Outcome
from diloco.sync.rounds import Selection
from diloco.syncer.replaying import Rules
from diloco.syncer.restoring import Kept, Known, Restore
from diloco.syncer.snapshots import Image
from diloco.syncer.store import RunCard
from diloco.wire.client import SyncClient
from tests.loopback.audit import History, audit
from tests.loopback.cluster import Process, SiteThread, free_port, serving
from tests.loopback.toy import EVERYBODY, RUN, Toy

BOUND_S = 60.0
FAR = 1_000_000


def the_toy(folder: Path, rounds: int) -> Toy:
    outer = {**EVERYBODY, "num_fragments": 2, "token_budget": rounds * 2 * 6 * 10, "site_timeout_ns": 600 * 10**9}
    optimizer = {"kind": "nesterov", "lr": 0.7, "momentum": 0.9}
    return Toy(folder=str(folder), outer=outer, optimizer=optimizer, lock_step=True, inner_steps=6, snapshot_every=FAR)


def whole_run(folder: Path, deaths: list[tuple[str, int]]) -> tuple[History, list[str], dict[tuple[int, int], str]]:
    """The history, the digests of the final versions, and those of the updates that a killed site had sealed."""
    toy, logs, sealed = the_toy(folder, rounds=8), [], {}
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


DEATHS = [
    ("outbox.put", 12),
    ("push", 3),  # An update that is in the outbox and was not acknowledged,
    ("pushed", 2),  # and one that was.
    ("adopt", 3),
    ("checkpoint.rename", 2),
]


@pytest.mark.slow
def test_invariant_11b_what_is_done_again_is_the_same_to_the_bit(tmp_path: Path) -> None:
    twin, wanted, _ = whole_run(tmp_path / "twin", [])
    told, final, sealed = whole_run(tmp_path / "killed", DEATHS)
    assert told.accepted == twin.accepted
    assert told.published == twin.published
    assert final == wanted
    for (fragment, sequence), digest in sealed.items():
        assert told.accepted["a", fragment, sequence] == digest, "what was done again has another content"
    assert sealed, "no site was killed with an update in its outbox"


def test_invariant_11b_what_was_sealed_before_the_kill_is_answered_as_a_duplicate(tmp_path: Path) -> None:
    toy = the_toy(tmp_path, rounds=4)
    with serving(toy) as (_, address, _), ExitStack() as alive:
        alive.enter_context(SiteThread(toy, "b", address))
        mine = {"site": "a", "address": address, "checkpoint_every": 3}
        with Process("site", toy, ("push", 3), **mine) as killed:
            assert killed.wait(BOUND_S) == -9
        outbox = Outbox(tmp_path / "a" / "outbox")
        ((fragment, sequence),) = outbox.digests()
        header, payload = outbox.get(fragment, sequence)
        again = alive.enter_context(Process("site", toy, None, **mine))
        again.log.wait_for("pushed", 1, BOUND_S, where=lambda event: event["sequence"] == sequence)
        with SyncClient(address, "a", RUN) as client:
            answer = client.push(header, bytes(payload))
        assert answer.outcome is Outcome.DUPLICATE
        assert again.wait(BOUND_S) == 0


# --- A run that is restored while its sites go on --------------------------------------------------------------------

CLOCK_S = 1_800_000_000


def restore_without(toy: Toy, selections: list[Selection]) -> None:
    """What the two verbs do: replay without some updates, and take the run up from there."""
    folder = Path(toy.folder) / "syncer"
    outer, rule = toy.rules()
    rules = Rules(outer, rule, toy.codec)
    kept = Kept(folder)
    rebuilt = kept.replay(rules, selections)
    assert rebuilt.left_out, "nothing was left out"
    image = Image(kept.card.facts(), tuple(rebuilt.values), rebuilt.held, {})
    card = RunCard(kept.card.run_id, kept.card.layout_fingerprint, kept.card.shared_digest)
    with locked(folder):
        restored = Restore(folder, card, rules, "a test", Known(CLOCK_S)).in_place(image)
    assert restored.lineage == CLOCK_S


@pytest.mark.slow
def test_invariants_9_and_10_hold_through_a_restore(tmp_path: Path) -> None:
    outer = {"num_fragments": 2, "quorum": 2, "grace": "fixed", "grace_ns": 50_000_000}
    toy = Toy(folder=str(tmp_path), codec="int8", outer=outer, port=free_port(), snapshot_every=FAR, retain_steps=FAR)
    with ExitStack() as stack:
        with serving(toy) as (_, address, first):
            sites = [stack.enter_context(SiteThread(toy, name, address, step_s=0.01)) for name in "ab"]
            first.wait_for("published", 12, 60.0)
        lost = sites[0].log.of("pushed")
        assert lost, "a site had sent nothing"
        restore_without(toy, [Selection("a", "versions", 2, 4)])
        with serving(toy) as (syncer, _, second):
            for site in sites:
                site.log.wait_for("started_over", 2, 60.0)
            begun = len(second)
            for name in "ab":
                second.wait_for("published", 2, 60.0, begun, lambda event, name=name: name in event["merged"])  # type: ignore[misc]
            syncer.drain()
            finished = {site.site: site.join(60.0) for site in sites}
            assert syncer.wait(30.0) is not None
    told = audit(toy, [first, second], {site.site: [site.log] for site in sites}, finished)
    assert list(told.began) == [CLOCK_S]
    assert told.machine.state.lineage == CLOCK_S
    assert finished["a"].ledger["lost"] > 0, "what was taken out is lost, and it says so"
