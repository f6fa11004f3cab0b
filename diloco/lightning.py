"""Make Lightning's ``Trainer`` a site of a run, with one callback.  Needs ``pip install 'diloco[lightning]'``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diloco.integrations import SiteCallback, required

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    Callback = required("lightning.pytorch", "Callback", "lightning")

__all__ = ["DiLoCoCallback"]


class DiLoCoCallback(SiteCallback, Callback):
    """Makes a ``Trainer`` a site of the run that a syncer serves::

        trainer = Trainer(max_epochs=-1, callbacks=[
            DiLoCoCallback(syncer="host:7077", site="fra", tokens_per_step=8192)])
        trainer.fit(module, loader)

    The arguments are those of ``diloco.join``; ``tokens_per_step`` is the tokens of one optimizer step of the whole
    site: those of a batch x accumulate_grad_batches x devices.  The run's end ends the training: let ``max_epochs`` or
    ``max_steps`` be more than enough.  ``outer`` is the site (its ``progress``, its ``ledger``), and
    ``diloco_progress`` is logged.  Each checkpoint of the Trainer holds the site's state as well, and
    ``fit(ckpt_path=...)`` resumes from it.  Of several optimizers the steps of the last one count.
    """

    _restored: dict[str, Any] | None = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the site's state from the Trainer's checkpoint until the site joins."""
        self._restored = state_dict

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join: the model holds the run's version when training begins.

        ValueError where another callback writes an average into the model before the site leaves: the site would send
        that as its last update.
        """
        for place, each in enumerate(trainer.callbacks):
            kinds = {kind.__name__ for kind in type(each).__mro__}  # By name: not every release has both.
            if "StochasticWeightAveraging" in kinds:
                cure = "use WeightAveraging, after DiLoCoCallback"
            elif "WeightAveraging" in kinds and place < trainer.callbacks.index(self):
                cure = "list it after DiLoCoCallback"
            else:
                continue
            text = f"callbacks has {type(each).__name__}, whose average the site would send as its last update: {cure}"
            raise ValueError(text)
        self.join(pl_module, trainer.optimizers, self._restored or {}, hooks=True)
        self._restored = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Log the run's progress, and end the training when the run has ended."""
        if self.outer is not None:
            pl_module.log("diloco_progress", self.outer.progress)
            trainer.should_stop = trainer.should_stop or self.outer.should_stop

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the run at once, and add the site's token counts to the exception."""
        if self.outer is not None:
            self.outer.__exit__(type(exception), exception, None)
