from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from diloco.inner import GroupError, parallel, precision
from diloco.inner.data import CorpusManifest
from diloco.inner.parallel import PresentGroup, SiteGroup
from diloco.inner.precision import (
    autocast_dtype,
    deterministic,
    resolve_precision,
)
from tests.inner import rank_program
from tests.inner.conftest import run_ranks
from tests.inner.spread_program import CASES, build, trained


def test_two_ranks_that_began_differently_are_one_process_on_the_double_batch_and_go_on_from_its_checkpoint(
    manifest: CorpusManifest, tmp_path: Path
) -> None:
    run_ranks(rank_program, 2, manifest.directory, tmp_path)
    alone = trained(build(CASES["ddp"], manifest.directory, SiteGroup(device="cpu")), 3)
    for rank in (0, 1):
        told = json.loads((tmp_path / f"steps-{rank}.json").read_text())
        assert [pytest.approx(each, rel=1e-5) for each in alone] == told


def test_a_group_is_settled_when_its_threads_have_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    group, uses, held = SiteGroup(device="cpu"), [2], []
    group.world, group.backend = 2, "gloo"
    monkeypatch.setattr(dist, "broadcast", lambda tensor, src: held.append(tensor))
    monkeypatch.setattr(torch.Tensor, "_use_count", lambda tensor: uses[0])
    turn = SimpleNamespace(sleep=lambda seconds: uses.__setitem__(0, 1), monotonic=time.monotonic)  # The thread's.
    monkeypatch.setattr(parallel, "time", turn)
    group.broadcast_(torch.ones(3))
    group.settle()
    assert held
    assert uses == [1], "it gave the thread a turn"
    group.settle()


def test_a_process_takes_the_group_that_is_there_and_leaves_it_and_is_alone_where_there_is_none(tmp_path: Path) -> None:
    alone = PresentGroup()
    assert (alone.rank, alone.world, alone.is_first) == (0, 1, True)
    assert alone.all_gather_bytes(b"told") == [b"told"]
    alone.close()
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


# ---  ----------------------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")


@pytest.mark.parametrize(("speed", "wanted"), [(0.02, "fp32"), (1.1, "fp32"), (1.9, "bf16")])
def test_auto_takes_bf16_where_it_is_clearly_faster(monkeypatch: pytest.MonkeyPatch, speed: float, wanted: str) -> None:
    monkeypatch.setattr(precision, "bf16_speed", lambda device: speed)
    group = SiteGroup(device="cpu")
    assert resolve_precision("auto", CPU) == resolve_precision("auto", CPU, group) == wanted
    assert autocast_dtype("auto", CPU) == (torch.bfloat16 if wanted == "bf16" else None)
    assert autocast_dtype("bf16", CPU) == torch.bfloat16
    assert autocast_dtype("fp32", CPU) is None
    with pytest.raises(ValueError, match="precision is 'fp8'"):
        autocast_dtype("fp8", CPU)
    # The slowest rank counts: each makes Muon's step by itself, and all must make the same.
    monkeypatch.setattr(group, "all_reduce_sum", lambda values: [values[0] + 1.0])
    assert resolve_precision("auto", CPU, group) == "fp32"
    assert resolve_precision("bf16", CPU, group) == "bf16"


def test_determinism_holds_inside_and_is_put_back() -> None:
    for enabled in (True, False):
        with deterministic(enabled):
            assert torch.are_deterministic_algorithms_enabled() == enabled
        assert not torch.are_deterministic_algorithms_enabled()
