"""Rank 0 of a site: it begins and ends in words and in time, and training waits for nothing in between."""

from __future__ import annotations

import builtins
import hashlib
import io
import os
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.codec import native
from diloco.learner import transfer
from diloco.learner.agent import SAMPLES_MAX, Finished, Meter
from diloco.learner.transfer import JoinFailed
from diloco.sync.events import Ending
from diloco.sync.progress import site_ledger
from diloco.sync.state import Status as SiteStatus
from diloco.syncer.server import Syncer
from diloco.wire.channel import Backoff
from diloco.wire.messages import PushHeader, Refused, Status, Unreachable
from diloco.wire.pulling import PulledVersion
from tests.learner.direct import TOKENS, DirectClient, Site, agent_threads, started, undecided, versions
from tests.syncer.building import agreement, eventually, serving

ALONE: dict[str, Any] = {"outer": {"site_timeout_ns": 60_000_000_000}}


def status(syncer: Syncer, site: str = "a") -> SiteStatus:
    return syncer.core.ask(lambda machine: machine.state.sites[site].status)


def balanced(ledger: dict[str, int]) -> bool:
    return ledger["processed"] == sum(value for name, value in ledger.items() if name != "processed")


# --- beginning -------------------------------------------------------------------------------------------------------


def test_a_site_begins_with_the_published_values(tmp_path: Path) -> None:
    with serving(tmp_path / "syncer", **ALONE) as syncer, started(tmp_path / "a", syncer) as site:
        for fragment in (0, 1):
            assert torch.equal(site.values(fragment), syncer.holdings.values[fragment].published)
        assert site.agent.progress() == 0.0
        site.train_until(lambda: min(versions(syncer)) >= 2, "versions are made of its updates")


def test_a_first_fetch_that_takes_longer_than_a_heartbeat_ends_nobody(tmp_path: Path) -> None:
    with serving(tmp_path / "syncer", heartbeat_s=0.05, **ALONE) as syncer:
        client = DirectClient(syncer)
        client.before["pull"] = lambda: time.sleep(0.6)
        site = Site(tmp_path / "a", client)
        site.start()
        assert client.calls.count("report") >= 2
        assert site.events.of("note") == []
        site.train(3)
        site.close()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("unreachable", "the line is cut"),
        ("mismatch", "run_id is 'other' at the site"),
        ("refused", "put out of the run"),
    ],
)
def test_a_join_that_fails_says_which_way_and_leaves_no_thread(tmp_path: Path, kind: str, words: str) -> None:
    with serving(tmp_path / "syncer", **ALONE) as syncer:
        client = DirectClient(syncer)
        agreed = agreement()
        if kind == "unreachable":
            client.down.set()
        elif kind == "mismatch":
            agreed = replace(agreed, run_id="other")
        else:
            with started(tmp_path / "first", syncer):
                pass
            syncer.api.evict("a")
        site = Site(tmp_path / "a", client, agreed=agreed, join_timeout_s=0.7)
        began = time.monotonic()
        with pytest.raises(JoinFailed, match=words) as raised:
            site.start()
        assert raised.value.kind == kind
        assert time.monotonic() - began < 5
        assert agent_threads() == []
        site.close()


def test_a_first_join_that_one_address_refuses_waits_for_the_other_and_says_so_once(tmp_path: Path) -> None:
    with serving(tmp_path / "syncer", **ALONE) as syncer:
        client = DirectClient(syncer)

        def refuse() -> None:
            if client.calls.count("join") <= 2:
                raise Unreachable("not in the permissions; nobody is there", refused="not in the permissions")

        client.before["join"] = refuse
        site = Site(tmp_path / "a", client)
        site.start()
        assert [note["why"] for note in site.events.of("note")] == ["not in the permissions; nobody is there"]
        site.close()
        client = DirectClient(syncer)
        client.before["join"] = lambda: client.calls.clear() or refuse()
        refused = Site(tmp_path / "b", client, join_timeout_s=0.5)
        with pytest.raises(JoinFailed, match="not in the permissions") as raised:
            refused.start()
        assert raised.value.kind == "refused"
        refused.close()


