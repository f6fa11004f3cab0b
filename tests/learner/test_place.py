"""What is elsewhere is copied there once, and goes when it goes here."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

from diloco.learner.tensors import HOST, Place, place_of
from tests.learner.elsewhere import Elsewhere


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
