"""A site's exchange follows its link: the codec a link that slows down, the overlap one that is far."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

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


def adapting(folder: Path, values: int, codecs: tuple[str, ...], inner_steps: int, **adapt: Any) -> Toy:
    """A toy of one fragment of so many values, whose sites choose among ``codecs``."""
    sizes = [make_codec(codec).payload_bytes_max(values) for codec in codecs]
    ways = tuple(Way(codec, size) for codec, size in zip(codecs, sizes, strict=True))
    return Toy(
        folder=str(folder),
        codec=codecs[0],
        allowed=codecs[1:],
        adapt=AdaptOptions(ways=ways, version_bytes=sizes[0], inner_steps=inner_steps, **adapt),
        inner_steps=inner_steps,
        shapes=(("w", (values,)),),
        snapshot_every=1000,
        client={"stall_s": 10.0, "control_timeout_s": 5.0},
        outer={"grace": "fixed", "grace_ns": 50_000_000},
    )


def link_of(operator: AdminClient, site: str) -> dict[str, Any]:
    """What the syncer's status says of the site's link."""
    sites: Any = operator.status()["sites"]
    return dict(sites[site]["link"])


@pytest.mark.slow
def test_the_codec_follows_the_link_and_nothing_is_lost(tmp_path: Path) -> None:
    """The other site's link stays as it is, so that one round merges updates in two codecs."""
    # 406 kB or 225 kB every half second: of 0.8 MB/s the one takes 102 % and the other 56 %.
    toy, slow_mbps = adapting(tmp_path, 400_000, ("int8", "int4"), inner_steps=10), 6.4
    with serving(toy) as (syncer, address, log), RelayProcess() as relay, AdminClient(address) as operator:
        links = {site: relay.add(site, LinkOptions(rtt_ms=10.0), address) for site in "ab"}
        with SiteThread(toy, "a", links["a"], step_s=0.05) as a, SiteThread(toy, "b", links["b"], step_s=0.05) as b:
            a.log.wait_for("pushed", 4, BOUND_S)
            assert not a.log.of("adapted"), "nothing changes on a link that carries what is configured"
            relay.set("a", mbps=slow_mbps)
            (slower,) = a.log.wait_for("adapted", 1, BOUND_S)
            assert slower["codec"] == "int4"
            assert "updates in int8 take" in str(slower["why"])
            eventually(lambda: link_of(operator, "a")["up_codec"] == "int4", BOUND_S, "the syncer is told")
            assert link_of(operator, "a")["why"] == slower["why"]
            assert link_of(operator, "b")["up_codec"] == "int8"
            a.log.wait_for("pushed", 2, BOUND_S, since=len(a.log))
            relay.set("a", mbps=0.0)
            faster = a.log.wait_for("adapted", 2, BOUND_S)[1]
            assert faster["codec"] == "int8"
            a.log.wait_for("pushed", 2, BOUND_S, since=len(a.log))
            operator.drain()
            finished = {"a": a.join(BOUND_S), "b": b.join(BOUND_S)}
        assert syncer.wait(BOUND_S) is not None
    audit(toy, [log], {"a": [a.log], "b": [b.log]}, finished)
    sealed = [event["codec"] for event in a.log.of("sealed")]
    first, last = sealed.index("int4"), len(sealed) - 1 - sealed[::-1].index("int4")
    assert set(sealed[first : last + 1]) == {"int4"}, f"to and fro: {sealed}"
    assert (sealed[0], sealed[-1]) == ("int8", "int8")
    assert {event["codec"] for event in b.log.of("sealed")} == {"int8"}
    for done in finished.values():
        assert done.ledger["merged"] == done.ledger["processed"]


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
    # Three round trips alone are nine steps, on any machine: a toy's steps last as long as they say.
    least, most = 9, 11
    toy = adapting(tmp_path, 100_000, ("int8",), inner_steps=12, overlap_steps_max=most)
    toy.outer["grace_ns"] = 0
    with serving(toy) as (syncer, address, log), RelayProcess() as relay, AdminClient(address) as operator:
        far = relay.add("a", LinkOptions(rtt_ms=60.0), address)
        with SiteThread(toy, "a", far, step_s=0.02) as site:
            watched = Watched(site.toy_site.agent.machine)
            (chosen, *_) = site.log.wait_for("adapted", 1, BOUND_S)
            assert "an exchange takes" in str(chosen["why"])
            eventually(lambda: link_of(operator, "a")["overlap_steps"] >= least, BOUND_S, "the syncer is told")
            assert link_of(operator, "a")["exchange_steps"] >= least
            site.log.wait_for("adopted", 3, BOUND_S, since=len(site.log))
            operator.drain()
            finished = site.join(BOUND_S)
        assert syncer.wait(BOUND_S) is not None
    audit(toy, [log], {"a": [site.log]}, {"a": finished})
    assert all(after >= overlap for after, overlap in watched.adopted), watched.adopted
    assert [overlap for _, overlap in watched.adopted if overlap >= least], "it was not used"
    for event in site.log.of("adapted"):
        assert least <= int(str(event["overlap_steps"])) <= most
