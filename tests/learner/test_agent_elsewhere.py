"""A site whose model lies on an accelerator, run on the CPU, with elsewhere.py in the accelerator's place."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.inner import GroupError
from diloco.learner.agent import UNHEARD_MAX
from diloco.sync.progress import site_ledger
from diloco.syncer.server import Syncer
from diloco.wire.messages import ReportInfo, ReportReply, Unreachable, short_digest
from tests.learner.direct import DirectClient, Site, started
from tests.learner.participant import Elsewhere
from tests.learner.test_agent import ALONE, balanced, versions
from tests.syncer.building import Events, eventually, serving


def test_a_model_that_lies_elsewhere_is_trained_and_told_of_as_one_that_lies_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interpreter: None
) -> None:
    """What an accelerator does, on the CPU: updates by the kernels, which the syncer compares with what they say."""
    monkeypatch.setattr("diloco.learner.exchange.place_of", lambda parameters: Elsewhere())
    settings: dict[str, Any] = {"down_codec": "int8", "up_codecs": ["int4"], **ALONE}
    with (
        serving(tmp_path / "syncer", **settings) as syncer,
        started(tmp_path / "a", syncer, up_codec="int4") as site,
    ):
        assert site.events.of("joined")[0]["encodes"] == "cpu, Triton"
        site.train_until(lambda: min(versions(syncer)) >= 3, "versions are made of its updates")
        site.client.training = None
        done = site.agent.finish()
        assert balanced(done.ledger)
        assert done.ledger["merged"] > 0
        assert [note for note in site.events.of("note") if note["note"] in {"digest_differs", "thread_died"}] == []


# --- Rank 0 of a site that has lost a rank which owns fragments ------------------------------------------------------


def test_a_rank_that_is_lost_ends_the_loop_in_words(tmp_path: Path) -> None:
    with serving(tmp_path / "syncer", **ALONE) as syncer, started(tmp_path / "a", syncer) as site:
        site.train(2)
        site.agent._lose("rank 3 of this site is gone: killed")
        with pytest.raises(GroupError, match="rank 3 of this site is gone"):
            site.step()


def test_a_rank_that_is_lost_before_the_site_has_joined_is_not_forgotten(tmp_path: Path) -> None:
    with serving(tmp_path / "syncer", **ALONE) as syncer:
        site = Site(tmp_path / "a", DirectClient(syncer))
        site.agent._lose("rank 3 of this site is gone: killed")
        with pytest.raises(GroupError, match="rank 3 of this site is gone"):
            site.start()
        site.close()


def test_a_rank_that_is_lost_is_not_forgotten_when_the_site_joins_again(tmp_path: Path) -> None:
    with serving(tmp_path / "syncer", **ALONE) as syncer, started(tmp_path / "a", syncer) as site:
        site.train(2)
        site.agent._lose("rank 3 of this site is gone: killed")
        site.client.training = None
        site.agent.join()
        with pytest.raises(GroupError, match="rank 3 of this site is gone"):
            site.step()


# --- What a site says beside training --------------------------------------------------------------------------------


class Overheard(DirectClient):
    """Keeps what the last heartbeat carried."""

    def __init__(self, syncer: Syncer) -> None:
        super().__init__(syncer)
        self.digests: tuple[int, ...] = ()
        self.in_flight = 0

    def report(self, report: ReportInfo) -> ReportReply:
        self.digests, self.in_flight = report.digests, report.tokens_in_flight
        return super().report(report)


def test_heartbeats_echo_the_digests_of_the_bases_that_are_held(tmp_path: Path) -> None:
    with serving(tmp_path / "syncer") as syncer:
        client = Overheard(syncer)
        site = Site(tmp_path / "site", client)
        site.start()
        try:
            published = [short_digest(values.digest) for values in syncer.holdings.values]
            site.train(1)
            eventually(lambda: client.digests == tuple(published), "both digests in a heartbeat")
            held = site.agent.tensors.base[1]
            assert held is not None
            held[0] += 1.0
            eventually(lambda: client.digests[1] not in (0, published[1]), "the change in a heartbeat")
            assert client.digests[0] == published[0]
        finally:
            site.close()


def test_a_heartbeat_that_fails_ends_nothing(tmp_path: Path) -> None:
    with serving(tmp_path / "syncer") as syncer, started(tmp_path / "site", syncer) as site:
        site.client.down.set()
        before = site.client.calls.count("report")
        eventually(lambda: site.client.calls.count("report") > before + 2, "heartbeats into the void")
        site.client.down.clear()
        assert not site.step().stop
        assert len(site.events.wait_for("meter")) > 0


@pytest.mark.slow
def test_a_syncer_that_answers_no_heartbeat_is_left_where_there_is_another(tmp_path: Path) -> None:
    with serving(tmp_path / "syncer") as syncer, started(tmp_path / "site", syncer) as site:
        for has_choice in (False, True):
            site.client.has_choice = has_choice
            site.client.before["report"] = unheard
            before = site.client.calls.count("report")
            eventually(lambda before=before: site.client.calls.count("report") > before + UNHEARD_MAX, "heartbeats")
            notes = [event for event in site.events.of("note") if event["note"] == "rejoin"]
            assert len(notes) == int(has_choice), "said once, and the Watch stream stood all the time"
            del site.client.before["report"]
            answered = site.client.calls.count("report")
            eventually(lambda answered=answered: site.client.calls.count("report") > answered + 1, "an answer")


def unheard() -> None:
    raise Unreachable("held")


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


def test_after_goodbye_a_site_says_what_it_lacks_until_it_lacks_nothing(tmp_path: Path) -> None:
    with serving(tmp_path / "syncer", outer={"quorum": 2, "quorum_min": 2, "final_wait_ns": 50_000_000}) as syncer:
        client = Overheard(syncer)
        site = Site(tmp_path / "site", client)
        site.start()
        site.train(3)
        client.training = None
        finishing = threading.Thread(target=site.agent.finish)  # Nobody else is there: its fates come with the end.
        finishing.start()
        eventually(lambda: syncer.feeds.standing() == (1, {"a"}), "the word that fates are missing")
        assert client.in_flight > 0
        before = client.calls.count("report")
        eventually(lambda: client.calls.count("report") > before + 1, "that word again")
        client.streams[-1].cancel()
        syncer.drain()
        finishing.join(10.0)
        assert not finishing.is_alive()
        assert client.in_flight == 0
        assert syncer.feeds.standing() == (0, frozenset()), "it is waited for no longer"


def test_a_site_that_lacks_nothing_any_more_says_so_at_once(tmp_path: Path) -> None:
    outer = {"quorum": 2, "quorum_min": 2, "final_wait_ns": 50_000_000}
    with serving(tmp_path / "syncer", heartbeat_s=60.0, outer=outer) as syncer:
        client = Overheard(syncer)
        site = Site(tmp_path / "site", client)
        site.start()
        site.train(3)
        client.training = None
        finishing = threading.Thread(target=site.agent.finish)
        finishing.start()
        eventually(lambda: syncer.feeds.standing() == (1, {"a"}), "the word that fates are missing, at once too")
        syncer.drain()
        finishing.join(10.0)
        assert not finishing.is_alive()
        assert client.in_flight == 0
