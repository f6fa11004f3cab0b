"""Who may take a lease, in words where not; and the guard of one that is held."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

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
    lead,
    remembered,
    standing_of,
)
from diloco.syncer.store import Store
from tests.syncer.building import Events, new_syncer
from tests.syncer.leases import FIRST

TTL_S = 10.0
STANDING = Standing(epoch=5, lineage=2, holder="first", heir="second")
RELEASED = replace(STANDING, released=True)
SECOND = Claim("second", 5, 2, by_itself=True)
TAKEN = next_standing(STANDING, SECOND)


@pytest.mark.parametrize(
    ("standing", "claim", "why"),
    [
        (STANDING, Claim("first", 5, 2), None),
        (STANDING, Claim("second", 5, 2), None),
        (STANDING, SECOND, None),
        (STANDING, Claim("first", 5, 2, by_itself=True), None),
        (STANDING, Claim("third", 5, 2), "first led the run last, in epoch 5 of lineage 2, and its heir is second"),
        (STANDING, Claim("first", 5, 1), "may lack"),
        (STANDING, Claim("third", 5, 3), None),
        (STANDING, Claim("third", 5, 3, by_itself=True), "not the heir"),
        # An heir does not take over by itself from a syncer that stopped in order.
        (RELEASED, Claim("second", 5, 2), None),
        (RELEASED, SECOND, "not the heir"),
        # A standby that took it and did not live to know takes it again: the first may not, and none would lead.
        (TAKEN, SECOND, None),
        (replace(TAKEN, released=True), SECOND, "not the heir"),
        # One that has gone is made anew only for a folder that never had one.
        (None, FIRST, None),
        (None, Claim("first", 5, 1), "there is no lease at the place"),
        (None, Claim("second", 0, 1, anew=True, by_itself=True), "not the heir"),
    ],
)
def test_the_holder_its_heir_and_a_later_lineage_may_have_it(
    standing: Standing | None, claim: Claim, why: str | None
) -> None:
    found = refusal(standing, claim, "the place")
    assert found is None if why is None else found is not None and why in found, found
    following = next_standing(standing, claim)  # Its epoch is larger than any that lease or folder knows.
    assert following.epoch == max(standing.epoch if standing else 0, claim.epoch) + 1
    assert (following.lineage, following.holder) == (claim.lineage, claim.name)


def test_a_standing_that_is_none_is_named() -> None:
    assert standing_of(asdict(STANDING), "here") == STANDING
    wrong: dict[str, tuple[object, ...]] = {
        "epoch": (0, "5", True, 1 << 63),
        "lineage": (-1,),
        "holder": ("", 7),
        "heir": (None, "x" * 65),
        "released": (0,),
    }
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(LeaseError, match=name):
                standing_of({**asdict(STANDING), name: value}, "here")
    with pytest.raises(LeaseError, match="no object"):
        standing_of([1], "here")


# --- The guard -------------------------------------------------------------------------------------------------------


class Hand:
    """A lease in a test: what is answered is said beforehand."""

    place, ttl_s = "here", TTL_S

    def __init__(self) -> None:
        self.now_s, self.takes_s = 50.0, 0.0
        self.answer: bool | LeaseError = True
        self.renewals, self.marks = list[None](), list[str]()
        self.released = False

    def clock(self) -> int:
        return round(self.now_s * 1e9)

    def change(self, own: Standing, heir: str | None = None, released: bool = False) -> bool:
        if released:
            self.released = True
            return True
        (self.renewals if heir is None else self.marks).append(heir)
        self.now_s += self.takes_s
        if isinstance(self.answer, LeaseError):
            raise self.answer
        return self.answer


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.fixture
def guard(hand: Hand) -> LeaseHolder:
    return LeaseHolder(hand, Standing(3, 1, "first"), hand.clock(), hand.clock)  # type: ignore[arg-type]


def test_an_heir_is_written_down_also_between_slow_renewals(
    hand: Hand, guard: LeaseHolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand.takes_s = TTL_S / 3 + 1.0
    hand.now_s += TTL_S / 3
    guard.name_heir("second")
    monkeypatch.setattr(guard, "emit", lambda what, facts: guard._stopping.set())  # The first note is of the heir.
    guard.step()
    assert (hand.renewals, hand.marks) == ([None], ["second"])


def test_it_is_valid_from_the_instant_at_which_the_renewal_was_sent(hand: Hand, guard: LeaseHolder) -> None:
    hand.now_s += 3.3
    guard.step()
    assert not hand.renewals, "it is renewed at a third of its time"
    hand.now_s += 2.6
    assert guard.wanting() is None
    hand.takes_s = 2.0
    guard.step()
    hand.now_s += 3.9
    assert guard.status()["valid"], "sent at 5.9 s, and it is 11.8 s"
    hand.now_s += 0.2
    assert "was not renewed in time" in str(guard.wanting())


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


@pytest.mark.parametrize("by_mark", [False, True])
def test_what_is_lost_stays_lost(hand: Hand, guard: LeaseHolder, by_mark: bool) -> None:
    if by_mark:
        guard.name_heir("second")
    else:
        hand.now_s += 100.0
        assert not guard.status()["valid"], "before the keeper is asked: this process may just have been frozen"
    hand.answer = False
    guard.step()
    with pytest.raises(LeaseLostError, match="epoch 3 is lost"):
        guard.wanting()
    assert (guard.heir_is("") is not None) == by_mark
    hand.answer = True
    guard.step()
    assert not guard.status()["valid"]
    guard.stop(release=True)
    assert not hand.released


def test_an_heir_is_certain_only_when_it_is_written_or_taken_out(hand: Hand, guard: LeaseHolder) -> None:
    assert guard.heir_is("") is None
    guard.name_heir("second")
    assert guard.heir_is("second") is None
    guard.step()
    assert "second" in str(guard.heir_is(""))
    hand.answer = LeaseError("it may or may not be done")
    guard.step()
    assert guard.heir_is("") is not None
    hand.answer = True
    guard.step()
    assert guard.heir_is("") is None
    assert hand.marks == ["second", "", ""]
    hand.answer = LeaseError("a mark that may have been made counts as made")
    guard.name_heir("second")
    guard.step()
    assert (guard.heir_is("") is None, guard.heir_is("second") is None) == (False, True)
    hand.answer = True
    guard.step()
    assert guard.heir_is("") is None
    assert hand.marks[3:] == ["second", ""], "who asked for nobody took the wish back"
    for heir in ("second", "third"):
        guard.name_heir(heir)
        guard.step()
        assert (guard.heir_is(heir), guard.status()["heir"]) == (None, heir)
        assert guard.heir_is("another") is not None
    assert hand.marks[5:] == ["second", "", "third"], "one is taken out before another is named"


# --- Taking it -------------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lease.json"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def led(path: Path | None, folder: Path, epoch: int = 0, ttl_s: float = 60.0) -> LeaseHolder:
    lease = FileLease(path, "run", ttl_s) if path is not None else None
    return lead(lease, store_in(folder), OuterState([FragmentState()], epoch=epoch), wait_s=0.0)


def store_in(folder: Path) -> Store:
    """What a lease needs of one."""
    return SimpleNamespace(folder=folder, disk=PLAIN_DISK, emit=lambda what, facts: None)  # type: ignore[return-value]


def test_a_folder_has_one_name_for_ever_and_no_two_have_the_same(tmp_path: Path, data: Path) -> None:
    (tmp_path / "two").mkdir()
    first = remembered(data, PLAIN_DISK, "a host:/folder!")
    assert first == remembered(data, PLAIN_DISK, "another label")
    assert first.name.startswith("a-host--folder--")
    assert remembered(tmp_path / "two", PLAIN_DISK, "a host:/folder!").name != first.name
    whole = (data / REMEMBERED).read_text()
    for damaged, words in (
        (whole.replace("a-host", "a-hosu"), "is damaged: remove it if no other process leads"),
        ("{", "cannot be read"),
    ):
        (data / REMEMBERED).write_text(damaged)
        with pytest.raises(LeaseRefusedError, match=rf"leadership\.json {words}"):
            remembered(data, PLAIN_DISK)
    (data / REMEMBERED).write_text('{"name": "syncer-1", "place": ""}')  # Of a version that did not remember its home.
    assert remembered(data, PLAIN_DISK).name == "syncer-1"
    assert "home" in json.loads((data / REMEMBERED).read_text()), "from now on it does"
    shutil.copytree(data, tmp_path / "copy")
    assert remembered(tmp_path / "copy", PLAIN_DISK).name != "syncer-1", "it never led, and goes by a name of its own"


def test_it_is_given_back_and_its_folder_led_under_no_other_or_none(tmp_path: Path, path: Path, data: Path) -> None:
    state, lease = OuterState([FragmentState()], epoch=4), FileLease(path, "run", 0.5)
    assert lead(None, store_in(data), state) is None
    guard = led(path, data, epoch=4, ttl_s=0.5)
    assert guard.epoch == 5
    assert guard.status()["valid"]
    guard.stop(release=True)
    standing, _ = lease.read()
    assert standing.released
    known = remembered(data, PLAIN_DISK)
    assert (known.name, known.place) == (standing.holder, lease.place)
    path.rename(tmp_path / "away")
    for other, words in (
        (tmp_path / "b.json", "two leases let two syncers lead"),
        (None, "the settings name none"),
        (path, "there is no lease"),
    ):
        with pytest.raises(LeaseRefusedError, match=words):
            led(other, data)
    assert json.loads((data / REMEMBERED).read_text())["place"] == f"file:{path}"


def test_neither_a_copied_folder_nor_another_gets_it_and_it_is_said_who_has_it(
    tmp_path: Path, path: Path, data: Path
) -> None:
    guard = led(path, data, ttl_s=2.0)
    try:
        shutil.copytree(data, tmp_path / "copy")
        with pytest.raises(LeaseRefusedError, match=r'copied or moved here, .* remove "home" from'):
            led(path, tmp_path / "copy", epoch=1)
        assert guard.status()["valid"]
        (tmp_path / "two").mkdir()
        heir = remembered(tmp_path / "two", PLAIN_DISK).name
        with pytest.raises(LeaseRefusedError, match="led the run last"):
            led(path, tmp_path / "two", ttl_s=2.0)
        guard.name_heir(heir)
        while (standing := FileLease(path, "run", 2.0).read()[0]) is None or standing.heir != heir:
            guard.step()
        with pytest.raises(LeaseRefusedError, match="the run has a syncer"):
            led(path, tmp_path / "two", ttl_s=2.0)
    finally:
        guard.stop(release=False)
    # Where it is the same folder, whoever held the lease under its name has ended: nobody is waited for.
    led(path, data, epoch=1).stop(release=True)


def test_a_start_whose_lease_is_not_renewed_in_time_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "START_WAIT_S", 0.2)
    monkeypatch.setattr(Leadership, "valid", lambda guard, now_ns: False)
    syncer = new_syncer(tmp_path / "run", Events().emit)
    syncer.lease = FileLease(tmp_path / "lease", "run", 60.0)
    with pytest.raises(LeaseError, match="the lease of epoch 1 was not renewed in time"):
        syncer.start()
