"""Make Hugging Face's ``Trainer`` a site of a run, with one callback.  Needs ``pip install 'diloco[hf]'``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from diloco.durable import PLAIN_DISK, Step
from diloco.inner import require
from diloco.integrations import SiteCallback, required

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
else:
    TrainerCallback = required("transformers", "TrainerCallback", "hf")

__all__ = ["DiLoCoCallback"]


class DiLoCoCallback(SiteCallback, TrainerCallback):
    """Makes a ``Trainer`` a site of the run that a syncer serves::

        trainer = Trainer(model, args, train_dataset=data, callbacks=[
            DiLoCoCallback(syncer="host:7077", site="fra", tokens_per_step=8192)])
        trainer.train()

    The arguments are those of ``diloco.join``; ``tokens_per_step`` is the tokens of one optimizer step of the whole
    site: per_device_train_batch_size x gradient_accumulation_steps x processes x the tokens of a sequence.  The run's
    end ends the training: let ``max_steps`` be more than enough.  ``outer`` is the site (its ``progress``, its
    ``ledger``); the lines that the Trainer prints have ``diloco_progress``.  Each checkpoint of the Trainer holds the
    site's state as well, and ``resume_from_checkpoint`` resumes from it, if it is still in ``output_dir``; otherwise
    the site begins with the run's version, and its unsent work counts as lost.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, *_: Any, model: nn.Module, optimizer: Optimizer, **__: Any
    ) -> None:
        """Join: the model holds the run's version when training begins.

        ValueError under ``load_best_model_at_end``: the Trainer loads that model before the site can leave, so the last
        update would undo all that was trained since.
        """
        wanted = "set it to False: the site would send the best checkpoint's weights as its last update"
        require(not args.load_best_model_at_end, "load_best_model_at_end", True, wanted)
        kept = _state_of(args, state)
        resumes = state.global_step and kept.is_file()
        found = torch.load(kept, map_location="cpu", weights_only=True) if resumes else {}
        self.join(model, optimizer, found, hooks=False)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Account for the optimizer's step, adopt what is due, and end the training when the run has ended."""
        if self.outer is not None and self.outer.step():
            control.should_training_stop = True

    def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
        """Add the run's progress to the Trainer's line."""
        if self.outer is not None and logs is not None:
            logs["diloco_progress"] = self.outer.progress

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Write the site's state into the Trainer's checkpoint atomically; the checkpoint is valid without it."""
        if found := self.state_dict():
            PLAIN_DISK.keep(_state_of(args, state), partial(torch.save, found), Step.FILE)


def _state_of(args: TrainingArguments, state: TrainerState) -> Path:
    """Return the path of the site's state in the Trainer's checkpoint of this step."""
    return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}" / "diloco.pt"
