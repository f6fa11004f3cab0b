"""Rank 0 of a site: it begins and ends in words and in time, and training waits for nothing in between."""

from __future__ import annotations

import builtins
import hashlib
import io
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.codec import native
from diloco.learner.transfer import JoinFailed
from diloco.sync.events import Ending
from diloco.sync.state import Status as SiteStatus
from diloco.syncer.server import Syncer
from diloco.wire.messages import PushHeader, Unreachable
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
        newer = Site(tmp_path / "newer", DirectClient(syncer))
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
