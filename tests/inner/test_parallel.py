from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from diloco.inner import GroupError, parallel
from diloco.inner.data import CorpusManifest
from diloco.inner.parallel import PresentGroup, SiteGroup
from diloco.inner.trainer import Verdict
from tests.inner.conftest import run_ranks
from tests.inner.rank_program import build


def test_two_ranks_are_one_process_on_the_double_batch(manifest: CorpusManifest, tmp_path: Path) -> None:
    run_ranks("rank_program", 2, str(manifest.directory), str(tmp_path))
    first, second = (load_file(tmp_path / f"straight-{rank}.safetensors") for rank in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (tmp_path / "losses-0.txt").read_text() == (tmp_path / "losses-1.txt").read_text()

    alone = build(manifest.directory, SiteGroup(device="cpu"), batch_sequences=4)
    losses: list[float] = []
    alone.run(until_step=3, after_step=lambda info: losses.append(info.loss) or Verdict())
    together = [float.fromhex(loss) for loss in (tmp_path / "losses-0.txt").read_text().split()]
    assert together == pytest.approx(losses, rel=1e-6)
    for name, parameter in alone.model.named_parameters():
        assert torch.allclose(first[name], parameter, rtol=1e-4, atol=1e-5), name


def test_one_rank_needs_no_rendezvous_and_sends_nothing() -> None:
    group = SiteGroup(device="cpu")
    model = torch.nn.Linear(2, 2)
    assert group.wrap(model) is model
    tensor = torch.ones(2)
    group.broadcast_(tensor)
    assert tensor.tolist() == [1.0, 1.0]
    assert group.broadcast_small([1, 2]) == [1, 2]
    assert group.all_reduce_sum([1.5, 2.0]) == [1.5, 2.0]
    assert [part.tolist() for part in group.all_gather(tensor)] == [[1.0, 1.0]]
    assert group.all_gather_bytes(b"abc") == [b"abc"]
    assert group.all_gather_bytes(b"") == [b""], "of any length"
    assert group.all_to_all(tensor, [2], [2]).tolist() == [1.0, 1.0]
    group.barrier()
    group.close()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("world", {"world": 0}),
        ("rank", {"rank": 2, "world": 2}),
        ("device", {"device": "tpu"}),
        ("timeout_s", {"timeout_s": 0.0}),
        ("master_port", {"rank": 1, "world": 2, "device": "cpu"}),
    ],
)
def test_a_wrong_argument_is_named(field: str, changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"{field} is "):
        SiteGroup(**changes)  # type: ignore[arg-type]


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
