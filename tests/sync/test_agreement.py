"""What is compared before a byte of a tensor is exchanged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco.sync.options import MAY_CHANGE, OF_THE_SYNCER, PROTOCOL, PROTOCOL_OLDEST, Agreement, disagreement

OURS = Agreement(PROTOCOL, "run-1", 3, "f" * 64, {"outer.lr": "0.7", "model.dim": "64"})


def test_equals_agree() -> None:
    assert disagreement(OURS, replace(OURS)) is None


def test_the_protocol_before_this_one_is_served_and_no_site_is_ahead_of_the_syncer() -> None:
    old = replace(OURS, protocol=PROTOCOL_OLDEST)
    assert disagreement(OURS, old) is None
    assert disagreement(old, OURS) == "protocol is 3 at the site and 2 at the syncer"


def test_a_site_takes_part_whatever_it_has_for_what_the_syncer_alone_goes_by() -> None:
    assert MAY_CHANGE <= OF_THE_SYNCER
    for key in OF_THE_SYNCER:
        for theirs in (OURS.shared, {**OURS.shared, key: "2"}):
            ours = replace(OURS, shared={**OURS.shared, key: "1"})
            assert disagreement(ours, replace(OURS, shared=theirs)) is None


@pytest.mark.parametrize("lineage", [0, 1, 2, 3])
def test_a_site_that_does_not_know_the_present_lineage_yet_agrees(lineage: int) -> None:
    assert disagreement(OURS, replace(OURS, lineage=lineage)) is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"protocol": 4}, "protocol is 4 at the site and 3 at the syncer, which serves 2 as well"),
        ({"protocol": 1}, "protocol is 1 at the site and 3 at the syncer, which serves 2 as well"),
        ({"run_id": "other"}, "run_id is 'other' at the site and 'run-1' at the syncer"),
        (
            {"lineage": 4},
            "lineage is 4 at the site and 3 at the syncer: the run was restored, and this syncer is from before that; "
            "stop the syncer, move its data folder away and take the run up from what is newer: "
            "diloco restore RUN_DIR --from-site SITE_DIR --above 4, or --from BACKUP",
        ),
        ({"shared": {"outer.lr": "0.7", "model.dim": "32"}}, "model.dim is 32 at the site and 64 at the syncer"),
        ({"shared": {"outer.lr": "0.7"}}, "model.dim is not set at the site and 64 at the syncer"),
        (
            {"shared": {**OURS.shared, "data.x": "1"}},
            "data.x is 1 at the site and not set at the syncer",
        ),
        (
            {"layout_fingerprint": "e" * 64},
            f"layout fingerprint is {'e' * 12} at the site and {'f' * 12} at the syncer",
        ),
    ],
)
def test_invariant_15_the_first_difference_is_named_with_both_values(changed: dict[str, object], words: str) -> None:
    assert disagreement(OURS, replace(OURS, **changed)) == words
