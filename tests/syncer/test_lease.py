"""Who may take a lease, in words where not."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from diloco.durable import PLAIN_DISK
from diloco.sync.leadership import Claim, Leadership, LeaseLostError, Standing, next_standing, refusal
from diloco.sync.state import FragmentState, OuterState
from diloco.syncer import server as server_module
from diloco.syncer.lease import (
    REMEMBERED,
    FileLease,
    LeaseError,
    LeaseHolder,
    LeaseRefusedError,
    claim_of,
    lead,
    remembered,
    standing_of,
)
from tests.syncer.building import new_syncer

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


# --- The guard -------------------------------------------------------------------------------------------------------

TTL_S = 10.0


class Hand:
    """A lease in a test: what is answered is said beforehand."""

    place, ttl_s = "here", TTL_S

    def __init__(self) -> None:
        self.now_s = 50.0
        self.takes_s = 0.0
        self.answer: bool | LeaseError = True
        self.renewals = 0
        self.marks: list[str] = []
        self.released = False

    def clock(self) -> int:
        return round(self.now_s * 1e9)

    def _said(self) -> bool:
        self.now_s += self.takes_s
        if isinstance(self.answer, LeaseError):
            raise self.answer
        return self.answer

    def change(self, own: Standing, heir: str | None = None, released: bool = False) -> bool:
        if released:
            self.released = True
            return True
        if heir is None:
            self.renewals += 1
        else:
            self.marks.append(heir)
        return self._said()


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.fixture
def guard(hand: Hand) -> LeaseHolder:
    return LeaseHolder(hand, Standing(3, 1, "first"), hand.clock(), hand.clock)  # type: ignore[arg-type]


def test_an_heir_is_written_down_also_where_each_renewal_takes_longer_than_until_the_next(
    hand: Hand, guard: LeaseHolder
) -> None:
    hand.takes_s = TTL_S / 3 + 1.0
    hand.now_s += TTL_S / 3
    guard.name_heir("second")
    answers = hand.change

    def change(own: Standing, heir: str | None = None, released: bool = False) -> bool:
        if heir is not None:
            guard._stopping.set()
        return answers(own, heir, released)

    hand.change = change  # type: ignore[method-assign]
    guard.step()
    assert (hand.renewals, hand.marks) == (1, ["second"])


def test_it_is_valid_from_the_instant_at_which_the_renewal_was_sent(hand: Hand, guard: LeaseHolder) -> None:
    hand.now_s += 5.9
    assert guard.wanting() is None
    hand.takes_s = 2.0
    guard.step()
    hand.now_s += 3.9
    assert guard.valid(), "sent at 5.9 s, and it is 11.8 s"
    hand.now_s += 0.2
    assert "was not renewed in time" in str(guard.wanting())


def test_it_is_renewed_at_a_third_of_its_time_and_not_before(hand: Hand, guard: LeaseHolder) -> None:
    hand.now_s += 3.3
    guard.step()
    assert hand.renewals == 0
    hand.now_s += 0.1
    guard.step()
    assert hand.renewals == 1


def test_a_keeper_that_does_not_answer_is_asked_again_soon_and_it_is_said(hand: Hand, guard: LeaseHolder) -> None:
    hand.answer = LeaseError("nobody there")
    hand.now_s += 4.0
    guard.step()
    assert guard.wanting() is None
    hand.now_s += 3.0
    guard.step()
    assert "nobody there" in str(guard.wanting())
    hand.answer = True
    hand.now_s += 1.0
    guard.step()
    assert guard.wanting() is None, "nobody has taken it meanwhile: that is what a renewal says"


def test_what_is_lost_stays_lost(hand: Hand, guard: LeaseHolder) -> None:
    hand.now_s += 100.0
    assert not guard.valid(), "before anybody has asked the keeper: it may just have been frozen"
    hand.answer = False
    guard.step()
    with pytest.raises(LeaseLostError, match="epoch 3 is lost"):
        guard.wanting()
    hand.answer = True
    guard.step()
    assert not guard.valid()
    guard.stop(release=True)
    assert not hand.released


def test_an_heir_is_certain_only_when_it_is_written(hand: Hand, guard: LeaseHolder) -> None:
    assert guard.heir_is("") is None
    guard.name_heir("second")
    assert guard.heir_is("second") is None
    guard.step()
    assert hand.marks == ["second"]
    assert "second" in str(guard.heir_is(""))
    hand.answer = LeaseError("it may or may not be done")
    guard.step()
    assert guard.heir_is("") is not None
    hand.answer = True
    guard.step()
    assert guard.heir_is("") is None
    assert hand.marks == ["second", "", ""]


def test_a_mark_that_may_have_been_made_counts_as_made(hand: Hand, guard: LeaseHolder) -> None:
    hand.answer = LeaseError("it may or may not be done")
    guard.name_heir("second")
    guard.step()
    assert guard.heir_is("") is not None
    assert guard.heir_is("second") is None
    hand.answer = True
    guard.step()
    assert guard.heir_is("") is None
    assert hand.marks == ["second", ""], "who asked for nobody took the wish back"
    guard.name_heir("second")
    guard.step()
    assert guard.status()["heir"] == "second"


def test_one_heir_is_taken_out_before_another_is_named(hand: Hand, guard: LeaseHolder) -> None:
    guard.name_heir("second")
    guard.step()
    assert guard.heir_is("third") is not None
    guard.name_heir("third")
    guard.step()
    assert hand.marks == ["second", "", "third"]
    assert guard.heir_is("third") is None


def test_a_mark_that_is_refused_means_that_the_lease_is_lost(hand: Hand, guard: LeaseHolder) -> None:
    guard.name_heir("second")
    hand.answer = False
    guard.step()
    assert not guard.valid()
    assert guard.heir_is("") is not None


# --- taking it --------------------------------------------------------------------------------------------------------


def state(epoch: int = 0) -> OuterState:
    return OuterState([FragmentState()], epoch=epoch)


def silence(what: str, facts: dict[str, object]) -> None:
    del what, facts


def test_a_folder_has_one_name_for_ever_and_no_two_have_the_same(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    first = remembered(tmp_path / "one", PLAIN_DISK, "a host:/folder!")
    assert first == remembered(tmp_path / "one", PLAIN_DISK, "another label")
    assert first.name.startswith("a-host--folder--")
    assert remembered(tmp_path / "two", PLAIN_DISK, "a host:/folder!").name != first.name
    path = tmp_path / "one" / REMEMBERED
    path.write_text(path.read_text().replace("a-host", "a-hosu"))
    with pytest.raises(LeaseRefusedError, match=r"leadership\.json is damaged: remove it if no other process leads"):
        remembered(tmp_path / "one", PLAIN_DISK)
    (tmp_path / "one" / REMEMBERED).write_text("{")
    with pytest.raises(LeaseRefusedError, match=r"leadership\.json cannot be read"):
        remembered(tmp_path / "one", PLAIN_DISK)


def test_it_is_taken_renewed_and_given_back(tmp_path: Path) -> None:
    lease = FileLease(tmp_path / "lease.json", "run", 0.5)
    (tmp_path / "data").mkdir()
    guard = lead(lease, tmp_path / "data", PLAIN_DISK, state(epoch=4), silence)
    assert guard is not None
    assert guard.epoch == 5
    assert guard.valid()
    guard.stop(release=True)
    standing = lease.read()
    assert standing is not None
    assert standing.released
    claim = claim_of(lease, tmp_path / "data", PLAIN_DISK, state(epoch=5))
    assert (claim.name, claim.anew) == (standing.holder, False)


def test_a_copied_folder_is_not_the_one_that_was_copied(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    (tmp_path / "data").mkdir()
    guard = lead(FileLease(path, "run", 60.0), tmp_path / "data", PLAIN_DISK, state(), silence)
    assert guard is not None
    try:
        shutil.copytree(tmp_path / "data", tmp_path / "copy")
        with pytest.raises(LeaseRefusedError, match=r'copied or moved here, .* remove "home" from'):
            lead(FileLease(path, "run", 60.0), tmp_path / "copy", PLAIN_DISK, state(1), silence, wait_s=0.0)
        assert guard.valid()
    finally:
        guard.stop(release=False)
    # Where it is the same folder, whoever held the lease under its name has ended: nobody is waited for.
    again = lead(FileLease(path, "run", 60.0), tmp_path / "data", PLAIN_DISK, state(1), silence, wait_s=0.0)
    assert again is not None
    again.stop(release=True)


def test_a_folder_of_a_version_that_did_not_remember_its_home_is_taken_for_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / REMEMBERED).write_text('{"name": "syncer-1", "place": ""}')
    assert remembered(tmp_path / "data", PLAIN_DISK).name == "syncer-1"
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    assert "home" in json.loads((tmp_path / "data" / REMEMBERED).read_text()), "from now on it does"
    assert remembered(tmp_path / "copy", PLAIN_DISK).name != "syncer-1", "it never led, and goes by a name of its own"


def test_nobody_else_gets_it_and_it_is_said_who_has_it(tmp_path: Path) -> None:
    lease = FileLease(tmp_path / "lease.json", "run", 2.0)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    guard = lead(lease, tmp_path / "one", PLAIN_DISK, state(), silence)
    assert guard is not None
    try:
        heir = remembered(tmp_path / "two", PLAIN_DISK).name
        with pytest.raises(LeaseRefusedError, match="led the run last"):
            lead(lease, tmp_path / "two", PLAIN_DISK, state(), silence, wait_s=0.0)
        guard.name_heir(heir)
        while (standing := lease.read()) is None or standing.heir != heir:
            guard.step()
        with pytest.raises(LeaseRefusedError, match="the run has a syncer"):
            lead(FileLease(lease.path, "run", 2.0), tmp_path / "two", PLAIN_DISK, state(), silence, wait_s=0.0)
    finally:
        guard.stop(release=True)


def test_a_folder_that_had_a_lease_is_not_led_under_another_or_none(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    assert lead(None, tmp_path / "data", PLAIN_DISK, state(), silence) is None
    guard = lead(FileLease(tmp_path / "a.json", "run", 5.0), tmp_path / "data", PLAIN_DISK, state(), silence)
    assert guard is not None
    guard.stop(release=True)
    with pytest.raises(LeaseRefusedError, match="two leases let two syncers lead"):
        lead(FileLease(tmp_path / "b.json", "run", 5.0), tmp_path / "data", PLAIN_DISK, state(), silence)
    with pytest.raises(LeaseRefusedError, match="the settings name none"):
        lead(None, tmp_path / "data", PLAIN_DISK, state(), silence)
    (tmp_path / "a.json").unlink()
    with pytest.raises(LeaseRefusedError, match="there is no lease"):
        lead(FileLease(tmp_path / "a.json", "run", 5.0), tmp_path / "data", PLAIN_DISK, state(), silence)
    assert json.loads((tmp_path / "data" / REMEMBERED).read_text())["place"] == f"file:{tmp_path / 'a.json'}"


def test_a_start_whose_lease_is_not_renewed_in_time_says_that_and_not_that_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "START_WAIT_S", 0.2)
    monkeypatch.setattr(Leadership, "valid", lambda guard, now_ns: False)
    syncer = new_syncer(tmp_path / "run", silence)
    syncer._lease = FileLease(tmp_path / "lease", "run", 60.0)
    with pytest.raises(LeaseError, match="the lease of epoch 1 was not renewed in time"):
        syncer.start()
