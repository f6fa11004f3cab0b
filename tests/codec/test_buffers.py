"""Memory is used again when nobody can read it any more, and never before."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import torch

from diloco.codec.base import ALIGNMENT, Buffers

NUMEL = 5000


def test_memory_comes_back_when_its_tensor_is_gone() -> None:
    buffers = Buffers(2)
    first = buffers.values(NUMEL).fill_(1.0)
    at = first.data_ptr()
    assert at % ALIGNMENT == 0
    assert buffers.values(NUMEL).data_ptr() != at, "it is in use"
    del first
    taken = {buffers.values(NUMEL).data_ptr() for _ in range(3)}
    held = [buffers.values(NUMEL) for _ in range(2)]
    assert at in taken | {each.data_ptr() for each in held}


@pytest.mark.parametrize(
    "reader",
    [
        lambda values: values[7:9],
        lambda values: values.view(torch.uint8),
        lambda values: values.detach().view(-1, 2)[1],
        lambda values: values.numpy(),
        lambda values: values.numpy()[3:4].view(np.uint8),
        lambda values: values.numpy().data,
        lambda values: memoryview(values.numpy().data)[4:8],
        lambda values: torch.from_numpy(values.numpy()[1:2]),
        lambda values: torch.frombuffer(values.numpy().data, dtype=torch.float32)[2:],
        lambda values: {"held": (values,)},
    ],
)
def test_memory_stays_with_whatever_can_still_read_it(reader: object) -> None:
    buffers = Buffers(8)
    values = buffers.values(NUMEL)
    at = values.data_ptr()
    held = reader(values)  # type: ignore[operator]
    del values
    gc.collect(1)  # What was made here is young; all that a run of tests has imported is not.
    assert buffers.spare_bytes == 0
    others = [buffers.values(NUMEL).fill_(-1.0) for _ in range(4)]
    assert at not in [each.data_ptr() for each in others]
    del held
    gc.collect(1)
    assert buffers.values(NUMEL).data_ptr() == at


def test_a_tensor_that_refers_to_itself_gives_its_memory_back_when_it_is_collected() -> None:
    buffers = Buffers(2)
    values = buffers.values(NUMEL)
    knot: list[object] = [values]
    knot.append(knot)
    del values, knot
    gc.collect(1)
    assert buffers.spare_bytes > 0


def test_no_more_than_the_bound_lies_idle() -> None:
    buffers = Buffers(2)
    held = [buffers.values(NUMEL) for _ in range(5)]
    held.clear()
    assert buffers.spare_bytes == 2 * (4 * NUMEL + ALIGNMENT)
    assert Buffers(0).values(NUMEL).numel() == NUMEL


def test_memory_that_is_too_short_or_far_too_long_is_not_used_and_one_piece_of_it_is_let_go() -> None:
    buffers = Buffers(3)
    held = [buffers.raw(size) for size in (100, 10_000)]
    short, long = (each.data_ptr() for each in held)
    held.clear()
    assert buffers.raw(9_000).data_ptr() == long
    assert buffers.raw(100).data_ptr() == short
    held = [buffers.raw(1000)]
    assert held[0].data_ptr() not in (short, long)
    assert buffers.spare_bytes == 100 + ALIGNMENT, "the longer one was idle for longer"


def test_sizes_and_types_are_as_asked_for() -> None:
    buffers = Buffers(2)
    for numel in (0, 1, 3, 257):
        values, raw = buffers.values(numel), buffers.raw(numel)
        assert (values.shape, values.dtype) == ((numel,), torch.float32)
        assert (raw.shape, raw.dtype) == ((numel,), torch.uint8)
        assert buffers.like(values).shape == values.shape


def test_threads_that_take_and_drop_never_share_memory() -> None:
    buffers, damage = Buffers(4), []

    def work(mine: int) -> None:
        for turn in range(300):
            one, two = buffers.values(NUMEL + turn % 3), buffers.values(NUMEL)
            one.fill_(mine)
            two.fill_(-mine)
            if float(one.sum()) != mine * one.numel() or float(two.sum()) != -mine * NUMEL:
                damage.append(mine)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert damage == []
