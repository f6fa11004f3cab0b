"""Other people's training loops as sites, and other people's evaluation of our models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import diloco

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import nn


class SiteCallback:
    """What the callbacks of trainers share: the arguments of ``diloco.join``, and the site as long as one trains."""

    def __init__(self, *, syncer: str, site: str, tokens_per_step: int, **arguments: Any) -> None:
        self._arguments = {"syncer": syncer, "site": site, "tokens_per_step": tokens_per_step, **arguments}
        self.outer: diloco.Outer | None = None

    def join(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer],
        state: Mapping[str, Any],
        *,
        hooks: bool,
    ) -> None:
        """Join the run; from here ``model`` holds its version.  ``state`` is the site's in a checkpoint, or empty."""
        if self.outer is not None:  # A trainer need not report a training that was aborted.
            self.outer.break_off()
        self.outer = diloco.join(model, optimizer, hooks=hooks, **self._arguments)
        self.outer.load_state_dict(state)
        self.outer.start()

    def state_dict(self) -> dict[str, Any]:
        """Return the site's state for the trainer's checkpoint; empty on every rank but 0, and where none trains."""
        return self.outer.state_dict() if self.outer is not None else {}

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Leave the run; unsent work is sent first."""
        if self.outer is not None:
            self.outer.leave()


def required(module: str, name: str, extra: str) -> Any:
    """Return ``name`` of another library's ``module``; ImportError says which ``extra`` of diloco installs it."""
    try:
        return getattr(import_module(module), name)
    except ImportError as error:
        raise ImportError(f"diloco.{extra} needs {module} ({error}): pip install 'diloco[{extra}]'") from error
