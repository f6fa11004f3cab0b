"""A link that slows down and comes back: the codec of the site behind it follows, and the books of the run balance.

The other site's link stays as it is, so that one round merges updates in two codecs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from diloco.codec.registry import make_codec
from diloco.sync.link import AdaptOptions, Way
from diloco.wan.link import LinkOptions
from diloco.wan.process import RelayProcess
from diloco.wire.client import AdminClient
from tests.loopback.audit import audit
from tests.loopback.cluster import SiteThread, eventually, serving
from tests.loopback.toy import Toy

if TYPE_CHECKING:
    from pathlib import Path

BOUND_S = 60.0
STEP_S = 0.05
INNER_STEPS = 10
VALUES = 400_000
CODECS = ("int8", "int4")
"""406 kB and 225 kB, every half second."""
SLOW_MBPS, FAST_MBPS = 6.4, 0.0
"""At 0.8 MB/s the one takes 102 % of that and the other 56 %."""


def adapting() -> AdaptOptions:
    sizes = [make_codec(codec).payload_bytes_max(VALUES) for codec in CODECS]
    ways = tuple(Way(codec, size) for codec, size in zip(CODECS, sizes, strict=True))
    return AdaptOptions(ways=ways, version_bytes=sizes[0], inner_steps=INNER_STEPS)


def in_status(address: str, site: str) -> dict[str, object]:
    with AdminClient(address) as operator:
        sites = operator.status()["sites"]
    assert isinstance(sites, dict)
    link = sites[site]["link"]
    assert isinstance(link, dict)
    return link


@pytest.mark.slow
def test_the_codec_follows_the_link_and_nothing_is_lost(tmp_path: Path) -> None:
    toy = Toy(
        folder=str(tmp_path),
        codec=CODECS[0],
        allowed=CODECS[1:],
        adapt=adapting(),
        inner_steps=INNER_STEPS,
        shapes=(("w", (VALUES,)),),
        snapshot_every=1000,
        client={"stall_s": 10.0, "control_timeout_s": 5.0},
        outer={"grace": "fixed", "grace_ns": 50_000_000},
    )
    with serving(toy) as (syncer, address, log), RelayProcess() as relay:
        links = {site: relay.add(site, LinkOptions(rtt_ms=10.0), address) for site in "ab"}
        with SiteThread(toy, "a", links["a"], step_s=STEP_S) as a, SiteThread(toy, "b", links["b"], step_s=STEP_S) as b:
            a.log.wait_for("pushed", 4, BOUND_S)
            assert not a.log.of("adapted"), "nothing changes on a link that carries what is configured"
            relay.set("a", mbps=SLOW_MBPS)
            (slower,) = a.log.wait_for("adapted", 1, BOUND_S)
            assert slower["codec"] == "int4"
            assert "updates in int8 take" in str(slower["why"])
            eventually(lambda: in_status(address, "a")["up_codec"] == "int4", BOUND_S, "the syncer is told")
            assert in_status(address, "a")["why"] == slower["why"]
            assert in_status(address, "b")["up_codec"] == "int8"
            since = len(a.log)
            a.log.wait_for("pushed", 2, BOUND_S, since)
            relay.set("a", mbps=FAST_MBPS)
            faster = a.log.wait_for("adapted", 2, BOUND_S)[1]
            assert faster["codec"] == "int8"
            since = len(a.log)
            a.log.wait_for("pushed", 2, BOUND_S, since)
            with AdminClient(address) as operator:
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
