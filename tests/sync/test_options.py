"""A value that cannot work is refused by name; when a fragment is due; what a site and its syncer must agree on."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import pytest

from diloco.sync.learner import LearnerSync
from diloco.sync.options import (
    MAY_CHANGE,
    OF_THE_SYNCER,
    PROTOCOL,
    PROTOCOL_OLDEST,
    Agreement,
    HealthOptions,
    LearnerOptions,
    OuterOptions,
    disagreement,
    due,
    even_offsets,
)
from tests.sync.driving import MS


@pytest.mark.parametrize("kind", [OuterOptions, LearnerOptions, HealthOptions])
def test_options_refuse_every_number_below_0_and_every_unknown_name_by_field_and_value(kind: type) -> None:
    leased = {} if kind is HealthOptions else {"unit_sequences": 1}
    valid = kind(**leased, **({"sequence_tokens": 1} if kind is LearnerOptions else {}))
    for field in fields(kind):
        wrong = {str: "nonsense", int: -1, float: -1.0}.get(type(getattr(valid, field.name)))
        if wrong is not None:
            with pytest.raises(ValueError, match=rf"{field.name} is {wrong!r}: "):
                replace(valid, **{field.name: wrong})


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        (OuterOptions, {"num_fragments": 0}, "num_fragments is 0: at least 1"),
        (OuterOptions, {"quorum": 0}, "quorum is 0: "),
        (OuterOptions, {"quorum": "most"}, "quorum is 'most': "),
        (OuterOptions, {"quorum": 1, "quorum_min": 2}, "quorum is 1: not below quorum_min=2"),
        (OuterOptions, {"grace_share_percent": 100}, "grace_share_percent is 100: "),
        (OuterOptions, {"site_timeout_ns": 0}, "site_timeout_ns is 0: positive"),
        (OuterOptions, {"fates_kept_max": 19}, "fates_kept_max is 19: "),
        (OuterOptions, {"fates_kept_max": 1025}, "fates_kept_max is 1025: "),
        (
            OuterOptions,
            {"share_weighted": True, "merge_by": "update"},
            "share_weighted is True: only with merge_by=site, because a share is of sites, not of updates",
        ),
        (HealthOptions, {"history_min": 1}, "history_min is 1: 2 to history=16"),
        (HealthOptions, {"history_min": 17}, "history_min is 17: 2 to history=16"),
        (HealthOptions, {"policies": {"fra": "maybe"}}, "admission of site fra is 'maybe': one of "),
        (LearnerOptions, {"unit_sequences": 1, "sequence_tokens": 1, "units_ahead": 4097}, "units_ahead is 4097: "),
        (LearnerOptions, {"offsets": (0, 1)}, "offsets is (0, 1): "),
        (LearnerOptions, {"offsets": (15,)}, "offsets is (15,): "),
        (
            LearnerOptions,
            {"num_fragments": 4, "inner_steps": 3},
            "inner_steps is 3: at least one step for each of num_fragments=4",
        ),
    ],
)
def test_options_name_the_field_the_value_and_what_is_wanted(kind: type, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(words)):
        kind(**given)


# --- When a fragment is due ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fragments", "steps"), [(1, 1), (1, 15), (3, 3), (4, 15), (24, 24), (5, 7)])
def test_every_fragment_is_due_once_in_a_period_no_two_at_once_and_the_load_is_flat(fragments: int, steps: int) -> None:
    places = even_offsets(fragments, steps)
    assert not due(places, steps, 0), "nothing before the first step"
    at = [(step, due(places, steps, step)) for step in range(1, 2 * steps + 1)]
    acts = [(step, found) for step, found in at if found]
    assert [found for _, found in acts] == [(each,) for each in range(fragments)] * 2
    gaps = [later - earlier for (earlier, _), (later, _) in pairwise(acts)]
    assert max(gaps) - min(gaps) <= 1, gaps
    site = LearnerSync(LearnerOptions(num_fragments=fragments, inner_steps=steps))
    for site.state.step in range(2 * steps):
        step = site.state.step
        ahead = next(count for count in range(1, steps + 1) if due(places, steps, step + count))
        assert site.steps_to_act() == ahead, step


@pytest.mark.parametrize(
    ("fastest_ms", "own_ms", "down", "up"),
    [
        (0, 100, 40, 40),
        (100, 0, 40, 40),
        (100, 80, 40, 40),
        (100, 101, 39, 40),
        (100, 150, 26, 27),
        (100, 200, 20, 20),
        (100, 9_999, 1, 1),
    ],
)
def test_19_a_slower_site_makes_fewer_steps_and_at_least_one(fastest_ms: int, own_ms: int, down: int, up: int) -> None:
    """Up, it is HALoS' max(1, ceil(H w)), w being the site's speed by that of the fastest."""
    for rounding, steps in ("down", down), ("up", up):
        site = LearnerSync(LearnerOptions(inner_steps=40, dynamic_steps=True, dynamic_rounding=rounding))
        site.state.fastest_step_ns, site.state.step_ns = fastest_ms * MS, own_ms * MS
        assert site.steps_to_act() == steps, rounding


# --- What is compared before a byte of a tensor is exchanged ---------------------------------------------------------

OURS = Agreement(PROTOCOL, "run-1", 3, "f" * 64, {"outer.lr": "0.7", "model.dim": "64"})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        *[({"lineage": lineage}, None) for lineage in (0, 1, 2, 3)],  # A site may not know the present one yet.
        ({"protocol": PROTOCOL_OLDEST}, None),
        ({"protocol": 4}, "protocol is 4 at the site and 3 at the syncer, which serves 2 as well"),
        ({"protocol": 1}, "protocol is 1 at the site and 3 at the syncer, which serves 2 as well"),
        ({"run_id": "other"}, "run_id is 'other' at the site and 'run-1' at the syncer"),
        (
            {"lineage": 4},
            "lineage is 4 at the site and 3 at the syncer: the run was restored, and this syncer is from before that; "
            "stop the syncer; unless another leads the run now, move its data folder away and take the run up from "
            "what is newer: diloco restore RUN_DIR --from-site SITE_DIR --above 4, or --from BACKUP",
        ),
        ({"shared": {"outer.lr": "0.7", "model.dim": "32"}}, "model.dim is 32 at the site and 64 at the syncer"),
        ({"shared": {"outer.lr": "0.7"}}, "model.dim is not set at the site and 64 at the syncer"),
        ({"shared": {**OURS.shared, "data.x": "1"}}, "data.x is 1 at the site and not set at the syncer"),
        (
            {"layout_fingerprint": "e" * 64},
            f"layout fingerprint is {'e' * 12} at the site and {'f' * 12} at the syncer",
        ),
    ],
)
def test_invariant_15_a_difference_is_named_with_both_values(changed: dict[str, object], words: str | None) -> None:
    assert disagreement(OURS, replace(OURS, **changed)) == words


def test_a_site_takes_part_whatever_it_has_for_what_the_syncer_alone_goes_by_and_is_not_ahead_of_it() -> None:
    assert MAY_CHANGE <= OF_THE_SYNCER
    for key in OF_THE_SYNCER:
        for theirs in (OURS.shared, {**OURS.shared, key: "2"}):
            ours = replace(OURS, shared={**OURS.shared, key: "1"})
            assert disagreement(ours, replace(OURS, shared=theirs)) is None
    old = replace(OURS, protocol=PROTOCOL_OLDEST)
    assert disagreement(old, OURS) == "protocol is 3 at the site and 2 at the syncer"
