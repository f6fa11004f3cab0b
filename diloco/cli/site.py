"""``diloco site``: run one site in this process, in ranks of a torchrun that it starts, or as a rank under another."""

from __future__ import annotations

import math
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from diloco.config import compose as configs
from diloco.config.arguments import goes_on, limit_threads, load_config, print_if_asked, settings_parser
from diloco.config.errors import A_NAME, JOIN_CODES, ConfigError, ExitCode, VerbError, require
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
    import argparse
    from collections.abc import Sequence

    from diloco.config.run_dir import SiteDir
    from diloco.config.schema import RunConfig

RANKS_END_S = 30.0
"""How long the other ranks may take to end after rank 0 has recorded its end; a hanging one would take much longer.
If one of them is lost meanwhile, torchrun starts all ranks again, and the new rank 0 withdraws the record in time."""


def main(arguments: Sequence[str]) -> ExitCode:
    """Train at one site on the text here, and exchange updates with the syncer.

      diloco site site.id=fra site.syncer=127.0.0.1:7077
      diloco site ... site.nodes=2 site.node_rank=K site.rendezvous=HOST:PORT     (on each of its machines, K from 0)
      torchrun --nproc-per-node 8 -m diloco site --config site.yaml      (a rank reads a resolved file: --print-config)

    Settings that the run shares (model, outer rule, codecs, length) come from the syncer; one that contradicts the run
    is refused.  The same command resumes from the newest checkpoint.

    Ctrl-C once sends what is unsent and leaves (exit 75, or 0 when the run had finished; under your own torchrun always
    0, because torchrun takes 75 for a failure); twice stops at once (exit 1).
    """
    given = settings_parser("site", main.__doc__).parse_args(arguments)
    place = place_from_environment()
    if place is not None and given.config is None:
        raise ConfigError("under torchrun, ranks read a resolved file: diloco site --config FILE")
    config = load_config(given, prints=False)
    limit_threads(config.site.threads, deterministic=config.inner.deterministic)  # Before torch is imported.
    if given.config is None:
        if not given.print_config:  # A printed configuration may be for another machine.
            check_identity(config)
            _check_own(config)
        config = _of_the_run(config, given)
    print_if_asked(config, given)
    if place is not None:
        nodes = config.site.nodes
        require(nodes <= 1, "site.nodes", nodes, "not under torchrun, which knows its machines itself")
        config.site.nproc = place.world
    check(config)
    folder = run_dir_of(config).site(config.site.id)
    raise_limit()
    with ExitStack() as stack:
        if place is None or place.rank == 0:
            own = folder.machine(config.site.node_rank)
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


def _of_the_run(config: RunConfig, given: argparse.Namespace) -> RunConfig:
    """Return ``config`` completed by the run's settings from the syncer; VerbError where it does not send them.

    Under ``--print-config``, without an answer, print a note and return ``config`` unchanged.
    """
    from diloco.config.syncer_settings import of_site
    from diloco.learner.transfer import JoinFailed
    from diloco.runs.site_agent import join_text

    try:
        return of_site(given.settings, wait=not given.print_config)
    except ConfigError as error:
        if not given.print_config:
            raise
        text = str(error)
    except JoinFailed as error:
        text = join_text(config, error.kind, error.text)
        if not given.print_config or error.kind != "unreachable":
            raise VerbError(JOIN_CODES[error.kind], text) from error
    print(f"note: without the settings that the run shares, since {text}", file=sys.stderr)
    return config


def check(config: RunConfig) -> None:
    """Raise ConfigError unless this site can take part in its run, which has a name."""
    from diloco.config import build

    if config.run.name is None:
        raise ConfigError("run.name is null: give the name that `diloco syncer` printed")
    check_identity(config)
    _check_own(config)
    build.check(config)
    towards(config)
    build.site_share(config)


def check_identity(config: RunConfig) -> None:
    """Raise ConfigError unless the site has a name fit for the wire and for a folder, and its machines make sense."""
    site = config.site
    require(configs.is_name(site.id), "site.id", site.id, A_NAME)
    require(site.nproc >= 1, "site.nproc", site.nproc, "at least 1")
    check_machines(config)
    require(site.rank_restarts >= 0, "site.rank_restarts", site.rank_restarts, "0 (never) or more")


def _check_own(config: RunConfig) -> None:
    """Raise ConfigError for settings of this machine or of the inner trainer that are wrong for any run."""
    from diloco.config import build, connecting

    build.inner_options(config)
    build.check_kernels(config)
    check_memory_folder(config)
    connecting.site_security(config)


def run_ranks(config: RunConfig, folder: SiteDir) -> tuple[ExitCode, str]:
    """Start ``site.nproc`` ranks by torchrun and wait for them; return how rank 0 ended."""
    forget_ending(folder)
    ranks = Ranks(config.site.nproc, folder.config, folder.root / "torchrun.log")
    with Stopping(f"{config.site.id} sends what is unsent and leaves") as stopping:
        ranks.start(config.site.rank_restarts)
        stopping.ask()
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
    own = folder.machine(config.site.node_rank)
    ranks = Ranks(config.site.nproc, own / folder.config.name, own / "torchrun.log")
    with Stopping(f"{config.site.id} sends what is unsent and leaves, on all its machines") as stopping:
        stopping.ask()
        return (Another if config.site.node_rank else First)(config, folder, ranks, stopping).run()
