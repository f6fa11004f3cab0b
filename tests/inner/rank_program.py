"""One rank of a two-rank site, forked by test_parallel: trains, checks the collectives, resumes.

Told: the folder of the prepared corpus, and the one for results.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from diloco.inner import checkpoint
from diloco.inner.data import TokenStream, UnitPlaces, load_manifest
from diloco.inner.parallel import SiteGroup
from tests.inner.conftest import resumed
from tests.inner.spread_program import CASES, build, trained
from tests.inner.test_data import Source


def check_collectives(group: SiteGroup) -> None:
    """Every collective once, with different input on each rank."""
    values = torch.full((3,), float(group.rank + 1))
    group.broadcast_(values, src=1)
    assert values.tolist() == [2.0, 2.0, 2.0]
    strided = torch.full((4, 2), group.rank)[:, 0]
    group.broadcast_(strided)
    assert strided.tolist() == [0, 0, 0, 0]
    assert group.broadcast_small([7, -1, 2**40] if group.is_first else []) == [7, -1, 2**40]
    assert group.broadcast_small([] if group.is_first else [1]) == []
    assert group.all_reduce_sum([float(group.rank)]) == [1.0]
    gathered = group.all_gather(torch.tensor([group.rank], dtype=torch.uint8))
    assert [int(part) for part in gathered] == [0, 1]
    assert group.all_gather_bytes(b"ab" * (1 + group.rank)) == [b"ab", b"abab"]
    mine = torch.arange(3.0) + 10 * group.rank
    come = group.all_to_all(mine[:2], [0, 2], [0, 3]) if group.is_first else group.all_to_all(mine, [3, 0], [2, 0])
    assert come.tolist() == ([10.0, 11.0, 12.0] if group.is_first else [0.0, 1.0])
    assert group.all_to_all(mine[:0], [0, 0], [0, 0]).tolist() == []
    group.all_reduce_sum([0.0])


def check_units(group: SiteGroup, corpus: Path) -> None:
    """Every rank draws what rank 0 is told, and together they draw what one rank would."""
    told = Source(7, 3, 8) if group.is_first else Source()
    drawn = []
    for ranks, source in ((group, told), (SiteGroup(device="cpu"), Source(7, 3, 8))):
        place: dict[str, Any] = {"rank": ranks.rank, "world": ranks.world, "units": UnitPlaces(8, source, ranks)}
        stream = TokenStream(load_manifest(corpus), "train", 16, 8 // ranks.world, seed=3, **place)
        drawn.append([ranks.all_gather(torch.from_numpy(stream.window_indices(cursor))) for cursor in (0, 8, 16)])
    assert [torch.cat(parts).tolist() for parts in drawn[0]] == [whole.tolist() for (whole,) in drawn[1]]
    assert told.asked == ([0, 1, 2] if group.is_first else [])


def main(group: SiteGroup, tell: Callable[[str], None], corpus: Path, out: Path) -> None:
    """Run as one rank; raises when anything differs."""
    check_collectives(group)
    check_units(group, corpus)
    # Other seeds on other ranks: wrapping must bring all to rank 0's values.
    trainer = build(CASES["ddp"], corpus, group, out / "checkpoints", seed=5 + group.rank)
    passes: list[bool] = []
    # What rank 0 says counts, and all of them know it.
    trainer.may_act = lambda: (trainer.step % 2 == 1) == group.is_first
    told = trained(trainer, 3, also=lambda info: passes.append(info.passes))
    (out / f"steps-{group.rank}.json").write_text(json.dumps(told))
    assert passes == [True, False, True]
    newest = checkpoint.latest(out / "checkpoints")
    assert newest is not None
    assert [path for path in newest.entries if path.startswith("random/")] == ["random/0/cpu", "random/1/cpu"]
    first, second = group.all_gather(torch.nn.utils.parameters_to_vector(trainer.model.parameters()))
    assert torch.equal(first, second)
    again = build(CASES["ddp"], corpus, group, out / "checkpoints")
    assert resumed(again).step == 3
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), again.model.parameters(), strict=True))
    tell("done")
