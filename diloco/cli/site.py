"""``diloco site``: run one site in this process, in ranks of a torchrun that it starts, or as a rank under another."""

from __future__ import annotations

import math
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from diloco.config import compose as configs
from diloco.config.arguments import goes_on, limit_threads, load_config, settings_parser
from diloco.config.errors import ConfigError, ExitCode, VerbError
from diloco.config.placing import towards
from diloco.config.run_dir import held, run_dir_of
from diloco.open_files import raise_limit
from diloco.runs.memory_folder import check_memory_folder, memory_cleared
from diloco.runs.process import Stopping
from diloco.runs.site_machines import (
    Another,
    First,
    Ranks,
    check_machines,
    ending_of_ranks,
    forget_ending,
    tell_speaker,
)
from diloco.runs.site_rank import Place, has_ended, place_from_environment, run_rank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.config.run_dir import SiteDir
    from diloco.config.schema import RunConfig

DOES = """One site of a run: trains on its share of the text and exchanges updates with the syncer.

  diloco site run.name=nimble-otter site.id=site-b site.syncer=127.0.0.1:7077
  diloco site ... site.nodes=2 site.node_rank=K site.rendezvous=HOST:PORT     (on each of its machines, K from 0)
  torchrun --nproc-per-node 8 -m diloco site --config site.yaml      (a rank reads a resolved file: --print-config)

The same command again goes on from the newest checkpoint.  Ctrl-C once: sends what is unsent and leaves (exit 75, or 0
when the run had finished); twice: at once.  Under your own torchrun it is 0 for both, because
torchrun takes 75 for a failure."""
RANKS_END_S = 30.0
"""How long the other ranks may take to end after rank 0 has recorded its end; a hanging one would take much longer.
If one of them is lost meanwhile, torchrun starts all ranks again, and the new rank 0 withdraws the record in time."""


def main(arguments: Sequence[str]) -> ExitCode:
    """Run the verb."""
    given = settings_parser("site", DOES).parse_args(arguments)
    place = place_from_environment()
    if place is not None and given.config is None:
        raise VerbError(ExitCode.USAGE, "under torchrun, ranks read a resolved file: diloco site --config FILE")
    config = load_config(given)
    if place is not None:
        if config.site.nodes > 1:
            raise ConfigError(f"site.nodes is {config.site.nodes}: not under torchrun, which knows its machines itself")
        config.site.nproc = place.world
    check_identity(config)
    folder = run_dir_of(config).site(config.site.id)
    limit_threads(config.site.threads, deterministic=config.inner.deterministic)
    raise_limit()
    _check(config)
    with ExitStack() as stack:
        if place is None or place.rank == 0:
            own = folder.root if config.site.node_rank == 0 else folder.machine(config.site.node_rank)
            # Before anything in the folder changes: it may be that of a running site.
            stack.enter_context(held(own))
            config = goes_on(config, own / folder.config.name, given)
            configs.write(config, own / folder.config.name)
        if place is None:
            stack.enter_context(memory_cleared(config))
        if place is not None or config.site.nodes == config.site.nproc == 1:
            code, text = run_rank(config, place or Place())
        else:
            code, text = (run_machine if config.site.nodes > 1 else run_ranks)(config, folder)
    if text:
        print(text)
    return ExitCode.OK if place is not None and code is ExitCode.DRAINED else code


def check_identity(config: RunConfig) -> None:
    """Raise ConfigError unless run and site are named, with names that are fit for the wire and for a folder."""
    if config.run.name is None:
        raise ConfigError("run.name is null: give the name that `diloco syncer` printed")
    if not configs.is_name(config.site.id):
        raise ConfigError(f"site.id is {config.site.id!r}: letters, digits, '.', '_' and '-', at most 64")
    if config.site.nproc < 1:
        raise ConfigError(f"site.nproc is {config.site.nproc}: at least 1")
    check_machines(config)
    if config.site.rank_restarts < 0:
        raise ConfigError(f"site.rank_restarts is {config.site.rank_restarts}: 0 (never) or more")


def _check(config: RunConfig) -> None:
    from diloco.config import build, connecting
    from diloco.config.build import check_kernels

    build.check(config)
    towards(config)
    check_kernels(config)
    check_memory_folder(config)
    build.site_share(config)
    connecting.site_security(config)


def run_ranks(config: RunConfig, folder: SiteDir) -> tuple[ExitCode, str]:
    """Start ``site.nproc`` ranks by torchrun and wait for them; return how rank 0 ended."""
    forget_ending(folder)
    ranks = Ranks(config.site.nproc, folder.config, folder.root / "torchrun.log")
    with Stopping(f"{config.site.id} sends what is unsent and leaves") as stopping:
        ranks.start(config.site.rank_restarts)
        stopping.ask(lambda: None)
        told, until = 0, math.inf
        while ranks.code() is None:
            time.sleep(0.05)
            until = min(until, time.monotonic() + RANKS_END_S) if has_ended(folder) else math.inf
            if time.monotonic() > until:
                ranks.kill()
            if stopping.asked:
                # Repeatedly: rank 0 may not have written its process id yet when the signal came; and if ranks are
                # started again, because one was lost while the site was leaving, there is another rank 0.
                told = tell_speaker(folder, told)
    return ending_of_ranks(config.site.id, folder, ranks)


def run_machine(config: RunConfig, folder: SiteDir) -> tuple[ExitCode, str]:
    """Run this machine's part of a site of several machines; return how rank 0 ended, wherever it ran."""
    first = config.site.node_rank == 0
    own = folder.root if first else folder.machine(config.site.node_rank)
    ranks = Ranks(config.site.nproc, own / folder.config.name, own / "torchrun.log")
    with Stopping(f"{config.site.id} sends what is unsent and leaves, on all its machines") as stopping:
        stopping.ask(lambda: None)

        def say(text: str) -> None:
            print(text, file=sys.stderr, flush=True)

        machine = (First if first else Another)(config, folder, ranks, lambda: stopping.asked, say)
        return machine.run()
