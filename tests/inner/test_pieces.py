from __future__ import annotations

import torch

from diloco.inner.parallel import Box, alike, box_of, is_keeper, local, put


def test_boxes_meet_where_both_reach() -> None:
    whole = torch.arange(24).reshape(4, 6)
    one, two = Box((1, 0), (3, 4)), Box((0, 2), (3, 4))
    both = one.within(two)
    assert both == Box((1, 2), (2, 2)) == two.within(one)
    there = whole[one.slices][both.seen_from(one).slices]
    assert there.tolist() == whole[1:3, 2:4].tolist() == whole[two.slices][both.seen_from(two).slices].tolist()
    assert one.within(Box((0, 4), (4, 2))) is None
    assert one.within(Box((2, 2), (0, 2))) is None
    assert Box((2, 2), (0, 2)).is_empty
    assert not one.is_empty


def test_a_number_is_a_box_without_sides() -> None:
    box = box_of(torch.tensor(3.0))
    assert box == Box((), ())
    assert box.within(Box((), ())) == box
    assert not box.is_empty
    assert torch.tensor(3.0)[box.slices].item() == 3.0


def test_of_a_plain_tensor_a_rank_holds_all_and_the_first_speaks_for_it() -> None:
    value = torch.zeros(2, 3, requires_grad=True)
    assert box_of(value) == Box((0, 0), (2, 3))
    put(value, torch.arange(6.0).reshape(2, 3))
    assert local(value).tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert local(value).data_ptr() == value.data_ptr()
    part = torch.ones(2, 3)
    assert alike(value, part) is part
    assert is_keeper(value, {"replicate": 0, "shard": 0, "tensor": 0})
    assert not is_keeper(value, {"replicate": 0, "shard": 1, "tensor": 0})