def test_first_versions_that_never_come_are_a_join_that_failed(tmp_path: Path) -> None:
    with serving(tmp_path / "syncer", **ALONE) as syncer:
        client = DirectClient(syncer)

        def cut(pulled: PulledVersion) -> PulledVersion:
            return PulledVersion(replace(pulled.header, digest="0" * 64), pulled.parts)

        client.after_pull = cut
        site = Site(tmp_path / "a", client, join_timeout_s=0.8)
        with pytest.raises(JoinFailed, match="waited in vain for the first versions") as raised:
            site.start()
        assert raised.value.kind == "unreachable"
        assert agent_threads() == []


def test_a_site_that_comes_in_the_last_round_has_a_base_for_the_step_it_ends_with(tmp_path: Path) -> None:
    outer = {"final_wait_ns": 30_000_000_000, "site_timeout_ns": 60_000_000_000}
    with serving(tmp_path / "syncer", outer=outer) as syncer, started(tmp_path / "a", syncer, "a") as first:
        first.train(2)
        syncer.drain()
        client = DirectClient(syncer, "b")
        client.before["pull"] = lambda: time.sleep(0.3)  # The end is told long before the first version is here.
        late = Site(tmp_path / "b", client)
        late.start()
        assert late.step().stop
        client.training = None
        assert balanced(late.agent.finish().ledger)
        first.client.training = None
        first.train_until_stopped()
        assert first.agent.finish().ending == "drained"


# --- training --------------------------------------------------------------------------------------------------------


