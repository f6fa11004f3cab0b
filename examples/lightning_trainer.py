"""Lightning's Trainer as a site of a run: one callback.  Needs `pip install 'diloco[lightning]'`.

The program has no code for your model, so version 0 is a file that you make once and that the syncer is started from:

    python examples/lightning_trainer.py init v0.safetensors
    diloco syncer run.name=lightning run.tokens=400e3 outer=diloco outer.quorum=2 outer.inner_steps=20 \
        model.kind=file run.init_from=v0.safetensors cluster.syncer.listen=127.0.0.1:7077
    python examples/lightning_trainer.py 127.0.0.1:7077 fra 0 2
    python examples/lightning_trainer.py 127.0.0.1:7077 iad 1 2
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from lightning.pytorch import LightningModule, Trainer
from plain_loop import BATCH, CONTEXT, Model, batch, text
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

import diloco
from diloco.lightning import DiLoCoCallback


class Text(IterableDataset[tuple[Tensor, Tensor]]):
    """This Python's own sources; no two sites read the same.  Your data set goes here."""

    def __init__(self, site_index: int, num_sites: int) -> None:
        self.data = text(site_index, num_sites)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for step in range(1 << 60):
            yield batch(self.data, step)


class Module(LightningModule):
    """The model of plain_loop.py.  Your module goes here."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def training_step(self, pair: tuple[Tensor, Tensor], number: int) -> Tensor:
        inputs, targets = pair
        loss = functional.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)


def main() -> None:
    torch.manual_seed(0)
    if sys.argv[1] == "init":
        diloco.save_version0(Module(), sys.argv[2])
        return
    syncer, site, index, num_sites = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    callback = DiLoCoCallback(syncer=syncer, site=site, tokens_per_step=BATCH * CONTEXT)
    trainer = Trainer(
        max_epochs=-1,  # The run's end ends the training.
        devices=1,
        gradient_clip_val=1.0,
        callbacks=[callback],
        default_root_dir=f"runs/lightning/{site}",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(Text(index, num_sites), batch_size=None))
    print(f"{site}: {callback.outer.why}; {callback.outer.ledger}", flush=True)


if __name__ == "__main__":
    main()
