"""A syncer that is away for long ends no site, stops no training and costs no token."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.learner import transfer
from diloco.sync.progress import site_ledger
from diloco.wire.channel import Backoff
from diloco.wire.messages import Refused, Status
from diloco.wire.pulling import PulledVersion
from tests.learner.direct import DirectClient, Site, agent_threads, started
from tests.syncer.building import serving

ATTEMPTS = 400
"""At the back-off's cap of three seconds, jittered, this many attempts are a quarter of an hour."""


def test_a_site_goes_on_for_a_quarter_of_an_hour_alone_and_then_as_if_nothing_had_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread: list[float] = []

    class Hurried(Backoff):
        """The same delays, a thousand times shorter."""

        def next_s(self, chance: float, at_least_s: float = 0.0) -> float:
            delay_s = Backoff.next_s(self, chance, at_least_s)
            spread.append(delay_s)
            return delay_s / 1000

    monkeypatch.setattr(transfer, "Backoff", Hurried)
    alone = {"outer": {"site_timeout_ns": 200_000_000, "updates_in_flight_max": 2}}
    with serving(tmp_path / "syncer", **alone) as syncer, started(tmp_path / "a", syncer) as site:
        site.train_until(lambda: syncer.holdings.values[0].version >= 1, "connected")
        site.client.down.set()
        attempts = lambda: Counter(site.client.calls)  # noqa: E731
        before, held = attempts(), len(site.agent.tensors.sent)
        site.train_until(lambda: (attempts() - before)["join"] >= ATTEMPTS, "so many attempts to join", 60.0)
        site.train_until(lambda: (attempts() - before)["report"] >= 3, "heartbeats into the void", 60.0)
        assert len(site.agent.tensors.sent) <= held + 2 * 2, "memory is as it was: two updates for each fragment"
        assert len(agent_threads()) == 5, "every thread lives"
        assert site.events.of("disconnected")
        assert not [event for event in site.events.of("note") if event["note"] == "thread_died"]
        capped = [delay for delay in spread if delay > 1.4]
        assert len(capped) > ATTEMPTS / 2
        assert max(capped) <= 3.0
        assert len({round(delay, 6) for delay in capped}) > len(capped) / 2, "delays that are drawn"
        reached = [values.version for values in syncer.holdings.values]
        site.client.down.clear()
        site.train_until(
            lambda: all(v.version > was for v, was in zip(syncer.holdings.values, reached, strict=True)),
            "merges again",
            30.0,
        )
        ledger = site_ledger(site.agent.machine.state)
        assert ledger.balanced()
        assert (ledger.lost, ledger.refused) == (0, 0)


def test_a_version_of_a_syncer_whose_place_another_has_taken_is_fetched_again(tmp_path: Path) -> None:
    """The old one answered; before its answer was taken in, the site had joined the new one."""
    with serving(tmp_path / "syncer"):
        pass  # Epoch 1.
    with serving(tmp_path / "syncer") as syncer:
        site = Site(tmp_path / "a", DirectClient(syncer))
        epochs: list[int] = []

        def late(pulled: PulledVersion) -> PulledVersion:
            epoch = 1 if len(epochs) < 3 else pulled.header.epoch
            epochs.append(epoch)
            return replace(pulled, header=replace(pulled.header, epoch=epoch))

        site.client.after_pull = late
        arrived: list[int] = []
        real = site.agent.tensors.arrived
        site.agent.tensors.arrived = lambda *told: (arrived.append(len(epochs)), real(*told))[1]  # type: ignore[method-assign]
        site.start()
        assert epochs[:3] == [1, 1, 1]
        assert set(epochs[3:]) == {2}
        assert min(arrived) > 3, "nothing of the old one was taken"
        site.train_until(lambda: syncer.holdings.values[0].version >= 1, "it trains")
        site.close()


@pytest.mark.slow
def test_a_site_that_is_refused_for_a_while_says_so_once_and_loses_nothing(tmp_path: Path) -> None:
    alone = {"outer": {"site_timeout_ns": 200_000_000, "updates_in_flight_max": 2}}
    with serving(tmp_path / "syncer", **alone) as syncer, started(tmp_path / "a", syncer) as site:
        site.train_until(lambda: syncer.holdings.values[0].version >= 1, "connected")

        def refuse() -> None:
            raise Refused(Status.PERMISSION_DENIED, "site a is not in the permissions of this run")

        for what in ("join", "push"):
            site.client.before[what] = refuse
        before = len(site.client.calls)
        refused = lambda: Counter(site.client.calls[before:])  # noqa: E731
        site.train_until(lambda: refused()["push"] >= 4 and refused()["join"] >= 2, "refused again and again", 60.0)
        site.client.before.clear()
        version = syncer.holdings.values[0].version
        site.train_until(lambda: syncer.holdings.values[0].version > version, "taken in again", 60.0)
        said = Counter(note["note"] for note in site.events.of("note"))
        assert (said["rejoin"], said["join_refused"]) == (1, 1)
        assert site.agent.finish().ledger["lost"] == 0
