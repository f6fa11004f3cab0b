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
- ``wan``      an emulated wide-area network between processes of one machine
- ``config``   settings, and the options of the packages below made from them: the only package that uses Hydra
- ``observe``  what people and tools see of a run: events, history, live view, report, summary, metrics
- ``models``   find a model and evaluate it
- ``runs``     what runs: a whole run on one machine, a site and its ranks
- ``plan``     what a run would take: bytes, link speeds, intervals, and the share of time spent training
- ``lab``      comparisons of outer rules, and of a run with its simulation
- ``integrations``  other people's training loops as sites
- ``deploy``   files for machines that a cluster manager allocates, and certificates
- ``doctor``   checks of a machine and of the path to a syncer
- ``cli``      the command line

Any training loop joins a run with ``diloco.join``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from diloco.version import __version__

if TYPE_CHECKING:
    from diloco.config.model_files import save_version0
    from diloco.integrations.join import Outer, SiteFailed, join
    from diloco.learner.transfer import JoinFailed

__all__ = ["JoinFailed", "Outer", "SiteFailed", "__version__", "join", "save_version0"]


def __getattr__(name: str) -> object:
    """Import a public name on first access, so that ``import diloco`` alone is cheap."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from diloco.runs.process import let_workers_fork

    let_workers_fork()
    homes = {"save_version0": "diloco.config.model_files", "JoinFailed": "diloco.learner.transfer"}
    return getattr(import_module(homes.get(name, "diloco.integrations.join")), name)
