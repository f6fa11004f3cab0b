"""``diloco standby``: run a second syncer that follows the first, and send an operator's commands to either."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.cli.status import asking, leading, syncer_address
from diloco.cli.syncer import serve, starting, write_config
from diloco.config.arguments import goes_on, limit_threads, load_config, parted, settings_parser
from diloco.config.compose import check_trackers
from diloco.config.errors import ConfigError, ExitCode, VerbError, failing, refusing, require
from diloco.config.placing import syncer_dir
from diloco.observe.console import identity_lines, lines_to
from diloco.observe.eventlog import EventLog
from diloco.observe.text import standby_line
from diloco.open_files import raise_limit
from diloco.runs.process import Stopping, disk_from_environment, limit_arenas

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from diloco.config.run_dir import RunDir
    from diloco.config.schema import RunConfig
    from diloco.syncer.standby import StandingBy, Warm

WORDS = ("follow", "promote", "detach", "status")
WAIT_S = 0.1


def main(arguments: Sequence[str]) -> ExitCode:
    """Follow a syncer as its standby, and take over from it.

      diloco syncer         run.name=otter ... cluster.replication.mode=sync
      diloco standby follow run.name=otter ... cluster.standby.primary=fra:7077 cluster.syncer.listen=iad:7077
      diloco site           run.name=otter ... site.syncer=fra:7077,iad:7077
      diloco standby status  iad:7077        whether it follows, and how far it is
      diloco standby promote iad:7077        take over: the first syncer is gone for good, or cut off
      diloco standby detach  fra:7077        tell the syncer to continue without a standby until one has caught up

    With cluster.replication.mode=sync the syncer acknowledges nothing before the standby has it.  While the standby is
    away it acknowledges nothing at all, and says so, until the standby is back or detached.  With async,
    acknowledgements do not wait for the standby, and while it is away nothing waits: then losing the syncer's disk
    loses what came since.

    promote is refused while the syncer is still heard, and where the standby may lack what a site was told (mode async,
    a detached standby, or one that was started again and has not heard the syncer since).  --lossy promotes it anyway:
    it begins a new lineage with what it has, sites move to it, and what only the other syncer has is lost.  With
    cluster.lease the lease says which process has everything.

    follow takes the settings of `diloco syncer`. A promoted standby is that syncer, at the same address, with the same
    exit codes. Its epoch is larger, so sites that have joined it never go back to the old one. It needs
    cluster.replication itself, for the next standby, which begins with an empty folder. Ctrl-C while it follows: exit
    75, and the same command resumes. When the run has finished and the syncer has stopped it exits with 0. Where they
    authenticate callers: site.token_file=... site.tls_ca=...
    """
    parser = settings_parser("standby", main.__doc__)
    parser.usage = "diloco standby follow|promote|detach|status [HOST:PORT] [--lossy] [--json] [key=value ...]"
    parser.add_argument(
        "--lossy",
        action="store_true",
        help="promote: also where it may lack acknowledged data, or while it still hears the syncer",
    )
    parser.add_argument("--json", action="store_true", help="status: print the standby's answer as JSON")
    given = parser.parse_args(arguments)
    words, given.settings = parted(given.settings)
    if not words or words[0] not in WORDS:
        raise ConfigError(f"give one of {', '.join(WORDS)}")
    what, *targets = words
    for option, user in (("lossy", "promote"), ("json", "status")):
        if getattr(given, option) and what != user:
            raise ConfigError(f"--{option} is not an option of {what}")
    if len(targets) != (what != "follow"):
        wanted = "no HOST:PORT, but settings" if what == "follow" else "one HOST:PORT"
        raise ConfigError(f"{what} takes {wanted}")
    if what == "follow":
        return _follow(given)
    address, found = leading(syncer_address(targets[0]), given.settings)
    standbys = [each for each, status in found.items() if status.get("role") == "standby"]
    if what != "detach" and standbys:  # Of a syncer and its standby, these are the standby's.
        address = standbys[0]
    return _say(what, address, given)


# --- an operator's commands -----------------------------------------------------------------------------------------


def _say(what: str, address: str, given: argparse.Namespace) -> ExitCode:
    with asking(address, given.settings, address) as client:
        if what == "promote":
            client.promote(lossy=given.lossy)
            print(f"{address} takes over")
        elif what == "detach":
            client.detach()
            print(f"{address} continues without a standby, until one has caught up")
            print("a standby that is away now misses updates, and may not know it: promote it only with --lossy")
        elif given.json:
            print(json.dumps(client.status(), sort_keys=True))
        elif (status := client.status()).get("role") == "standby":
            print(standby_line(status))
        else:
            raise VerbError(ExitCode.FAILED, f"{address} is the syncer, not a standby: see `diloco status {address}`")
    return ExitCode.OK


# --- following ------------------------------------------------------------------------------------------------------


def _follow(given: argparse.Namespace) -> ExitCode:
    config = load_config(given)
    if config.run.name is None:
        raise ConfigError("run.name is null: give the name that `diloco syncer` printed")
    limit_threads(1)  # For one torch operation: a round itself uses several threads, each for a range of values.
    limit_arenas()
    raise_limit()
    run_dir = syncer_dir(config)
    config = goes_on(config, run_dir.config, given)

    from diloco.config import build_syncer, connecting, regional

    build_syncer.check(config)
    connecting.check_listen(config)
    processes = config.cluster.syncer.processes
    require(processes == 1, "cluster.syncer.processes", processes, "1: a standby follows one syncer")
    check_trackers(config.run.track)
    build_syncer.standby_primary(config)
    folder = Path(config.cluster.syncer.folder or run_dir.root / config.cluster.standby.name)
    build_syncer.check_backup(config, run_dir, folder)
    write_config(config, run_dir, given, over=False)
    config.cluster.syncer.folder = str(folder)
    if regional.is_region(config):
        regional.run_above(config, folder)
    warm = _followed(config, run_dir)
    if isinstance(warm, ExitCode):
        return warm
    with closing(warm.taken):
        run_dir.move_to(folder)  # Before the new syncer publishes: the old folder is stale then.
        print(f"took over in {folder}")
        if warm.mode and config.cluster.replication.mode == "off":  # It goes on as the syncer did that it followed.
            config.cluster.replication.mode = warm.mode
            given.settings.append(f"cluster.replication.mode={warm.mode}")
        return serve(config, run_dir, given, warm)


def _followed(config: RunConfig, run_dir: RunDir) -> Warm | ExitCode:
    """Follow until a promotion, the end of the run or a requested stop; print which of the latter two it was."""
    from diloco.observe.metrics import page_at, standby_metrics
    from diloco.syncer.server import check_site
    from diloco.syncer.standby import StandbyError

    primary, name = config.cluster.standby.primary, config.cluster.standby.name
    log = EventLog(run_dir.events, name, also=identity_lines(lines_to(sys.stderr, name)))
    standing = _standing_by(config, log)
    families = partial(standby_metrics, config, standing.status)
    try:
        with (
            starting("give the standby a folder of its own, by cluster.standby.name"),
            failing(StandbyError),
            Stopping("the standby stops") as stopping,
            page_at("cluster.syncer.metrics", config.cluster.syncer.metrics, families, log.emit) as page,
        ):
            stopping.ask()
            address = standing.start()
            print(f"standby {name} of run {config.run.name} follows {primary}, and answers at {address}", flush=True)
            print(f"it takes over on the command  diloco standby promote {address}", flush=True)
            if page:
                print(f"metrics at {page}, and those of the syncer once it has taken over", flush=True)
            while not stopping.asked and not standing.ended:
                if (state := standing.standby.state()) is not None:
                    check_site(state, config.upstream.site_id or "")
                began = time.monotonic()
                warm = standing.wait(WAIT_S)
                if warm is not None:
                    log.emit("promoted", {"seconds": round(time.monotonic() - began, 3)})
                    return warm
        if standing.ended:
            print(f"run {config.run.name} has finished and its syncer has stopped: there is nothing to stand by for")
            return ExitCode.OK
        print(f"standby {name} has stopped; the same command resumes it")
        return ExitCode.DRAINED
    finally:
        standing.stop()
        log.close()


def _standing_by(config: RunConfig, log: EventLog) -> StandingBy:
    from diloco.config import build, build_syncer, connecting
    from diloco.syncer.standby import Standby, StandingBy
    from diloco.wire.client import FollowClient

    primary = config.cluster.standby.primary
    with refusing(ValueError, OSError, begin=f"cluster.standby.primary is {primary!r}: "):
        client = FollowClient(primary, connecting.site_security(config))
    run_dir, disk = syncer_dir(config), disk_from_environment()
    standby = Standby(
        config.cluster.standby.name,
        build_syncer.syncer_options(config, run_dir),
        build_syncer.plan(config, build.layout_of(config)),
        client,
        log.emit,
        disk,
    )
    return StandingBy(
        standby,
        primary,
        connecting.server_options(config),
        connecting.syncer_security(config),
        build_syncer.lease(config, disk),
    )
