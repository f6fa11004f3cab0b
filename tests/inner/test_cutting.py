"""What of a model each of two ranks holds; that they compute what one would is ``test_sharding``'s."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from diloco.inner import GroupError
from diloco.inner.holding import cut_by_shard, cut_by_tensor
from diloco.inner.model import ModelOptions, Transformer
from diloco.inner.parallel import Box, PresentGroup, SiteGroup, alike, box_of, is_cut, is_keeper, local, put
from tests.layouts import heard, ranks

TIED = ModelOptions(vocab_size=258, layers=1, dim=16, heads=2, context=16, tied=True)


def program(group: SiteGroup, tell: Callable[[Any], None]) -> None:
    """The boxes that a rank holds: by tensor parallel, and by ``fully_shard``."""
    mesh = init_device_mesh("cpu", (group.world,), mesh_dim_names=("side",))
    told = {}
    for how in (cut_by_tensor, cut_by_shard):
        model = Transformer(TIED, seed=1)
        how(model, mesh)
        assert model.head.weight is model.embedding.weight, "a tied pair stays one matrix"
        told[how.__name__] = {name: box_of(each).sizes for name, each in model.named_parameters() if is_cut(each)}
    tell(told)


@pytest.fixture(scope="module")
def held() -> dict[str, dict[str, tuple[int, ...]]]:
    with ranks(program, 2) as ends:
        found = [heard(end) for end in ends]
    assert found[0] == found[1], "halves of even matrices"
    return found[0]


def test_columns_of_what_reads_and_rows_of_what_writes(held: dict[str, Any]) -> None:
    hidden = TIED.ffn_dim_used
    attention = {f"blocks.0.attention.{name}.weight": (8, 16) for name in ("query", "key", "value")}
    feed_forward = {f"blocks.0.feed_forward.{name}.weight": (hidden // 2, 16) for name in ("gate", "up")}
    writing = {"blocks.0.attention.output.weight": (16, 8), "blocks.0.feed_forward.down.weight": (16, hidden // 2)}
    assert held["cut_by_tensor"] == {"embedding.weight": (129, 16)} | attention | feed_forward | writing, "and no norm"


def test_fully_sharded_is_every_parameter_by_its_rows(held: dict[str, Any]) -> None:
    whole = dict(Transformer(TIED, seed=1).named_parameters())
    assert held["cut_by_shard"] == {name: (len(each) // 2, *each.shape[1:]) for name, each in whole.items()}


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


# --- The group of ranks that a process finds itself in; two processes of one -----------------------------------------


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
