from __future__ import annotations

from diloco.sync.state import Part, VersionAbove


def test_a_part_needs_the_values_that_it_rests_on_waits_for_or_takes() -> None:
    one, two, three = (VersionAbove(number, f"payload {number}", "") for number in (1, 2, 3))
    part = Part(base=one, arrived=two, taking=three)
    assert all(part.needs(each.payload) for each in (one, two, three))
    assert not part.needs("payload 4")
    assert not Part().needs("")


def test_a_new_part_has_no_base() -> None:
    assert Part().progress.base_version == -1
