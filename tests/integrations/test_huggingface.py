"""Hugging Face's Trainer as a site: it joins, ends with the run, and goes on from the Trainer's own checkpoint."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integrations.serving import PATIENT, TOKENS, Served, balanced, cold_model, serving, small_model

pytestmark = pytest.mark.slow  # Importing transformers alone takes its time.


class WithLoss(torch.nn.Module):
    """A model in the form that the Trainer wants: its loss is its first output."""

    steps, breaks_at = 0, 0

    def __init__(self) -> None:
        super().__init__()
        self.inside = cold_model()

    def forward(self, inputs: torch.Tensor, wanted: torch.Tensor) -> dict[str, torch.Tensor]:
        self.steps += 1
        if self.steps == self.breaks_at:
            raise KeyboardInterrupt
        return {"loss": torch.nn.functional.mse_loss(self.inside(inputs), wanted)}


def made(served: Served, folder: Path, **settings: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    from diloco.hf import DiLoCoCallback

    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    data = [{"inputs": row, "wanted": row.sum(0, keepdim=True).sin()} for row in inputs]
    usual = {"per_device_train_batch_size": 8, "learning_rate": 0.01, "max_steps": 100_000, "save_strategy": "no"}
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "remove_unused_columns": False, "label_names": []}
    args = TrainingArguments(output_dir=str(folder / "out"), logging_steps=5, **{**usual, **quiet, **settings})
    callback = DiLoCoCallback(
        syncer=served.address, site="fra", tokens_per_step=TOKENS, folder=folder / "fra", finish_timeout_s=30.0
    )
    return Trainer(WithLoss(), args, train_dataset=data, eval_dataset=data[:8], callbacks=[callback]), callback


def first() -> WithLoss:
    model = WithLoss()
    model.inside = small_model(1)
    return model


def test_it_goes_on_from_the_trainers_checkpoint_and_the_runs_end_ends_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(tmp_path, "run.tokens=600", PATIENT, model=first()) as served:
        trainer, callback = made(served, tmp_path, max_steps=23, save_strategy="steps", save_steps=23)
        trainer.train()
        assert callback.outer.ledger["merged"] == 23 * TOKENS, "it left in order"
        kept = tmp_path / "out/checkpoint-23"
        assert (kept / "diloco.pt").is_file()
        again, callback = made(served, tmp_path)
        again.train(resume_from_checkpoint=str(kept))
    assert callback.outer.why == "the run is finished"
    assert callback.outer.steps == again.state.global_step >= 60
    assert balanced(callback.outer.ledger)
    assert callback.outer.ledger["processed"] == TOKENS * callback.outer.steps
    assert "'diloco_progress': '1'" in capsys.readouterr().out
    assert all(torch.isfinite(each).all() for each in again.model.parameters())


def test_a_training_that_was_broken_off_may_be_begun_again(tmp_path: Path) -> None:
    with serving(tmp_path, "run.tokens=600", PATIENT, model=first()) as served:
        trainer, callback = made(served, tmp_path)
        trainer.model.breaks_at = 8
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        before = callback.outer  # A traceback that is kept may hold it, and with it the folder.
        beside = before._agent.threads
        trainer.train()  # As in a notebook: the process is the same, and so is the callback.
        assert not any(thread.is_alive() for thread in beside)
    assert callback.outer.why == "the run is finished"
    assert balanced(callback.outer.ledger)


def test_a_trainer_that_loads_another_model_before_it_leaves_is_refused(tmp_path: Path) -> None:
    best = {"save_strategy": "best", "eval_strategy": "epoch", "metric_for_best_model": "loss"}
    trainer, callback = made(Served(None, "127.0.0.1:1"), tmp_path, load_best_model_at_end=True, **best)
    with pytest.raises(ValueError, match=r"^load_best_model_at_end is True: set it to False: "):
        trainer.train()
    assert callback.outer is None


def test_a_checkpoint_has_the_sites_state_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from diloco.hf import DiLoCoCallback

    callback = DiLoCoCallback(syncer="127.0.0.1:1", site="fra", tokens_per_step=TOKENS)
    callback.outer = SimpleNamespace(state_dict=lambda: {"steps": 7})  # type: ignore[assignment]
    args, state = SimpleNamespace(output_dir=str(tmp_path)), SimpleNamespace(global_step=7)
    (tmp_path / "checkpoint-7").mkdir()
    whole = torch.save

    def cut(found: object, path: Path) -> None:
        whole(found, path)
        path.write_bytes(path.read_bytes()[:100])
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", cut)
    with pytest.raises(KeyboardInterrupt):
        callback.on_save(args, state, SimpleNamespace())  # type: ignore[arg-type]
    assert not (tmp_path / "checkpoint-7/diloco.pt").exists()
    monkeypatch.undo()
    callback.on_save(args, state, SimpleNamespace())  # type: ignore[arg-type]
    assert torch.load(tmp_path / "checkpoint-7/diloco.pt", weights_only=True) == {"steps": 7}
    assert [file.name for file in (tmp_path / "checkpoint-7").iterdir()] == ["diloco.pt"]
