"""A run that is restored while its sites go on: real sockets and agents, and its books afterwards."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from diloco.durable import locked
from diloco.sync.rounds import Selection
from diloco.syncer.replaying import Rules
from diloco.syncer.restoring import Kept, Known, restore_in_place
from diloco.syncer.snapshots import Image
from diloco.syncer.store import RunCard
from tests.loopback.audit import audit
from tests.loopback.cluster import SiteThread, free_port, serving
from tests.loopback.toy import Toy

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
        restored = restore_in_place(folder, card, rules, image, "a test", Known(CLOCK_S))
    assert restored.lineage == CLOCK_S


@pytest.mark.slow
def test_invariants_9_and_10_hold_through_a_restore(tmp_path: Path) -> None:
    outer = {"num_fragments": 2, "quorum": 2, "grace": "fixed", "grace_ns": 50_000_000}
    toy = Toy(
        folder=str(tmp_path), codec="int8", outer=outer, port=free_port(), snapshot_every=1000, retain_steps=10**6
    )
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
