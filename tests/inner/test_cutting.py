"""What of a model each of two ranks holds; that they compute what one would is ``test_sharding``'s."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

from diloco.inner.model import ModelOptions, Transformer
from diloco.inner.parallel import SiteGroup, box_of, is_cut
from diloco.inner.sharding import cut_by_shard, cut_by_tensor
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
