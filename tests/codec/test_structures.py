"""Both sides of the C interface mean the same structures."""

from __future__ import annotations

import ctypes

import pytest

from diloco.codec.kernel_library import (
    DecodeJob,
    DigestState,
    EncodeJob,
    FollowJob,
    Format,
    Kind,
    Layout,
    MeasureJob,
    OuterJob,
    Pieces,
    SealJob,
    TakeJob,
    Update,
)
from diloco.codec.native import kernels

# In the order in which the library tells their sizes.
STRUCTURES = (
    *(Format, EncodeJob, DecodeJob, MeasureJob, Update, OuterJob, DigestState, Pieces),
    *(SealJob, FollowJob, TakeJob),
)


def test_sizes_are_those_of_the_library() -> None:
    fast = kernels()
    if fast is None:
        pytest.skip("no compiled kernels here")
    fast.library.diloco_size.restype = ctypes.c_int64
    assert [fast.library.diloco_size(index) for index in range(len(STRUCTURES))] == [
        ctypes.sizeof(structure) for structure in STRUCTURES
    ]
    assert fast.library.diloco_size(len(STRUCTURES)) == -1


def test_a_format_is_a_layout_and_a_size() -> None:
    made = Layout(Kind.INT4, 32).format(2**40)
    assert (made.kind, made.block, made.numel) == (3, 32, 2**40)
