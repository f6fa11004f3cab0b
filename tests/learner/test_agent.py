"""Rank 0 of a site: it begins and ends in words and in time, and training waits for nothing in between."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.inner import GroupError
from diloco.learner import transfer
from diloco.learner.agent import SAMPLES_MAX, UNHEARD_MAX, Meter
from diloco.learner.transfer import JoinFailed
from diloco.sync.link import AdaptOptions, Way
from diloco.sync.progress import site_ledger
from diloco.sync.state import Status as SiteStatus
from diloco.syncer.server import Syncer
from diloco.wire.channel import Backoff
from diloco.wire.messages import (
    Refused,
    Status,
    Unreachable,
)
from diloco.wire.pulling import PulledVersion
from tests.learner.direct import (
    ALONE,
    TOKENS,
    WAITING,
    DirectClient,
    Site,
    agent_threads,
    started,
    versions,
)
from tests.learner.participant import Elsewhere
from tests.syncer.building import Events, agreement, eventually, serving


def status(syncer: Syncer, site: str = "a") -> SiteStatus:
    return syncer.core.ask(lambda machine: machine.state.sites[site].status)


# --- beginning -------------------------------------------------------------------------------------------------------


def test_a_first_fetch_that_takes_longer_than_a_heartbeat_ends_no_site(tmp_path: Path) -> None:
    """A heartbeat that comes long before every fragment is here names no version."""
    slow = {"pull": lambda: time.sleep(0.6)}
    with (
        serving(tmp_path / "syncer", heartbeat_s=0.05, **ALONE) as syncer,
        started(tmp_path / "a", syncer, before=slow) as site,
    ):
        reports = site.client.reports
        assert len(reports) >= 2
        assert (reports[0].versions, reports[0].digests) == ((), ())
        assert site.events.of("note") == []
        site.train(3)
        eventually(lambda: reports[-1].versions == (0, 0), "they are here")


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("cut", "unreachable", "the line is cut"),
        ("silent", "unreachable", "timed out waiting for the first versions"),
        ("other", "mismatch", "run_id is 'other' at the site"),
        ("evicted", "refused", "an operator evicted site"),
        ("not permitted", "refused", "held"),
    ],
)
def test_a_join_that_fails_says_which_way_and_leaves_no_thread(
    tmp_path: Path, syncer: Syncer, how: str, kind: str, words: str
) -> None:
    client, agreed = DirectClient(syncer), agreement()
    if how == "cut":
        client.down.set()
    elif how == "silent":
        client.after_pull = lambda pulled: replace(pulled, header=replace(pulled.header, digest="0" * 64))
    elif how == "other":
        agreed = replace(agreed, run_id="other")
    elif how == "evicted":
        with started(tmp_path / "first", syncer):
            pass
        syncer.api.evict("a")
    else:
        client.before["join"] = lambda: away(refused="not in the permissions")
    site = Site(tmp_path / "a", client, agreed=agreed, join_timeout_s=0.7)
    with pytest.raises(JoinFailed, match=words) as raised:
        site.start()
    assert raised.value.kind == kind
    assert agent_threads() == []
    site.close()


def test_first_versions_that_take_longer_than_the_join_may_take_end_no_site_while_they_come(
    tmp_path: Path, syncer: Syncer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of many gigabytes over a slow link: as long as bytes come, the site and its other ranks wait."""
    monkeypatch.setattr("diloco.learner.agent.WAITING_S", 0.2)
    with started(tmp_path / "a", syncer, before={"pull": lambda: time.sleep(0.8)}, join_timeout_s=1.0) as site:
        assert site.client.calls.count("pull") >= 2
        said = [str(event["why"]) for event in site.events.of("note")]
    assert said
    assert all(" MB are here" in why for why in said)