def test_no_function_of_the_agent_touches_socket_or_file_in_the_training_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``DirectClient`` fails for the network in that thread; everything that opens, writes or sleeps fails here."""
    training = threading.current_thread()
    with serving(tmp_path / "syncer", **ALONE) as syncer, started(tmp_path / "a", syncer) as site:
        opened, fsync, sleep = builtins.open, os.fsync, time.sleep

        def only_beside(real: Any) -> Any:
            def guarded(*args: Any, **kwargs: Any) -> Any:
                assert threading.current_thread() is not training, f"{real} in the training thread"
                return real(*args, **kwargs)

            return guarded

        made: list[int] = []
        for number in range(200):
            sleep(0.002)
            with monkeypatch.context() as patch:
                for owner, name, real in (
                    (builtins, "open", opened),
                    (io, "open", io.open),
                    (os, "open", os.open),
                    (os, "fsync", fsync),
                    (time, "sleep", sleep),
                ):
                    patch.setattr(owner, name, only_beside(real))
                site.step(0.0)
            if number % 20 == 19:
                made = versions(syncer)
        assert max(made) >= 2, "the site exchanged something meanwhile"
        assert len(site.events.of("adopted")) >= 2


def test_training_goes_on_at_full_speed_while_the_syncer_is_away(tmp_path: Path) -> None:
    with serving(tmp_path / "syncer", **ALONE) as syncer, started(tmp_path / "a", syncer) as site:
        site.train_until(lambda: max(versions(syncer)) >= 1, "connected")
        site.client.down.set()
        began, slowest = time.monotonic(), 0.0
        for _ in range(150):
            before = time.perf_counter()
            site.step(0.0)
            slowest = max(slowest, time.perf_counter() - before)
        assert time.monotonic() - began < 15
        assert slowest < 3.0
        reached = max(versions(syncer))
        site.client.down.clear()
        site.train_until(lambda: max(versions(syncer)) > reached, "it goes on by itself when the line is back")


def test_nan_in_the_parameters_is_discarded_and_the_published_values_taken(tmp_path: Path) -> None:
    with serving(tmp_path / "syncer", **ALONE) as syncer, started(tmp_path / "a", syncer) as site:
        site.train_until(lambda: min(versions(syncer)) >= 1, "it takes part")
        for values in site.parameters.values():
            values.fill_(float("nan"))
        site.train_until(
            lambda: all(bool(torch.isfinite(values).all()) for values in site.parameters.values()), "it took them again"
        )
        assert len(site.events.of("retaken")) > 2, "beside the two first versions"
        reached = min(versions(syncer))
        site.train_until(lambda: min(versions(syncer)) > reached, "and it takes part again")
        site.client.training = None
        ledger = site.agent.finish().ledger
        assert ledger["refused"] > 0
        assert balanced(ledger)
    assert all(bool(torch.isfinite(values.theta).all()) for values in syncer.holdings.values)


def test_a_site_whose_training_stays_broken_stops_in_words(tmp_path: Path) -> None:
    with (
        serving(tmp_path / "syncer", **ALONE) as syncer,
        started(tmp_path / "a", syncer, learner={"discards_max": 3}) as site,
    ):
        until = time.monotonic() + 15
        stop = False
        while not stop:
            assert time.monotonic() < until, site.events.all[-5:]
            for values in site.parameters.values():
                values.fill_(float("inf"))
            stop = site.step().stop
        site.client.training = None
        done = site.agent.finish()
        assert done.ending == "failed"
        assert "3 updates of fragment" in done.why
        assert "in a row were non_finite" in done.why
        assert versions(syncer) == [0, 0]


def test_what_the_syncer_finds_not_finite_is_taken_again_too(tmp_path: Path) -> None:
    with serving(tmp_path / "syncer", **ALONE) as syncer, started(tmp_path / "a", syncer) as site:

        def ruin(header: PushHeader, payload: memoryview) -> tuple[PushHeader, memoryview]:
            """As by a codec of the site that lets a NaN through."""
            site.client.before_push = lambda *update: update
            ruined = memoryview(b"\x00\x00\xc0\x7f" + bytes(payload[4:]))
            return replace(header, digest=hashlib.sha256(ruined).hexdigest()), ruined

        begun = len(site.events.of("retaken"))
        site.client.before_push = ruin
        site.train_until(lambda: len(site.events.of("retaken")) > begun, "it takes the published values")
        (note,) = [note for note in site.events.of("note") if note["note"] == "update_discarded"]
        assert "non_finite" in note["why"]
        site.train_until(lambda: min(versions(syncer)) >= 1, "and it takes part again")


def test_a_difference_that_was_damaged_is_put_right_by_the_whole(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"down_codec": "int8", "up_codecs": ["int8"], **ALONE}
    with (
        serving(tmp_path / "syncer", **settings) as syncer,
        started(tmp_path / "a", syncer, up_codec="int8") as site,
    ):
        damaged: list[int] = []

        def damage(pulled: PulledVersion) -> PulledVersion:
            if pulled.header.whole or not pulled.parts or damaged:
                return pulled
            damaged.append(pulled.header.version)
            changed = bytearray(pulled.parts[0])
            changed[-1] ^= 1
            return PulledVersion(pulled.header, (memoryview(changed).toreadonly(), *pulled.parts[1:]))

        site.client.after_pull = damage
        site.train_until(lambda: [n for n in site.events.of("note") if n["note"] == "digest_differs"], "it is noticed")
        assert damaged
        site.train_until(
            lambda: [e for e in site.events.of("fetched") if e["whole"] and e["version"] >= damaged[0]], "fetched whole"
        )
        site.train_until(lambda: [e for e in site.events.of("adopted") if e["version"] >= damaged[0]], "and adopted")


# --- another process, an operator, a user ----------------------------------------------------------------------------


def test_a_process_that_was_replaced_while_it_was_away_stops_in_words(tmp_path: Path) -> None:
    """Its window may be full, so that no push tells it; nobody else does but the refused join."""
    with (
        serving(tmp_path / "syncer", outer={"quorum": 2, "quorum_min": 2}) as syncer,
        started(tmp_path / "a", syncer) as site,
    ):
        site.train_until(
            lambda: syncer.core.ask(lambda m: all(len(li.undecided) == 2 for li in m.state.sites["a"].lines)),
            "its window is full",
        )
        site.client.down.set()
        eventually(lambda: site.events.of("disconnected"), "it noticed")
        newer = Site(tmp_path / "newer", DirectClient(syncer), takeover=True)
        newer.start()
        site.client.down.clear()
        site.train_until_stopped()
        site.client.training = None
        done = site.agent.finish()
        assert done.ending == "failed"
        assert "a newer process speaks for site a" in done.why
        newer.close()


def test_an_evicted_site_stops_in_words(tmp_path: Path) -> None:
    with serving(tmp_path / "syncer", **ALONE) as syncer, started(tmp_path / "a", syncer) as site:
        site.train(3)
        syncer.api.evict("a")
        site.train_until_stopped()
        site.client.training = None
        assert "evicted" in site.agent.finish().why


def test_leave_soon_stops_the_loop_sends_the_rest_and_says_goodbye(tmp_path: Path) -> None:
    with serving(tmp_path / "syncer", **ALONE) as syncer, started(tmp_path / "a", syncer) as site:
        site.train(5)
        site.agent.leave_soon()
        site.train_until_stopped()
        site.client.training = None
        done = site.agent.finish()
        assert (done.ending, done.why) == ("left", "this site was asked to leave")
        every = site.steps * TOKENS
        assert done.ledger == {**dict.fromkeys(done.ledger, 0), "processed": every, "merged": every}
        assert status(syncer) is SiteStatus.LEFT
        assert agent_threads() == []
        (event,) = site.events.of("site_done")
        assert event["ledger"]["tokens_merged"] == done.ledger["merged"]


def test_a_goodbye_is_not_taken_back_by_a_line_that_breaks_afterwards(tmp_path: Path) -> None:
    with (
        serving(tmp_path / "syncer", outer={"quorum": 2, "quorum_min": 2}) as syncer,
        started(tmp_path / "a", syncer, finish_timeout_s=1.5) as site,
    ):
        site.train(3)
        site.client.training = None
        finishing = threading.Thread(target=site.agent.finish)  # Its fates will not come: nobody else is there.
        finishing.start()
        eventually(lambda: status(syncer) is SiteStatus.LEFT, "goodbye is said")
        site.client.streams[-1].cancel()
        eventually(lambda: len(site.client.streams) >= 2, "it listens again")
        finishing.join(10.0)
        assert not finishing.is_alive()
        assert site.client.calls.count("join") == 1
        assert status(syncer) is SiteStatus.LEFT


# --- ending ----------------------------------------------------------------------------------------------------------


def test_a_run_that_ends_ends_its_sites_with_nothing_left(tmp_path: Path) -> None:
    outer = {"token_budget": 400, "site_timeout_ns": 60_000_000_000}
    with serving(tmp_path / "syncer", outer=outer) as syncer, started(tmp_path / "a", syncer) as site:
        site.train_until_stopped()
        site.client.training = None
        done = site.agent.finish()
        assert (done.ending, done.ledger["unsent"], done.ledger["in_flight"]) == ("finished", 0, 0)
        assert balanced(done.ledger)
        assert syncer.wait(10.0) is Ending.FINISHED


@pytest.mark.parametrize("cut", ["before the end", "for the last update only"])
def test_finishing_is_bounded_when_the_syncer_is_away(tmp_path: Path, cut: str) -> None:
    with (
        serving(tmp_path / "syncer", **ALONE) as syncer,
        started(tmp_path / "a", syncer, finish_timeout_s=0.8) as site,
    ):
        site.train(6)
        site.client.down.set()
        if cut == "before the end":
            site.train(6)
        site.client.training = None
        began = time.monotonic()
        done = site.agent.finish()
        assert time.monotonic() - began < 6
        assert done.ending == "left"
        assert done.ledger["unsent"] + done.ledger["in_flight"] > 0
        assert balanced(done.ledger)
        assert agent_threads() == []
        site.agent.close()


def test_a_close_in_the_middle_leaves_no_thread(tmp_path: Path) -> None:
    with serving(tmp_path / "syncer", **ALONE) as syncer:
        for _ in range(3):
            site = Site(tmp_path / "a", DirectClient(syncer))
            site.start()
            site.train(3)
            began = time.monotonic()
            site.close()
            site.close()
            assert time.monotonic() - began < 5
            assert agent_threads() == []


def test_a_thread_that_dies_stops_the_site_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    died: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    with serving(tmp_path / "syncer", **ALONE) as syncer, started(tmp_path / "a", syncer) as site:
        monkeypatch.setattr(
            site.agent.outbox, "put", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error"))
        )
        site.train_until_stopped()
        site.client.training = None
        done = site.agent.finish()
        assert done.ending == "failed"
        assert "Input/output error" in done.why
        assert [note["note"] for note in site.events.of("note")] == ["thread_died"]
    assert len(died) == 1


def test_a_failure_at_the_very_end_is_not_hidden_behind_the_end_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with serving(tmp_path / "syncer", **ALONE) as syncer, started(tmp_path / "a", syncer) as site:
        site.train(1)
        site.agent.leave_soon()
        monkeypatch.setattr(
            site.agent.outbox, "put", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error"))
        )
        site.train_until_stopped()
        site.client.training = None
        began = time.monotonic()
        done = site.agent.finish()
        assert done.ending == "failed"
        assert "Input/output error" in done.why
        assert time.monotonic() - began < 5.0, "it waited for what could not come"


# --- a new process at the same site ----------------------------------------------------------------------------------


def restarted(folder: Path, syncer: Syncer, checkpoint: tuple[Any, Any], parameters: Any, steps: int) -> Site:
    site = Site(folder, DirectClient(syncer), restored=checkpoint, parameters=parameters)
    site.steps = steps
    site.start()
    return site


@pytest.mark.parametrize("outbox", ["whole", "damaged", "lost"])
def test_a_restart_from_a_checkpoint_loses_only_what_came_after_it(tmp_path: Path, outbox: str) -> None:
    with serving(tmp_path / "syncer", **ALONE) as syncer:
        first = Site(tmp_path / "a", DirectClient(syncer))
        first.start()
        parts = first.agent.machine.state.fragments
        room = lambda: all(len(part.in_flight) < 2 for part in parts)  # noqa: E731  # For one more of each.
        first.train_until(lambda: min(versions(syncer)) >= 1 and room(), "it takes part")
        eventually(lambda: not any(part.unanswered() for part in parts), "nothing is on its way")
        first.client.down.set()
        eventually(lambda: first.events.of("disconnected"), "it noticed")
        first.train(8)  # Updates are sealed and cannot be sent.
        waiting = lambda: [sent.state for part in parts for sent in part.in_flight if sent.state != "accepted"]  # noqa: E731
        eventually(lambda: waiting() == ["sealed"] * len(first.agent.outbox.digests()), "they wait")
        assert waiting()
        tensors, meta = first.agent.state()
        tensors = {name: values.clone() for name, values in tensors.items()}
        parameters = {name: values.clone() for name, values in first.parameters.items()}
        steps = first.steps
        first.train(2)
        first.close()
        for path in (tmp_path / "a" / "outbox").glob("*.update"):
            if outbox == "damaged":
                path.write_bytes(path.read_bytes()[:-1] + b"!")
            elif outbox == "lost":
                path.unlink()
        again = restarted(tmp_path / "a", syncer, (tensors, meta), parameters, steps)
        (resumed,) = again.events.of("resumed")
        assert resumed == {"what": "resumed", "step": steps, "tokens_lost": 2 * TOKENS}
        again.train(4)
        again.client.training = None
        done = again.agent.finish()
        assert balanced(done.ledger)
        assert done.ledger["lost"] == 2 * TOKENS
        assert done.ledger["merged"] == done.ledger["processed"] - 2 * TOKENS


def test_a_cold_restart_counts_what_its_processes_did_as_lost_or_merged(tmp_path: Path) -> None:
    with serving(tmp_path / "syncer", **ALONE) as syncer:
        with started(tmp_path / "a", syncer) as first:
            first.train_until(lambda: min(versions(syncer)) >= 1, "it takes part")
        eventually(lambda: not undecided(syncer), "no version is made any more")
        with started(tmp_path / "a", syncer) as again:
            assert again.events.of("joined")[0]["incarnation"] == 2
            assert again.events.of("joined")[0]["kernels"] == native.description()
            assert again.events.of("joined")[0]["encodes"] == "host"
            for fragment in (0, 1):
                assert torch.equal(again.values(fragment), syncer.holdings.values[fragment].published)
            again.train(3)
            again.client.training = None
            done = again.agent.finish()
            assert done.ledger["processed"] == (first.steps + 3) * TOKENS
            assert balanced(done.ledger)


# --- A syncer that is away for long ends no site, stops no training and costs no token -------------------------------

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


# --- The meter counts every step, however long the run, and little is kept for its percentiles -----------------------

MS = 1_000_000


def test_nothing_was_trained_yet() -> None:
    reading = Meter().read()
    assert (reading.inner_steps, reading.tokens, reading.train_s, reading.loss, reading.tokens_per_s) == (
        0,
        0,
        0,
        None,
        0,
    )
    assert (reading.step_s_p50, reading.step_s_p95, reading.step_s_max) == (0, 0, 0)


def test_totals_and_percentiles_of_a_short_run_are_exact() -> None:
    meter = Meter()
    for number in range(1, 101):
        meter.step(number * MS, 7, 2.0)
        meter.stalled(number * 1000, number * 10)
    reading = meter.read()
    assert (reading.inner_steps, reading.tokens) == (100, 700)
    assert (reading.step_s_p50, reading.step_s_p95, reading.step_s_max) == (0.051, 0.096, 0.1)
    assert reading.stall_s == 5050 * 1e-6
    assert reading.adopt_s == 50500e-9
    assert reading.after_step_s_max == 100e-6
    assert reading.loss == 2.0


def test_a_long_run_is_counted_to_the_end_and_sampled_evenly() -> None:
    meter, count = Meter(), 5 * SAMPLES_MAX + 17
    for number in range(count):
        meter.step(2 * MS if number < count // 2 else 4 * MS, 1, 1.0)
    meter.step(9 * MS, 1, 1.0)
    reading = meter.read()
    assert (reading.inner_steps, reading.tokens) == (count + 1, count + 1)
    assert reading.step_s_max == 0.009, "the slowest step is remembered whether or not it was sampled"
    assert reading.step_s_p95 == 0.004
    assert len(meter._samples_ns) < SAMPLES_MAX
    late = sum(sample == 4 * MS for sample in meter._samples_ns) / len(meter._samples_ns)
    assert 0.45 < late < 0.55, late


def test_the_time_of_training_ends_with_the_loop() -> None:
    meter = Meter()
    meter.step(10 * MS, 100, 1.0)
    time.sleep(0.02)
    meter.end()
    first = meter.read()
    time.sleep(0.05)
    meter.end()
    again = meter.read()
    assert first.train_s == again.train_s
    assert 0.03 <= first.train_s < 10
    assert again.tokens_per_s == 100 / first.train_s


def test_a_loss_that_was_no_number_is_got_over() -> None:
    meter = Meter()
    for loss in (4.0, float("nan"), 2.0, 2.0):
        meter.step(MS, 1, loss)
    assert meter.read().loss == 2.0


def test_readers_and_the_training_thread_do_not_disturb_each_other() -> None:
    meter, done = Meter(), threading.Event()

    def read() -> None:
        while not done.is_set():
            meter.read()

    reader = threading.Thread(target=read)
    reader.start()
    slowest = 0.0
    for _ in range(20_000):
        began = time.perf_counter()
        meter.step(MS, 1, 1.0)
        slowest = max(slowest, time.perf_counter() - began)
    done.set()
    reader.join(10.0)
    assert meter.read().inner_steps == 20_000
    assert slowest < 1.0


# --- How a site's part begins badly, or ends -------------------------------------------------------------------------


def test_what_failed_says_its_kind_and_its_words() -> None:
    error = JoinFailed("mismatch", "run_id is 'a' at the site and 'b' at the syncer")
    assert (error.kind, error.text, str(error)) == ("mismatch", error.text, error.text)
    assert Finished("left", "asked", {"lost": 0}) == Finished("left", "asked", {"lost": 0})
