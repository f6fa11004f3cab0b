"""A site says what it holds, and not what it was told."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from diloco.codec.base import digest
from diloco.learner.tensors import HOST, IDLE_SHARE, Echo, Place, SiteTensors, place_of
from diloco.outer.fragments import plan_layout
from diloco.wire.messages import short_digest
from tests.learner.participant import Elsewhere, held
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


# --- What is elsewhere is copied there once, and goes when it goes here ----------------------------------------------


def test_on_the_host_nothing_is_copied() -> None:
    here = torch.ones(3)
    assert Place(HOST).of(here) is here


def test_elsewhere_there_is_one_copy_for_as_long_as_the_original_is_held() -> None:
    place, here = Elsewhere(), torch.arange(5.0)
    there = place.of(here)
    assert there is not here
    assert torch.equal(there, here)
    assert place.of(here) is there
    assert place.of(torch.arange(5.0)) is not there, "equal is not the same"
    gone = weakref.ref(there)
    del there, here
    gc.collect()
    assert gone() is None


def test_a_model_on_one_accelerator_is_there_and_any_other_here() -> None:
    assert place_of([torch.ones(1), torch.ones(2)]).is_host
    assert place_of([torch.ones(1), torch.ones(1, device="meta")]).is_host
    assert place_of([]).is_host


def test_a_thread_of_a_rank_works_on_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    Place(HOST).begin_thread()
    assert used == []
    Place(torch.device("cuda", 3)).begin_thread()
    assert used == [torch.device("cuda", 3)]


@pytest.mark.gpu
def test_training_does_not_wait_for_what_is_beside_it() -> None:
    """Training's stream has long work; a thread beside it sees what was given before, and ends by itself."""
    device = torch.device("cuda", torch.cuda.current_device())
    place = Place(device)
    assert place_of([torch.ones(1, device=device)]).device == device
    here = torch.arange(2.0**22)
    values = torch.zeros(2**22, device=device)
    for _ in range(50):
        values += 1
    found = []

    def beside() -> None:
        there = place.of(here)
        told = place.pinned(2**22, torch.float32)
        with place.beside():
            told.copy_(values + there, non_blocking=True)
        found.append(told)

    thread = threading.Thread(target=beside)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert torch.equal(found[0], here + 50)
    assert found[0].is_pinned()
