"""The group of ranks that a process finds itself in; two processes of one: tests/integrations/test_join_ranks.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from diloco.inner.checks import GroupError
from diloco.inner.parallel import PresentGroup


def test_alone_where_there_is_no_group() -> None:
    group = PresentGroup()
    assert (group.rank, group.world, group.is_first) == (0, 1, True)
    assert group.all_gather_bytes(b"told") == [b"told"]
    group.close()


def test_it_takes_the_group_that_is_there_and_leaves_it(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        group = PresentGroup()
        assert (group.rank, group.world, group.backend, group.device) == (0, 1, "gloo", torch.device("cpu"))
        group.close()
        assert dist.is_initialized(), "it is its owner's"
        with pytest.raises(GroupError, match="rank 0 of 1 failed in a test: lost"), group.bounded("a test"):
            raise RuntimeError("lost")
    finally:
        dist.destroy_process_group()
