"""Seeded permutations of 0 .. size-1 that need no memory: any single place can be asked for.

A balanced Feistel network over the next even number of bits, walked until it lands inside (Black and Rogaway, "Ciphers
with arbitrary finite domains", 2002).  Good shuffling, no secrecy.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROUNDS = 6


def permuted(places: NDArray[np.int64], size: int, key: str) -> NDArray[np.int64]:
    """Where the permutation of 0 .. ``size`` - 1 named by ``key`` puts each of ``places``, int64, same shape."""
    assert size >= 1
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = np.frombuffer(hashlib.shake_256(key.encode()).digest(8 * ROUNDS), dtype="<u8").astype(np.uint64)
    values = places.astype(np.uint64)
    outside = np.ones(values.shape, dtype=bool)
    # The network permutes 0 .. 4^half_bits - 1 and every cycle of it comes back below size, so the walk ends; the
    # domain is less than 4 times (for tiny sizes a few times more) too large, so it is short.
    while outside.any():
        values[outside] = _network(values[outside], np.uint64(half_bits), keys)
        outside = values >= np.uint64(size)
    return values.astype(np.int64)


def _network(values: NDArray[np.uint64], half_bits: np.uint64, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for index in range(len(keys)):
        left, right = right, left ^ (_mixed(right + keys[index]) & mask)
    return (left << half_bits) | right


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), modulo 2^64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
