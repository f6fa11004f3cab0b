"""Make a torchtitan job a site of a run through its command line alone.  Needs ``pip install 'diloco[titan]'``.

Where a torchtitan job takes ``--module llama3 --config llama3_8b``, a site takes the same through this module::

    torchrun --nproc-per-node 8 -m torchtitan.train --module diloco.titan --config llama3.llama3_8b \\
        --diloco.syncer host:7077 --diloco.site fra

``llama3`` is any module that torchtitan's ``--module`` takes, including your own.  In your own module, one line makes
a site's config from another config: ``return diloco.titan.site_of(llama3_8b())``.

The model is torchtitan's, so version 0 is a file: one process writes it once with ``--diloco.version0 v0.safetensors``,
and the syncer starts from it: ``diloco syncer model.kind=file run.init_from=v0.safetensors``.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco.integrations.torchtitan import Site, site_of

__all__ = ["Site", "site_of"]


def __getattr__(name: str) -> Any:
    """Import a public name on first access; for ``MODULE.CONFIG`` return what makes a site's config of that one."""
    if name in __all__:
        from diloco.integrations import torchtitan

        return getattr(torchtitan, name)
    module, dot, config = name.rpartition(".")
    if not dot or not module:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}: a config is MODULE.CONFIG, llama3.llama3_8b"
        )
    if find_spec("torchtitan") is None:
        raise ImportError("diloco.titan needs torchtitan: pip install 'diloco[titan]'")
    from diloco.integrations.torchtitan import site_of

    torchtitans = [] if "." in module else [f"torchtitan.{part}.{module}" for part in ("models", "experiments")]
    for each in [*(f"{each}.config_registry" for each in [*torchtitans, module]), module]:
        try:
            made = getattr(import_module(each), config)
            return lambda: site_of(made())
        except ModuleNotFoundError as error:
            if error.name is None or not f"{each}.".startswith(f"{error.name}."):
                raise  # The module exists; one of its own imports is missing.
    raise AttributeError(f"there is no module {module}: one that torchtitan's --module takes")