def test_a_site_that_comes_in_the_last_round_has_a_base_for_the_step_it_ends_with(tmp_path: Path) -> None:
    outer = {"final_wait_ns": 30_000_000_000, "site_timeout_ns": 60_000_000_000}
    with serving(tmp_path / "syncer", outer=outer) as syncer, started(tmp_path / "a", syncer, "a") as first:
        first.train(2)
        syncer.drain()
        slow = {"pull": lambda: time.sleep(0.3)}  # The end is told long before the first version is here.
        with started(tmp_path / "b", syncer, "b", before=slow) as late:
            assert late.step().stop
            late.finish()
        first.train_until_stopped()
        assert first.finish().ending == "drained"


# --- training --------------------------------------------------------------------------------------------------------


def test_nan_in_the_parameters_is_discarded_and_the_published_values_taken(syncer: Syncer, site: Site) -> None:
    site.train_until(lambda: min(versions(syncer)) >= 1, "it takes part")
    for values in site.parameters.values():
        values.fill_(float("nan"))
    site.train_until(
        lambda: all(bool(torch.isfinite(values).all()) for values in site.parameters.values()), "it took them again"
    )
    assert len(site.events.of("retaken")) > 2, "beside the two first versions"
    reached = min(versions(syncer))
    site.train_until(lambda: min(versions(syncer)) > reached, "and it takes part again")
    assert site.finish().ledger["refused"] > 0
    assert all(bool(torch.isfinite(values.theta).all()) for values in syncer.holdings.values)


