from __future__ import annotations

import numpy as np
import pytest

from diloco.inner.data import permuted


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 100, 1000, 4097])
def test_every_place_comes_once(size: int) -> None:
    for key in ("a", "b"):
        assert sorted(permuted(np.arange(size), size, key).tolist()) == list(range(size)), (size, key)


def test_the_key_decides_and_a_single_place_can_be_asked_for() -> None:
    whole = permuted(np.arange(500), 500, "a")
    assert not np.array_equal(whole, permuted(np.arange(500), 500, "b"))
    assert all(int(permuted(np.array([at]), 500, "a")[0]) == whole[at] for at in range(0, 500, 37))


def test_neighbours_are_torn_apart() -> None:
    size = 4000
    order = permuted(np.arange(size), size, "seed 7")
    assert abs(float(np.corrcoef(np.arange(size), order)[0, 1])) < 0.06
    assert np.mean(np.abs(np.diff(order)) == 1) < 0.01
    # Neighbours of a shuffled list lie a third of the list apart on average.
    assert float(np.mean(np.abs(np.diff(order)))) == pytest.approx(size / 3, rel=0.05)


def test_large_sizes_need_no_memory() -> None:
    size = 10**15 + 1
    placed = permuted(np.array([0, 1, size - 1]), size, "big")
    assert len(set(placed.tolist())) == 3
    assert ((placed >= 0) & (placed < size)).all()
