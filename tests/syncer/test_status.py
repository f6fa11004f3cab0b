"""The status is complete, and made of what JSON can carry."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from diloco.syncer.status import Tally
from diloco.wire.messages import LinkInfo, Refusal, ReportInfo
from tests.syncer.building import RUN, join, push, report, serving, update

TOP = {
    "kernels",
    "run_id",
    "held",
    "units",
    "upstream",
    "lineage",
    "up_seconds",
    "refused_at_the_door",
    "not_ready",
    "backup",
    "calls",
    "payloads_decoded",
    "memory_bytes_max",
    "identity_complaints",
    "wanting",
    "standstill",
    "replication",
    "lease",
    "epoch",
    "phase",
    "ending",
    "run_tokens",
    "progress",
    "fragments",
    "sites",
}
SITE = {
    "status",
    "incarnation",
    "tokens_merged",
    "updates_merged",
    "updates_refused",
    "undecided",
    "held",
    "heard_seconds_ago",
    "step",
    "loss",
    "tokens_per_s",
    "tokens_processed",
    "tokens_in_flight",
    "tokens_unsent",
    "base_versions",
    "staleness",
    "bytes_up",
    "bytes_down",
    "stall_share",
    "payload_bytes_up",
    "payload_bytes_down",
    "updates_corrupt",
    "bases_differed",
    "link",
}
LINK = LinkInfo(80_000_000, 12_500_000, 25_000_000, "int4:32")


def test_it_is_complete_before_and_after_a_site_has_reported(tmp_path: Path) -> None:
    with serving(tmp_path, outer={"quorum": 2, "quorum_min": 2, "token_budget": 1000}) as syncer:
        join(syncer, "a")
        join(syncer, "b")
        push(syncer, *update("a"))
        fields: dict[str, Any] = dict.fromkeys(ReportInfo.__slots__, 0)
        figures = {
            "step": 12,
            "loss": None,
            "train_ns": 200,
            "stall_ns": 50,
            "versions": (),
            "digests": (),
            "link": LINK,
            "units": None,
        }
        syncer.api.report(ReportInfo(**{**fields, "run_id": RUN, "site_id": "b", "incarnation": 1, **figures}))
        status = syncer.api.status()
        assert json.loads(json.dumps(status, allow_nan=False)) == status
    found: Any = status
    assert set(found) == TOP
    assert [set(site) for site in found["sites"].values()] == [SITE, SITE]
    assert found["sites"]["a"]["heard_seconds_ago"] is None
    assert found["sites"]["a"]["step"] is None
    assert found["sites"]["a"]["undecided"] == 1
    assert (found["sites"]["b"]["step"], found["sites"]["b"]["stall_share"]) == (12, 0.25)
    assert (found["sites"]["a"]["link"], found["sites"]["b"]["link"]["rtt_ns"]) == (None, 80_000_000)
    assert found["fragments"][0]["arrived"] == ["a"]
    assert found["fragments"][0]["members"] == ["a", "b"]
    assert found["held"] == [], "this syncer has the whole model"
    assert (found["phase"], found["epoch"], found["ending"], found["progress"]) == ("running", 1, None, 0.0)


def test_what_a_site_that_left_has_in_flight_is_what_is_undecided_here(tmp_path: Path) -> None:
    with serving(tmp_path, outer={"quorum": 2, "quorum_min": 2}) as syncer:
        for site in "ab":
            join(syncer, site)
            syncer.api.report(report(site, tokens_processed=900, tokens_in_flight=700))
        header, payload = update("a")
        push(syncer, header, payload)
        sites: Any = syncer.api.status()["sites"]
        assert sites["a"]["tokens_in_flight"] == 700, "a live site knows better"
        syncer.api.leave("a", 1)
        sites = syncer.api.status()["sites"]
        assert (sites["a"]["status"], sites["b"]["tokens_in_flight"]) == ("left", 700)
        assert sites["a"]["tokens_in_flight"] == header.tokens // 2, "the mean over its fragments, as all its tokens"


def test_what_is_refused_at_the_door_is_never_decoded(tmp_path: Path) -> None:
    header, payload = update()
    with serving(tmp_path, outer={"quorum": 2, "quorum_min": 2}) as syncer:
        join(syncer)
        for wrong in ({"numel": 1}, {"tokens": 0}, {"incarnation": 9}, {"site_id": "nobody"}):
            with contextlib.suppress(Refusal):
                push(syncer, replace(header, **wrong), payload)  # type: ignore[arg-type]
        assert syncer.api.status()["payloads_decoded"] == 0
        push(syncer, header, payload)
        assert syncer.api.status()["payloads_decoded"] == 1
        push(syncer, header, payload)
        assert syncer.api.status()["payloads_decoded"] == 1, "a duplicate is known by its header"


# --- What is counted of a site is counted once, by its name ----------------------------------------------------------


def test_every_site_has_its_own_counts() -> None:
    tally = Tally()
    tally.count("a", payload_bytes_up=10)
    tally.count("a", payload_bytes_up=5)
    tally.count("b", payload_bytes_down=7, updates_corrupt=1)
    sites = tally.sites()
    assert (sites["a"].payload_bytes_up, sites["a"].payload_bytes_down, sites["a"].updates_corrupt) == (15, 0, 0)
    assert (sites["b"].payload_bytes_up, sites["b"].payload_bytes_down, sites["b"].updates_corrupt) == (0, 7, 1)
    sites["a"].payload_bytes_up = 0
    assert tally.sites()["a"].payload_bytes_up == 15, "what was given away is a copy"


def test_a_difference_is_new_once_for_each_version() -> None:
    tally = Tally()
    assert tally.differing("a", {}) == {}
    assert tally.sites() == {}, "a site that says nothing wrong takes no room"
    assert tally.differing("a", {0: 3, 1: 4}) == {0: 3, 1: 4}
    assert tally.differing("a", {0: 3, 1: 5}) == {1: 5}
    assert tally.differing("a", {}) == {}
    assert tally.differing("a", {0: 3}) == {0: 3}, "it was right in between"
    assert tally.sites()["a"].bases_differed == 4


def test_refusals_are_counted_by_their_reason() -> None:
    tally = Tally()
    for why in ("stale", "numel", "stale"):
        tally.refused(why)
    assert tally.refusals() == {"stale": 2, "numel": 1}