def test_in_lock_step_a_site_waits_for_the_others_as_long_as_the_syncer_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sites differ in speed, and one may come back after an hour: only a syncer that is silent ends the wait."""
    monkeypatch.setattr("diloco.learner.agent.WAITING_S", 0.2)
    orders: list[float] = []
    monkeypatch.setattr("diloco.learner.ranks.Orders.wait", lambda _: orders.append(time.monotonic()))
    waits = {"learner": {"lock_step": True}, "lock_step_timeout_s": 0.6}

    def held() -> None:
        raise Unreachable("disk full", 0.5)

    with (
        serving(tmp_path / "syncer", heartbeat_s=0.1, **WAITING) as syncer,
        started(tmp_path / "a", syncer, **waits) as site,
    ):
        site.train(1)
        training = threading.Thread(target=site.train, args=(1,), daemon=True)
        training.start()
        training.join(1.0)
        site.client.before["report"] = held
        training.join(1.0)
        assert training.is_alive(), site.events.all[-3:]
        del site.client.before["report"]
        assert {said["note"] for said in site.events.of("note")} == {"waits"}
        assert len(orders) >= 2, "the other ranks are not left without a word"
        with started(tmp_path / "b", syncer, "b", **waits) as other:
            other.train(2)
            training.join(5.0)
        assert not training.is_alive()
        site.train(1)
        site.client.down.set()
        with pytest.raises(TimeoutError, match="timed out waiting for the version of its own update"):
            site.step()


# --- ending ----------------------------------------------------------------------------------------------------------


def test_leave_soon_stops_the_loop_sends_the_rest_and_says_goodbye(syncer: Syncer, site: Site) -> None:
    site.train(5)
    site.agent.leave_soon()
    site.train_until_stopped()
    done = site.finish()
    assert (done.ending, done.why) == ("left", "this site left before the end of the run")
    every = site.steps * TOKENS
    assert done.ledger == {**dict.fromkeys(done.ledger, 0), "processed": every, "merged": every}
    assert status(syncer) is SiteStatus.LEFT
    assert agent_threads() == []
    (event,) = site.events.of("site_done")
    assert event["ledger"]["tokens_merged"] == every
    told, meter = site.client.reports[-1], site.events.of("meter")[-1]
    assert (told.step, told.tokens_processed, told.loss) == (site.steps, every, 1.0)
    assert (meter["inner_steps"], meter["tokens"], meter["in_flight"], meter["staleness"]) == (site.steps, every, 0, 0)
    assert told.bytes_up == meter["bytes_up"] > 0
    assert told.link is not None
    assert min(told.link.rtt_ns, meter["link_rtt_ns"], meter["bytes_down"]) > 0


@pytest.mark.parametrize("cut", ["before the end", "for the last update only"])
def test_finishing_is_bounded_when_the_syncer_is_away(tmp_path: Path, syncer: Syncer, cut: str) -> None:
    with started(tmp_path / "a", syncer, finish_timeout_s=0.8) as site:
        site.train(6)
        site.client.down.set()
        if cut == "before the end":
            site.train(6)
        done = site.finish()
        assert done.ending == "left"
        assert done.ledger["unsent"] + done.ledger["in_flight"] > 0
        assert agent_threads() == []


def test_a_final_version_that_takes_longer_than_finishing_may_take_is_waited_for_while_it_comes(tmp_path: Path) -> None:
    outer = {"token_budget": 100, "final_wait_ns": 50_000_000}
    with (
        serving(tmp_path / "syncer", outer=outer) as syncer,
        started(tmp_path / "a", syncer, finish_timeout_s=1.0) as site,
    ):
        site.train_until_stopped()
        site.client.before["pull"] = lambda: time.sleep(0.8)
        site.client.training = None
        done = site.agent.finish(final=True)
    assert (done.ending, done.final) == ("finished", True)


@pytest.mark.parametrize("heartbeat_s", [0.2, 60.0])
def test_after_goodbye_a_site_says_what_it_lacks_until_it_lacks_nothing(tmp_path: Path, heartbeat_s: float) -> None:
    """It says so at once, and again; a line that breaks takes the goodbye not back."""
    with (
        serving(tmp_path / "syncer", heartbeat_s=heartbeat_s, **WAITING) as syncer,
        started(tmp_path / "a", syncer) as site,
    ):
        client = site.client
        site.train(3)
        finishing = threading.Thread(target=site.finish)  # No other site is there: its fates come with the end.
        finishing.start()
        eventually(lambda: syncer.api.feeds.standing() == (1, {"a"}), "the word that fates are missing")
        assert client.reports[-1].tokens_in_flight > 0
        assert status(syncer) is SiteStatus.LEFT
        if heartbeat_s < 1:
            before = client.calls.count("report")
            eventually(lambda: client.calls.count("report") > before + 1, "that word again")
            client.streams[-1].cancel()
            eventually(lambda: len(client.streams) >= 2, "it listens again")
        syncer.drain()
        finishing.join(10.0)
        assert not finishing.is_alive()
        assert client.reports[-1].tokens_in_flight == 0
        assert syncer.api.feeds.standing() == (0, frozenset()), "it is waited for no longer"
        assert (client.calls.count("join"), status(syncer)) == (1, SiteStatus.LEFT)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_thread_that_dies_stops_the_site_in_words_also_at_the_very_end(
    site: Site, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    died: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", died.append)

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    site.train(1)
    if leaves:
        site.agent.leave_soon()
    monkeypatch.setattr(site.agent.outbox, "put", fail)
    site.train_until_stopped()
    done = site.finish()
    assert done.ending == "failed", "not hidden behind the end of the run"
    assert "Input/output error" in done.why
    assert [note["note"] for note in site.events.of("note")] == ["thread_died"]
    assert len(died) == 1


# --- A syncer that is away for long ends no site, stops no training and costs no token -------------------------------

ATTEMPTS = 400
"""At the back-off's cap of three seconds, jittered, this many attempts are a quarter of an hour."""


