"""Train one model across data centres joined by slow, failing links.

Packages, from the bottom; a module imports only from packages below its own:

- ``sync``     who, when, with what weight: two state machines without I/O, without a clock, without torch
- ``outer``    the mathematics between sites: fragments, pseudo-gradients, merging, the outer step, adopting
- ``inner``    a plain trainer for one site, independent of the other packages
- ``codec``    tensors to bytes and back
- ``wire``     messages, streams, client and service: the only package that imports gRPC
- ``syncer``   the process that holds the fragments
- ``learner``  the process at a site
- ``sim``      the same state machines under a simulated network and clock
- ``plan``     what a run would take: bytes, link speeds, intervals, and the share of time spent training
- ``wan``      an emulated wide-area network between processes of one machine
- ``launch``   configuration and command line: the only package that uses Hydra and reads the environment

Any training loop joins a run with ``diloco.join``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.version import __version__

if TYPE_CHECKING:
    from diloco.launch.joined import Outer, SiteFailed
    from diloco.launch.joining import join
    from diloco.launch.values import save_version0
    from diloco.learner.transfer import JoinFailed

__all__ = ["JoinFailed", "Outer", "SiteFailed", "__version__", "join", "save_version0"]


def __getattr__(name: str) -> object:
    """Import a public name on first access, so that ``import diloco`` alone is cheap."""
    if name in __all__:
        from diloco.launch.process import let_workers_fork

        let_workers_fork()
    if name in ("Outer", "SiteFailed"):
        from diloco.launch import joined

        return getattr(joined, name)
    if name == "join":
        from diloco.launch import joining

        return joining.join
    if name == "save_version0":
        from diloco.launch import values

        return values.save_version0
    if name == "JoinFailed":
        from diloco.learner import transfer

        return transfer.JoinFailed
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
