"""The disk of the simulator: what it may do to a file, and what it may not."""

from __future__ import annotations

from random import Random

import pytest

from diloco.sim.world import Damaged, Storage, sealed, unsealed


def after_power_cuts(write: list[tuple[str, ...]], seeds: int = 200) -> set[tuple[tuple[str, bytes], ...]]:
    """Everything that ``write`` may have left."""
    found = set()
    for seed in range(seeds):
        storage = Storage()
        for what, *given in write:
            getattr(storage, what)(
                *(part.encode() if what == "append" and place else part for place, part in enumerate(given))
            )
        storage.power_cut(Random(seed))
        found.add(tuple((name, storage.read(name)) for name in storage.names("")))
    return found


def test_what_is_synced_with_its_name_stays() -> None:
    assert after_power_cuts([("append", "a", "one"), ("sync", "a"), ("sync_names",)]) == {(("a", b"one"),)}


def test_a_name_that_is_not_synced_may_go() -> None:
    assert after_power_cuts([("append", "a", "one"), ("sync", "a")]) == {(), (("a", b"one"),)}


def test_writes_are_lost_torn_and_reordered() -> None:
    begun = [("append", "a", "00"), ("sync", "a"), ("sync_names",), ("append", "a", "11"), ("append", "a", "22")]
    found = {dict(state)["a"] for state in after_power_cuts(begun, 2000)}
    assert found == {
        b"00",
        b"001",
        b"0011",
        b"0011" + b"2",
        b"001122",
        b"00\0\0" + b"2",
        b"00\0\0" + b"22",
        b"001\0" + b"2",
        b"001\0" + b"22",
    }


def test_a_renamed_file_is_the_old_or_the_new_one() -> None:
    begun = [("append", "a", "old"), ("sync", "a"), ("sync_names",)]
    change = [("append", "b", "new"), ("sync", "b"), ("rename", "b", "a")]
    assert {dict(state).get("a") for state in after_power_cuts([*begun, *change])} == {b"old", b"new"}


def test_rot_is_one_bit_until_it_is_mended() -> None:
    storage = Storage()
    assert not storage.rot(Random(0)), "there is nothing to rot"
    storage.append("a", b"some data")
    assert storage.rot(Random(0))
    assert storage.is_rotten()
    changed = [a ^ b for a, b in zip(storage.read("a"), b"some data", strict=True)]
    assert sum(each.bit_count() for each in changed) == 1
    storage.mend()
    assert (storage.read("a"), storage.is_rotten()) == (b"some data", False)


def test_what_was_cut_off_and_written_anew_is_not_mended() -> None:
    storage = Storage()
    storage.append("a", b"x")
    assert storage.rot(Random(0))
    storage.cut("a", 0)
    storage.append("a", b"y")
    storage.mend()
    assert storage.read("a") == b"y"


def test_a_seal_shows_every_flip() -> None:
    whole = sealed(b"data")
    assert unsealed("a", whole) == b"data"
    for place in range(8 * len(whole)):
        broken = bytearray(whole)
        broken[place // 8] ^= 1 << place % 8
        with pytest.raises(Damaged, match="a is damaged"):
            unsealed("a", bytes(broken))


def test_a_missing_file_is_damage() -> None:
    with pytest.raises(Damaged, match="a is missing"):
        Storage().read("a")
