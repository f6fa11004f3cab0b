"""The callback of ``diloco.hf``: Hugging Face's ``Trainer`` as a site.  Importing this needs transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from diloco.integrations.join import join

if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from diloco.integrations.join import Outer

STATE = "diloco.pt"


class DiLoCoCallback(TrainerCallback):
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

    def __init__(self, *, syncer: str, site: str, tokens_per_step: int, **arguments: Any) -> None:
        self._arguments = {"syncer": syncer, "site": site, "tokens_per_step": tokens_per_step, **arguments}
        self.outer: Outer | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        **_: Any,
    ) -> None:
        """Join: the model holds the run's version when training begins."""
        if self.outer is not None:  # The Trainer does not report a training that was aborted.
            self.outer.break_off()
        self.outer = join(model, optimizer, hooks=False, **self._arguments)
        kept = _state_of(args, state)
        if state.global_step and kept.is_file():
            self.outer.load_state_dict(torch.load(kept, weights_only=True))
        self.outer.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Account for the optimizer's step, adopt what is due, and end the training when the run has ended."""
        if self.outer is not None and self.outer.step():
            control.should_training_stop = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Add the run's progress to the Trainer's line."""
        if self.outer is not None and logs is not None:
            logs["diloco_progress"] = self.outer.progress

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Write the site's state into the Trainer's checkpoint atomically; the checkpoint is valid without it."""
        found = self.outer.state_dict() if self.outer is not None else {}
        if found:
            there = _state_of(args, state)
            beside = there.with_name(f"{there.name}.new")
            torch.save(found, beside)
            beside.replace(there)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Leave the run; unsent work is sent first."""
        if self.outer is not None:
            self.outer.leave()


def _state_of(args: TrainingArguments, state: TrainerState) -> Path:
    """Return the path of the site's state in the Trainer's checkpoint of this step."""
    return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}" / STATE
