"""Make Hugging Face's ``Trainer`` a site of a run, with one callback.  Needs ``pip install 'diloco[hf]'``.

``from diloco.hf import DiLoCoCallback`` imports transformers; ``import diloco.hf`` alone does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diloco.integrations.huggingface import DiLoCoCallback

__all__ = ["DiLoCoCallback"]


def __getattr__(name: str) -> object:
    if name != "DiLoCoCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from diloco.runs.process import let_workers_fork

    let_workers_fork()
    try:
        from diloco.integrations import huggingface
    except ImportError as error:
        raise ImportError(f"diloco.hf needs transformers and accelerate ({error}): pip install 'diloco[hf]'") from error
    return huggingface.DiLoCoCallback
