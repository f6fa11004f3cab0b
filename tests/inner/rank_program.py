"""One rank of a two-rank site, run as a program by test_parallel: trains, checks the collectives, resumes.

Arguments: rank, world, port, folder of the prepared corpus, folder for results.  Under torchrun give rank "env".
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from diloco.inner.data import TokenStream, load_manifest
from diloco.inner.model import ModelOptions, Transformer
from diloco.inner.optimizer import InnerOptions, build_optimizers
from diloco.inner.parallel import SiteGroup
from diloco.inner.trainer import StepInfo, Trainer, TrainerOptions, Verdict


def build(corpus: Path, group: SiteGroup, batch_sequences: int, checkpoint_dir: Path | None = None) -> Trainer:
    """A trainer whose ranks together take the same batches, however many they are."""
    # Other seeds on other ranks: wrapping must bring all to rank 0's values.
    model = Transformer(ModelOptions(vocab_size=257, layers=1, dim=16, heads=2, context=16), seed=group.rank)
    inner = InnerOptions(batch_sequences=batch_sequences, accumulation=2, warmup_steps=2)
    manifest = load_manifest(corpus)
    stream = TokenStream(manifest, "train", 16, batch_sequences, rank=group.rank, world=group.world)
    steps = 2 if checkpoint_dir else 0
    options = TrainerOptions(precision="fp32", deterministic=True, checkpoint_steps=steps)
    # Rank 0 alone knows the run's progress, as a real site does.
    return Trainer(
        model,
        build_optimizers(model, inner),
        stream,
        options,
        group,
        checkpoint_dir=checkpoint_dir,
        progress=lambda: 0.8 if group.is_first else 0.0,
    )


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
    group.barrier()


def main() -> None:
    """Run as one rank; raises (and so exits 1) when anything differs."""
    told, corpus, out = sys.argv[1:4], Path(sys.argv[4]), Path(sys.argv[5])
    names = ("RANK", "WORLD_SIZE", "MASTER_PORT")
    rank, world, port = (int(os.environ[name]) if told[0] == "env" else int(told[i]) for i, name in enumerate(names))
    group = SiteGroup(rank, rank, world, "127.0.0.1", port, device="cpu", timeout_s=240)
    check_collectives(group)
    trainer = build(corpus, group, batch_sequences=2, checkpoint_dir=out / "checkpoints")
    losses: list[float] = []
    # What rank 0 says counts, and all of them know it.
    trainer.may_act = lambda: (trainer.step % 2 == 1) == group.is_first

    def after_step(info: StepInfo) -> Verdict:
        losses.append(info.loss)
        assert info.passes == (info.step % 2 == 1)
        return Verdict()

    trainer.run(until_step=3, after_step=after_step)
    save_file(dict(trainer.model.named_parameters()), out / f"straight-{rank}.safetensors")
    again = build(corpus, group, batch_sequences=2, checkpoint_dir=out / "checkpoints")
    resumed = again.resume()
    assert resumed is not None
    assert resumed.step == 3
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), again.model.parameters(), strict=True))
    (out / f"losses-{rank}.txt").write_text(" ".join(loss.hex() for loss in losses))
    group.close()


if __name__ == "__main__":
    main()
