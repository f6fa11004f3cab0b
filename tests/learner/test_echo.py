"""A site says what it holds, and not what it was told."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from diloco.codec.base import digest
from diloco.learner.tensors import IDLE_SHARE, Echo, SiteTensors
from diloco.outer.fragments import plan_layout
from diloco.wire.messages import short_digest
from tests.learner.held import held
from tests.syncer.building import dice

TOLD = digest(dice("x", 0))


class Clock:
    def __init__(self) -> None:
        self.now_s, self.passes_s = 100.0, 0.0

    def __call__(self) -> float:
        self.now_s += self.passes_s
        return self.now_s


def echo_of(bases: Sequence[Tensor | None], told: str = TOLD, clock: Clock | None = None) -> tuple[Echo, SiteTensors]:
    layout = plan_layout([(f"p{index}", (4,)) for index in range(len(bases))], len(bases))
    tensors = SiteTensors(layout, held({name: torch.zeros(shape) for name, shape in layout.parameters}), "rebase", 0.5)
    tensors.base, tensors.told_base = list(bases), [told] * len(bases)
    tensors.base_versions = [10 + index for index in range(len(bases))]
    return Echo(tensors, threading.Condition(), clock or Clock()), tensors


def test_fragments_take_turns_and_a_digest_stands_for_the_very_tensor_it_was_made_of() -> None:
    echo, tensors = echo_of([dice("x", 0), dice("y", 1)])
    first, second = short_digest(digest(dice("x", 0))), short_digest(digest(dice("y", 1)))
    assert echo.digests() == (0, 0)
    assert echo.compute() == (0, 10, first)
    assert echo.digests() == (first, 0)
    assert echo.compute() == (1, 11, second)
    assert echo.digests() == (first, second)
    tensors.base[0] = dice("x", 0)
    assert echo.digests() == (0, second), "another tensor lies there now"
    assert echo.compute() == (0, 10, first)


def test_one_flipped_bit_shows() -> None:
    values = dice("x", 0)
    values.numpy().view("uint32")[3] ^= 1
    echo, _ = echo_of([values])
    echo.compute()
    assert echo.digests() != (short_digest(digest(dice("x", 0))),)


def test_a_site_that_has_no_base_yet_says_nothing() -> None:
    echo, _ = echo_of([None])
    assert echo.compute() is None
    assert echo.digests() == (0,)


def test_it_is_in_the_form_of_what_was_told_and_nothing_is_said_where_nothing_was() -> None:
    values = dice("x", 0)
    echo, _ = echo_of([values], "0" * 64)
    echo.compute()
    assert echo.digests() == (short_digest(digest(values, like="0" * 64)),)
    echo, _ = echo_of([values], "")
    assert echo.compute() == (0, 10, 0)


def test_hashing_takes_a_bounded_share_of_the_time() -> None:
    clock = Clock()
    echo, _ = echo_of([dice("x", 0)], clock=clock)
    clock.passes_s = 2.0
    assert echo.compute() is not None
    clock.passes_s = 0.0
    clock.now_s += IDLE_SHARE * 2.0 - 0.1
    assert echo.compute() is None
    clock.now_s += 0.2
    assert echo.compute() is not None
