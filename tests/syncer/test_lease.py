"""Who may take a lease, in words where not."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from diloco.sync.leadership import Claim, Standing, next_standing, refusal
from diloco.syncer.lease import LeaseError, standing_of

STANDING = Standing(epoch=5, lineage=2, holder="first", heir="second")


@pytest.mark.parametrize(
    ("claim", "why"),
    [
        (Claim("first", 5, 2), None),
        (Claim("second", 5, 2), None),
        (Claim("second", 5, 2, by_itself=True), None),
        (Claim("first", 5, 2, by_itself=True), None),
        (Claim("third", 5, 2), "first led the run last, in epoch 5 of lineage 2, and its heir is second"),
        (Claim("first", 5, 1), "may lack"),
        (Claim("third", 5, 3), None),
        (Claim("third", 5, 3, by_itself=True), "not the heir"),
        (Claim("third", 5, 2, by_itself=True), "not the heir"),
    ],
)
def test_the_last_holder_its_heir_and_a_later_lineage_may_have_it(claim: Claim, why: str | None) -> None:
    found = refusal(STANDING, claim, "the place")
    assert found is None if why is None else found is not None and why in found, found


def test_an_heir_does_not_take_over_by_itself_from_a_syncer_that_stopped_in_order() -> None:
    standing = replace(STANDING, released=True)
    assert refusal(standing, Claim("second", 5, 2), "the place") is None
    assert "not the heir" in str(refusal(standing, Claim("second", 5, 2, by_itself=True), "the place"))


def test_a_standby_that_took_it_and_did_not_live_to_know_takes_it_again_by_itself() -> None:
    taken = next_standing(STANDING, Claim("second", 5, 2, by_itself=True))
    again = Claim("second", 5, 2, by_itself=True)
    assert refusal(taken, again, "the place") is None, "the first one may not have it any more: nobody would lead"
    assert "not the heir" in str(refusal(replace(taken, released=True), again, "the place"))


def test_a_lease_that_has_gone_is_made_anew_only_for_a_folder_that_never_had_one() -> None:
    assert refusal(None, Claim("first", 0, 1, anew=True), "the place") is None
    assert "there is no lease at the place" in str(refusal(None, Claim("first", 5, 1), "the place"))
    assert "not the heir" in str(refusal(None, Claim("second", 0, 1, anew=True, by_itself=True), "the place"))


def test_the_epoch_is_larger_than_any_that_the_lease_or_the_folder_knows() -> None:
    assert next_standing(STANDING, Claim("second", 3, 2)) == Standing(6, 2, "second")
    assert next_standing(STANDING, Claim("second", 9, 2)).epoch == 10
    assert next_standing(None, Claim("first", 0, 1, anew=True)).epoch == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epoch", 0),
        ("epoch", "5"),
        ("epoch", True),
        ("epoch", 1 << 63),
        ("lineage", -1),
        ("holder", ""),
        ("holder", 7),
        ("heir", None),
        ("heir", "x" * 65),
        ("released", 0),
    ],
)
def test_a_standing_that_is_none_is_named(name: str, value: object) -> None:
    assert standing_of(asdict(STANDING), "here") == STANDING
    with pytest.raises(LeaseError, match=name):
        standing_of({**asdict(STANDING), name: value}, "here")
    with pytest.raises(LeaseError, match="no object"):
        standing_of([1], "here")
