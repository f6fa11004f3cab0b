"""A far link: the site behind it finds how many of its own steps an exchange takes, and adopts no sooner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.codec.registry import make_codec
from diloco.sync.effects import Adopt, LearnerEffect, Seal
from diloco.sync.link import AdaptOptions, Way
from diloco.wan.link import LinkOptions
from diloco.wan.process import RelayProcess
from diloco.wire.client import AdminClient
from tests.loopback.audit import audit
from tests.loopback.cluster import SiteThread, eventually, serving
from tests.loopback.toy import Toy

if TYPE_CHECKING:
    from pathlib import Path

    from diloco.sync.events import LearnerEvent
    from diloco.sync.learner import LearnerSync

BOUND_S = 60.0
STEP_S = 0.02
INNER_STEPS = 12
RTT_MS = 60.0
STEPS_MIN, STEPS_MAX = 9, 11
"""Three round trips alone are nine steps, on any machine: a toy's steps last as long as they say."""
VALUES = 100_000


class Watched:
    """A site's machine, and how many steps after the last update each version was adopted."""

    def __init__(self, machine: LearnerSync) -> None:
        self._machine, self._handle = machine, machine.handle
        self._sealed: tuple[int, int] | None = None
        self.adopted: list[tuple[int, int]] = []
        """With the overlap that held when that update was sealed."""
        machine.handle = self.handle  # type: ignore[method-assign]

    def handle(self, event: LearnerEvent, now_ns: int) -> list[LearnerEffect]:
        effects, state = self._handle(event, now_ns), self._machine.state
        for effect in effects:
            if isinstance(effect, Adopt) and self._sealed is not None and not state.stopping:
                self.adopted.append((state.step - self._sealed[0], self._sealed[1]))
            elif isinstance(effect, Seal):
                self._sealed = (state.step, state.overlap_steps)
        return effects


def test_a_far_site_lets_so_many_steps_pass_as_its_exchange_takes(tmp_path: Path) -> None:
    size = make_codec("int8").payload_bytes_max(VALUES)
    toy = Toy(
        folder=str(tmp_path),
        codec="int8",
        adapt=AdaptOptions(
            ways=(Way("int8", size),), version_bytes=size, inner_steps=INNER_STEPS, overlap_steps_max=STEPS_MAX
        ),
        inner_steps=INNER_STEPS,
        shapes=(("w", (VALUES,)),),
        snapshot_every=1000,
        client={"stall_s": 10.0, "control_timeout_s": 5.0},
        outer={"grace": "fixed", "grace_ns": 0},
    )
    with serving(toy) as (syncer, address, log), RelayProcess() as relay:
        far = relay.add("a", LinkOptions(rtt_ms=RTT_MS), address)
        with SiteThread(toy, "a", far, step_s=STEP_S) as site:
            watched = Watched(site.toy_site.agent.machine)
            chosen = site.log.wait_for("adapted", 1, BOUND_S)[0]
            assert STEPS_MIN <= chosen["overlap_steps"] <= STEPS_MAX
            assert "an exchange takes" in str(chosen["why"])

            def in_status() -> dict[str, object]:
                with AdminClient(address) as operator:
                    return operator.status()["sites"]["a"]["link"]  # type: ignore[index,no-any-return]

            eventually(lambda: in_status()["overlap_steps"] >= STEPS_MIN, BOUND_S, "the syncer is told")  # type: ignore[operator]
            assert in_status()["exchange_steps"] >= STEPS_MIN  # type: ignore[operator]
            since = len(site.log)
            site.log.wait_for("adopted", 3, BOUND_S, since)
            with AdminClient(address) as operator:
                operator.drain()
            finished = site.join(BOUND_S)
        assert syncer.wait(BOUND_S) is not None
    audit(toy, [log], {"a": [site.log]}, {"a": finished})
    assert all(after >= overlap for after, overlap in watched.adopted), watched.adopted
    assert [overlap for _, overlap in watched.adopted if overlap >= STEPS_MIN], "it was not used"
    ups = [event["overlap_steps"] for event in site.log.of("adapted")]
    assert all(STEPS_MIN <= steps <= STEPS_MAX for steps in ups), ups  # type: ignore[operator]
