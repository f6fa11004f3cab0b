"""Lightning's Trainer as a site: it joins, ends with the run, and goes on from the Trainer's own checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.serving import PATIENT, TOKENS, Served, balanced, batch_loss, cold_model, serving, small_model

pytestmark = [
    pytest.mark.slow,  # Importing lightning alone takes its time.
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Its advice: a checkpoint's folder is not empty.
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # torch's, of what lightning calls.
]


def made(served: Served, folder: Path, model: torch.nn.Module, **settings: Any) -> Any:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader

    from diloco.lightning import DiLoCoCallback

    class Module(LightningModule):  # type: ignore[misc]
        fails_at = -1

        def __init__(self) -> None:
            super().__init__()
            self.inside = model

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            if number == self.fails_at:
                raise OSError("the disk is gone")
            return batch_loss(self.inside, int(batch[0]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    callback = DiLoCoCallback(
        syncer=served.address, site="fra", tokens_per_step=TOKENS, folder=folder / "fra", finish_timeout_s=30.0
    )
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    kept = ModelCheckpoint(folder, "kept", every_n_train_steps=23, enable_version_counter=False)
    usual = {"max_epochs": -1, "default_root_dir": folder, "callbacks": [callback, kept]}
    return Trainer(**{**quiet, **usual, **settings}), Module(), DataLoader(range(1000), batch_size=1), callback


def first() -> torch.nn.Module:
    return torch.nn.ModuleDict({"inside": small_model(1)})


def test_it_goes_on_from_the_trainers_checkpoint_and_the_runs_end_ends_the_training(tmp_path: Path) -> None:
    with serving(tmp_path, "run.tokens=600", PATIENT, model=first()) as served:
        two = {"accumulate_grad_batches": 2}  # A step is the optimizer's, and not a batch.
        trainer, module, loader, callback = made(served, tmp_path, cold_model(), max_steps=23, **two)
        trainer.fit(module, loader)
        assert callback.outer.ledger["merged"] == 23 * TOKENS, "it left in order"
        again, module, loader, callback = made(served, tmp_path, cold_model(), **two)
        again.fit(module, loader, ckpt_path=tmp_path / "kept.ckpt")
    assert callback.outer.why == "the run is finished"
    assert callback.outer.steps == again.global_step >= 60
    assert balanced(callback.outer.ledger)
    assert callback.outer.ledger["processed"] == TOKENS * callback.outer.steps
    assert again.callback_metrics["diloco_progress"] == 1
    assert all(torch.isfinite(each).all() for each in module.parameters())


def test_a_training_that_fails_leaves_with_a_word_and_may_be_begun_again(tmp_path: Path) -> None:
    with serving(tmp_path, "run.tokens=600", PATIENT, model=first()) as served:
        trainer, module, loader, callback = made(served, tmp_path, cold_model())
        module.fails_at = 7
        with pytest.raises(OSError, match="the disk is gone") as failed:
            trainer.fit(module, loader)
        assert "diloco: site fra left run mine while it trained, its tokens: " in failed.value.__notes__[0]
        module.fails_at = -1
        trainer.fit(module, loader)
    assert callback.outer.why == "the run is finished"
    assert balanced(callback.outer.ledger)


def test_a_callback_that_writes_an_average_before_the_site_leaves_is_refused(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging

    for average in (StochasticWeightAveraging(0.01, swa_epoch_start=1), EMAWeightAveraging()):
        trainer, module, loader, callback = made(Served(None, "127.0.0.1:1"), tmp_path, small_model())
        trainer.callbacks.insert(0, average)
        with pytest.raises(ValueError, match=f"^callbacks has {type(average).__name__}, whose average the site would"):
            trainer.fit(module, loader)
        assert callback.outer is None