def test_a_site_goes_on_for_a_quarter_of_an_hour_alone_or_refused_and_then_as_if_nothing_had_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays: list[float] = []

    class Hurried(Backoff):
        """The same delays, a thousand times shorter."""

        def next_s(self, chance: float, at_least_s: float = 0.0) -> float:
            delays.append(Backoff.next_s(self, chance, at_least_s))
            return delays[-1] / 1000

    def refuse() -> None:
        raise Refused(Status.PERMISSION_DENIED, "site a is not in the permissions of this run")

    monkeypatch.setattr(transfer, "Backoff", Hurried)
    alone = {"outer": {"site_timeout_ns": 200_000_000, "updates_in_flight_max": 2}}
    with serving(tmp_path / "syncer", **alone) as syncer, started(tmp_path / "a", syncer) as site:
        calls = site.client.calls

        def merges() -> None:
            was = versions(syncer)
            site.train_until(lambda: all(map(int.__gt__, versions(syncer), was)), "it merges", 60.0)

        merges()
        site.client.down.set()
        calls.clear()
        held = len(site.agent.tensors.sent)
        site.train_until(lambda: calls.count("join") >= ATTEMPTS, "so many attempts to join", 60.0)
        site.train_until(lambda: calls.count("report") >= 3, "heartbeats into the void", 60.0)
        assert len(site.agent.tensors.sent) <= held + 2 * 2, "memory is as it was: two updates for each fragment"
        assert len(agent_threads()) == 5, "every thread lives"
        assert site.events.of("disconnected")
        assert site.events.of("note") == []
        assert sum(1.4 < delay <= 3.0 for delay in delays) > ATTEMPTS / 2
        assert max(delays) <= 3.0
        site.client.down.clear()
        merges()
        site.client.before |= {"join": refuse, "push": refuse}
        calls.clear()
        site.train_until(lambda: calls.count("push") >= 4 and calls.count("join") >= 2, "refused again", 60.0)
        site.client.before.clear()
        merges()
        said = [note["note"] for note in site.events.of("note")]
        assert set(said) == {"rejoin", "join_refused"}
        assert said.count("join_refused") == 1, "however often it is met"
        # On a slow machine the syncer may give the site up once more.
        assert said.count("rejoin") < len(site.events.of("joined")), "once for each join"
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
            epochs.append(1 if len(epochs) < 3 else pulled.header.epoch)
            return replace(pulled, header=replace(pulled.header, epoch=epochs[-1]))

        site.client.after_pull = late
        arrived: list[int] = []
        real = site.agent.tensors.arrived
        site.agent.tensors.arrived = lambda *told: (arrived.append(len(epochs)), real(*told))[1]
        site.start()
        assert epochs[:3] == [1, 1, 1]
        assert set(epochs[3:]) == {2}
        assert min(arrived) > 3, "nothing of the old one was taken"
        site.train_until(lambda: syncer.holdings.values[0].version >= 1, "it trains")
        site.close()


# --- The meter counts every step, however long the run, and little is kept for its percentiles -----------------------

MS = 1_000_000


def test_totals_and_percentiles_of_a_short_run_are_exact_and_a_long_one_is_sampled_evenly() -> None:
    meter = Meter()
    new = meter.read()
    assert (new.inner_steps, new.train_s, new.loss, new.tokens_per_s, new.step_s_p50) == (0, 0, None, 0, 0)
    for number, loss in enumerate((4.0, float("nan"), *[2.0] * 98), 1):
        meter.step(number * MS, 7, loss)
        meter.stalled(number * 1000, number * 10)
    meter.end()
    reading = meter.read()
    assert (reading.inner_steps, reading.tokens) == (100, 700)
    assert (reading.step_s_p50, reading.step_s_p95, reading.step_s_max) == (0.051, 0.096, 0.1)
    assert (reading.stall_s, reading.adopt_s, reading.after_step_s_max) == (5050 * 1e-6, 50500e-9, 100e-6)
    assert reading.loss == 2.0, "a loss that was no number is got over"
    assert reading.tokens_per_s == 700 / reading.train_s
    time.sleep(0.02)
    meter.end()
    assert meter.read() == reading, "the time of training ends with the loop"
    meter, count = Meter(), 5 * SAMPLES_MAX + 17
    for number in range(count):
        meter.step(2 * MS if number < count // 2 else 4 * MS, 1, 1.0)
    meter.step(9 * MS, 1, 1.0)
    reading = meter.read()
    assert (reading.inner_steps, reading.step_s_p95) == (count + 1, 0.004)
    assert reading.step_s_max == 0.009, "the slowest step is remembered whether or not it was sampled"
    assert len(meter._samples_ns) < SAMPLES_MAX
    late = sum(sample == 4 * MS for sample in meter._samples_ns) / len(meter._samples_ns)
    assert 0.45 < late < 0.55, late


# --- A site whose model lies on an accelerator, run on the CPU, with a place that stands for it -----------------------


def test_a_model_that_lies_elsewhere_is_trained_and_told_of_as_one_that_lies_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interpreter: None
) -> None:
    """What an accelerator does, on the CPU: updates by the kernels, which the syncer compares with what they say."""
    monkeypatch.setattr("diloco.learner.exchange.place_of", lambda parameters: Elsewhere())
    settings: dict[str, Any] = {"down_codec": "int8", "up_codecs": ["int4"], **ALONE}
    with (
        serving(tmp_path / "syncer", **settings) as syncer,
        started(tmp_path / "a", syncer, adapt=AdaptOptions(ways=(Way("int4", 0),))) as site,
    ):
        assert site.events.of("joined")[0]["encodes"] == "cpu, Triton"
        site.train_until(lambda: min(versions(syncer)) >= 3, "versions are made of its updates")
        done = site.finish()
        assert done.ledger["merged"] > 0
        assert [note for note in site.events.of("note") if note["note"] in {"digest_differs", "thread_died"}] == []


