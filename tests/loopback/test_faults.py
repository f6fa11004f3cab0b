"""Links that fall silent, syncers that are gone, peers that freeze: a site trains on, and nothing is lost by it.

How fast a site trains is counted in windows and beside it a twin, which makes the same steps and belongs to no run, so
that what the machine does to both does not count.
"""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from diloco.wan.link import LinkOptions
from diloco.wan.process import RelayProcess
from diloco.wire.client import SyncClient
from diloco.wire.messages import Alive, Unreachable
from diloco.wire.options import ClientOptions, ServerOptions
from tests.loopback.audit import audit
from tests.loopback.cluster import Process, SiteThread, drain, eventually, free_port, shares
from tests.loopback.toy import Toy, Twin
from tests.wire.fake_syncer import RUN, FakeSyncer, serve

BOUND_S = 40.0
STEP_S = 0.01
SHARE_MIN = 0.95
WINDOWS, WINDOW_S = 5, 0.6
TRIES = 5
QUICK = {"keepalive_time_ms": 800, "keepalive_timeout_ms": 800}
NEVER_S = 15.0
"""The bounds of other means to notice silence, out of the way where the connections' own pings are to."""


@pytest.mark.slow
def test_a_site_trains_on_through_each_fault_in_turn(tmp_path: Path) -> None:
    """Site "a" in this process, its peer "b" in another, each behind a link of its own; the syncer in a third."""
    outer = {"grace": "fixed", "grace_ns": 5_000_000, "site_timeout_ns": 1_500_000_000, "num_fragments": 2}
    toy = Toy(
        folder=str(tmp_path),
        codec="int8",
        inner_steps=8,
        outer=outer,
        port=free_port(),
        client={"stall_s": 2.0, "control_timeout_s": 1.0, **QUICK},
        server={"stall_s": 2.0, "alive_s": 0.5, **QUICK},
    )
    syncers: list[Process] = []
    with ExitStack() as alive:
        relay = alive.enter_context(RelayProcess())

        def begin_syncer() -> None:
            syncers.append(alive.enter_context(Process("syncer", toy)))
            syncers[-1].log.wait_for("listening", 1, BOUND_S)

        begin_syncer()
        link = LinkOptions(rtt_ms=10.0, mbps=100.0)
        links = {site: relay.add(site, link, f"127.0.0.1:{toy.port}") for site in "ab"}
        b = alive.enter_context(Process("site", toy, None, site="b", address=links["b"], step_s=STEP_S))
        a = alive.enter_context(SiteThread(toy, "a", links["a"], step_s=STEP_S))
        twin = alive.enter_context(Twin(STEP_S))
        for log in (a.log, b.log):
            log.wait_for("adopted", 2, BOUND_S)
        faults: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            # name: (begin, heal)
            "nothing goes up": (lambda: relay.partition("a", "up"), lambda: relay.heal("a")),
            "nothing comes down": (lambda: relay.partition("a", "down"), lambda: relay.heal("a")),
            "partition": (lambda: relay.partition("a"), lambda: relay.heal("a")),
            "resets": (lambda: (relay.refuse("a"), relay.reset("a")), lambda: relay.accept("a")),
            "dead syncer": (lambda: syncers[-1].kill(), begin_syncer),
            "frozen peer": (lambda: b.send(signal.SIGSTOP), lambda: b.send(signal.SIGCONT)),
        }
        seen = {"healthy": shares(a, twin, WINDOWS, WINDOW_S)}
        for name, (begin, heal) in faults.items():
            # What a fault costs it costs each time; what else the machine does to one of the two passes.
            for _ in range(TRIES):
                begin()
                seen[name] = max(seen.get(name, [0.0]), shares(a, twin, WINDOWS, WINDOW_S), key=statistics.median)
                heal()
                # Something that each site trained is merged and adopted after this instant.
                for log, since in [(log, len(log)) for log in (a.log, b.log)]:
                    log.wait_for("adopted", 1, BOUND_S, since, lambda event: event["merged"])
                seen["healthy"] += shares(a, twin, 1, WINDOW_S)
                if statistics.median(seen[name]) >= SHARE_MIN * statistics.median(seen["healthy"]):
                    break
        drain(f"127.0.0.1:{toy.port}")
        finished = {"a": a.join(BOUND_S)}
        for each in (b, syncers[-1]):
            assert each.wait(BOUND_S) == 0, each.errors
        logs = [syncer.log for syncer in syncers]
        assert audit(toy, logs, {"a": [a.log], "b": [b.log]}, finished).published
        (theirs,) = b.log.of("finished")
        for ledger in (finished["a"].ledger, theirs["ledger"]):
            assert ledger["merged"] == ledger["processed"], f"all is merged in the end: {ledger}"  # type: ignore[index]
        noticed = [event["site"] for log in logs for event in log.of("site_silent")]
        assert {"a", "b"} <= set(noticed), "each site was found silent while it was cut off or frozen"
        assert a.log.of("disconnected"), "the site noticed"
    healthy = statistics.median(seen.pop("healthy"))
    found = {name: round(statistics.median(each) / healthy, 4) for name, each in seen.items()}
    assert min(found.values()) >= SHARE_MIN, f"steps against healthy times: {found}; windows {seen}"


def test_both_ends_notice_a_silent_path_by_http2_pings_alone() -> None:
    quick = {"keepalive_time_ms": 500, "keepalive_timeout_ms": 500}
    syncer = FakeSyncer()
    server = serve(syncer, ServerOptions(run_id=RUN, stall_s=NEVER_S, alive_s=NEVER_S, **quick))  # type: ignore[arg-type]
    with ExitStack() as stack:
        stack.callback(server.stop, 0.2)
        relay = stack.enter_context(RelayProcess())
        address = relay.add("link", LinkOptions(), server.address)
        options = ClientOptions(stall_s=NEVER_S, **quick)  # type: ignore[arg-type]
        client = stack.enter_context(SyncClient(address, "site-a", RUN, options=options))
        stream = stack.enter_context(client.watch(1))
        assert isinstance(next(stream), Alive)
        relay.partition("link")
        began = time.monotonic()
        with pytest.raises(Unreachable, match="ping timeout"):
            next(stream)
        assert time.monotonic() - began < 5.0
        eventually(lambda: all(feed.closed.is_set() for feed in syncer.feeds), 5.0, "the server notices too")
        assert syncer.feeds, "there was a stream to be noticed"
