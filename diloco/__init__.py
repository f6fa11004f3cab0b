"""Train one model across data centres joined by slow, failing links.

Floors, from the bottom; a module imports only from floors below its own:

- ``sync``     who, when, with what weight: two state machines without I/O, without a clock, without torch
- ``outer``    the mathematics between sites: fragments, pseudo-gradients, merging, the outer step, adopting
- ``inner``    a plain trainer for one site, which knows nothing of the other floors
- ``codec``    tensors to bytes and back
- ``wire``     messages, streams, client and service: the only home of gRPC
- ``syncer``   the process that holds the fragments
- ``learner``  the process at a site
- ``sim``      the same state machines under a simulated network and clock
- ``wan``      a far network between processes of one machine
- ``launch``   configuration and command line: the only home of Hydra and the environment

Any training loop takes part in a run by ``diloco.join``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diloco.launch.joined import Outer, SiteFailed
    from diloco.launch.joining import join
    from diloco.launch.model_file import save_version0
    from diloco.learner.options import JoinFailed

__version__ = "0.1.0"
__all__ = ["JoinFailed", "Outer", "SiteFailed", "join", "save_version0"]


def __getattr__(name: str) -> object:
    """What a training loop uses, brought here when it is asked for: ``import diloco`` alone costs nothing."""
    if name in __all__:
        from diloco.launch.forking import let_workers_fork

        let_workers_fork()
    if name in ("Outer", "SiteFailed"):
        from diloco.launch import joined

        return getattr(joined, name)
    if name == "join":
        from diloco.launch import joining

        return joining.join
    if name == "save_version0":
        from diloco.launch import model_file

        return model_file.save_version0
    if name == "JoinFailed":
        from diloco.learner import options

        return options.JoinFailed
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