# --- A rank that owns fragments is lost ------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before it has joined", "while it trains", "before it joins again"])
def test_a_rank_that_is_lost_ends_the_loop_in_words(tmp_path: Path, syncer: Syncer, when: str) -> None:
    site = Site(tmp_path / "a", DirectClient(syncer))
    if when != "before it has joined":
        site.start()
        site.train(2)
    site.agent.owners._gone(3, "killed")
    if when == "before it joins again":
        site.client.training = None
        site.agent.tell(site.agent.listener.attempt())
    with pytest.raises(GroupError, match="rank 3 of this site is gone"):
        site.start() if when == "before it has joined" else site.step()
    site.close()


# --- What a site says beside training --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_syncer_that_answers_no_heartbeat_is_left_where_there_is_another(tmp_path: Path) -> None:
    with serving(tmp_path / "syncer") as syncer, started(tmp_path / "site", syncer) as site:
        beats = lambda: site.client.calls.count("report")  # noqa: E731
        for has_choice in (False, True):
            site.client.has_choice = has_choice
            site.client.before["report"] = away
            before = beats()
            eventually(lambda before=before: beats() > before + UNHEARD_MAX, "heartbeats")
            notes = [event for event in site.events.of("note") if event["note"] == "rejoin"]
            assert len(notes) == int(has_choice), "said once, and the Watch stream stood all the time"
            del site.client.before["report"]
            answered = beats()
            eventually(lambda answered=answered: beats() > answered + 1, "an answer")


def away(**why: str) -> None:
    raise Unreachable("held", **why)


def test_a_bit_that_flips_in_a_base_is_found_and_the_fragment_taken_whole(tmp_path: Path) -> None:
    said, waiting = Events(), {"quorum": 2, "quorum_min": 2}  # No version takes the place of the damaged base.
    with (
        serving(tmp_path / "syncer", said, outer=waiting) as syncer,
        started(tmp_path / "site", syncer, learner={"inner_steps": 100_000}) as site,
    ):
        site.train(2)
        held = site.agent.tensors.base[1]
        assert held is not None
        held.numpy().view("uint32")[2] ^= 1 << 30
        site.train_until(lambda: [e for e in site.events.of("retaken") if "memory" in e["why"]], "the fragment whole")
        (note,) = [event for event in said.of("note") if event["note"] == "base_differs"]
        assert (note["site"], "fragment 1" in note["why"]) == ("a", True)
        assert site.events.of("started_over") == [{"what": "started_over", "fragment": 1}]
        assert [event["whole"] for event in site.events.of("fetched")] == [True] * 3
        assert torch.equal(site.values(1), syncer.holdings.values[1].published)
        site.train(2)
        status = syncer.api.status()["sites"]
        assert isinstance(status, dict)
        assert status["a"]["bases_differed"] == 1
        ledger = site_ledger(site.agent.machine.state)
        assert ledger.balanced()
        assert ledger.overwritten > 0
