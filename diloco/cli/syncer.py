"""``diloco syncer``: run the program that merges the sites' updates, from its first start to the last version."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.config import compose as configs
from diloco.config.arguments import goes_on, limit_threads, load_config, settings_parser
from diloco.config.compose import check_trackers, quorum
from diloco.config.errors import ConfigError, ExitCode, VerbError, failing, require, section, whole_steps
from diloco.config.placing import BETWEEN, SYNCERS, at, has_several, on_this_machine, syncer_dir, syncer_name
from diloco.config.run_dir import RunDir, name_run, run_dir_of
from diloco.durable import LockedError, write_file
from diloco.observe.console import syncer_log
from diloco.observe.eventlog import recent_events
from diloco.observe.history import versions_in
from diloco.observe.text import whole
from diloco.open_files import raise_limit
from diloco.runs.process import Child, Stopping, disk_from_environment, keep_what_is_loaded, limit_arenas, verb
from diloco.runs.syncers import JOINS, keep_running
from diloco.sync.events import Ending
from diloco.sync.leadership import LeaseLostError
from diloco.sync.options import how_to_restore

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from diloco.config.schema import RunConfig
    from diloco.observe.eventlog import Event
    from diloco.syncer.server import Syncer
    from diloco.syncer.standby import Warm

WAIT_S = 0.2
STOP_S = 2.0
HAND_OVER_S = 10.0
"""How long an upload may continue after a hand-over begins; the site sends a cut one again."""
FROM_SETTINGS = ("address is", "tokens_file", "permissions", "revoked_file", "tls_")


def main(arguments: Sequence[str]) -> ExitCode:
    """Start the syncer of a run: it holds the model, merges the sites' updates and publishes versions.

      diloco syncer run.tokens=100e6 cluster.syncer.listen=127.0.0.1:7077

    It prints the run's name and the line with which a site joins.  The same command with run.name=NAME resumes. Ctrl-C
    once: a last round, then exit 75; twice: stop at once.  SIGHUP: stop in order without a last round, exit 75, so that
    a new process, perhaps of a newer release, can take its place with the same command; the sites train on meanwhile.
    Exit 0 when the run has reached its tokens or seconds.
    """
    given = settings_parser("syncer", main.__doc__).parse_args(arguments)
    config = load_config(given)
    name_run(config)
    if len(parts := on_this_machine(config)) > 1:
        return _several(config, parts, given)
    limit_threads(1)  # For one torch operation: a round itself uses several threads, each for a range of values.
    limit_arenas()
    raise_limit()
    run_dir = syncer_dir(config)
    _check_resume(config, run_dir)
    config = goes_on(config, run_dir.config, given)

    _check_settings(config, run_dir)  # Before the first file: a refused start leaves no run behind.
    write_config(config, run_dir, given)
    return serve(config, run_dir, given)


def _check_settings(config: RunConfig, run_dir: RunDir) -> None:
    from diloco.config import build, build_syncer, connecting

    build_syncer.check(config)
    build_syncer.check_backup(config, run_dir, _data(config, run_dir))
    check_trackers(config.run.track)
    connecting.check_listen(config)
    if not _data(config, run_dir).is_dir():
        build.check_version_zero(config)


def _several(config: RunConfig, parts: Sequence[RunConfig], given: argparse.Namespace) -> ExitCode:
    """Run the syncers of ``parts``, each by this same verb in a process of its own."""
    root, children = run_dir_of(config).root, {}
    begin = ["--config", str(given.config)] if given.config is not None else []
    for part in parts:
        run_dir, own = syncer_dir(part), part.cluster.syncer
        _check_resume(part, run_dir)
        _check_settings(part, run_dir)
        # The last value of a setting counts.  In quotes each is text: a name of digits, an address with brackets, "".
        settings = [*given.settings, f"run.name='{config.run.name}'", f"cluster.syncer.index={own.index}"]
        settings += ["cluster.syncer.processes=1", f"cluster.syncer.listen='{own.listen}'"]
        settings += [f"cluster.syncer.metrics='{own.metrics}'"]
        name = syncer_name(own.index)
        children[run_dir.address] = Child(name, verb("syncer", *begin, *settings), root / "logs" / f"{name}.log")

    def begun(addresses: list[str]) -> None:
        where = f"{len(addresses)} syncers of run {config.run.name} in {root}, listening on {BETWEEN.join(addresses)}"
        print(f"{where}; {command} resumes it")
        print(f"{JOINS}  {join_line(config, addresses, given.settings, given.config)}", flush=True)

    command = again(config, given)
    if not run_dir_of(config).config.is_file():  # Here, because the children would write it at the same time.
        configs.write(at(config, 0), run_dir_of(config).config)
    code = keep_running(children, begun)
    finished = f"has finished; final versions in {root / SYNCERS}"
    print(f"run {config.run.name} {finished if code is ExitCode.OK else f'has stopped; {command} resumes it'}")
    return code


def _check_resume(config: RunConfig, run_dir: RunDir) -> None:
    moved, setting, data = run_dir.moved_to(), config.cluster.syncer.folder, _data(config, run_dir)
    if moved is not None and setting and Path(setting).resolve() != moved.resolve():
        raise ConfigError(
            f"cluster.syncer.folder is {setting!r}, but the run was moved to {moved}: leave the "
            f"setting out, or remove {run_dir.moved}, which records the move"
        )
    resume, there = config.run.resume, data.is_dir()
    where = f"there is no run {config.run.name} in {config.run.dir}"
    require(resume != "must" or there, "run.resume", resume, where)
    require(resume != "never" or not there, "run.resume", resume, f"{data} holds a run; take another run.name")
    if resume == "auto" and run_dir.has_lost(data):
        raise VerbError(
            ExitCode.FAILED,
            f"run {config.run.name} has published versions and {data} is gone: diloco restore "
            "restores it from a backup or a warm site; run.resume=never starts it over, and its sites will not follow",
        )


def _data(config: RunConfig, run_dir: RunDir) -> Path:
    return Path(config.cluster.syncer.folder) if config.cluster.syncer.folder else run_dir.syncer


def write_config(config: RunConfig, run_dir: RunDir, given: argparse.Namespace, *, over: bool = True) -> None:
    """Write the resolved file into the run's folder, ``over`` an old one; refuse the folder of another run."""
    if run_dir.config.is_file():
        configs.require_same(config, run_dir.config)
    if (over and given.config is None) or not run_dir.config.is_file():
        configs.write(config, run_dir.config)
    # Readers of a whole run with several syncers find its configuration in its own folder.
    if has_several(config) and not run_dir_of(config).config.is_file():
        configs.write(at(config, 0), run_dir_of(config).config)


def serve(config: RunConfig, run_dir: RunDir, given: argparse.Namespace, warm: Warm | None = None) -> ExitCode:
    """Be the run's syncer, from a standby's ``warm`` state if given; print how the run ended, and how to resume it."""
    command = again(config, given, promoted=warm is not None)
    with ExitStack() as stack:
        ending = _serve(config, run_dir, given, command, stack, warm)
    if ending is Ending.FINISHED:
        print(f"run {config.run.name} has finished; final version in {_data(config, run_dir) / 'final'}")
        return ExitCode.OK
    if ending is None:
        print(f"run {config.run.name} waits for another syncer process; {command} starts one")
    else:
        print(f"run {config.run.name} is drained; {command} resumes it")
    return ExitCode.DRAINED


def _serve(
    config: RunConfig, run_dir: RunDir, given: argparse.Namespace, command: str, stack: ExitStack, warm: Warm | None
) -> Ending | None:
    """Start, wait for the last version, linger, stop; return the run's ending."""
    import torch

    from diloco.cli.status import tracked
    from diloco.config import build, build_syncer, connecting
    from diloco.config.regional import above_of
    from diloco.observe.metrics import SyncerMetrics, page_at
    from diloco.syncer.lease import LeaseError, LeaseRefusedError
    from diloco.syncer.server import Syncer

    torch.set_num_threads(1)
    keep_what_is_loaded()
    log, layout, disk = syncer_log(config, stack), build.layout_of(config), disk_from_environment()
    plan = build_syncer.plan(config, layout)
    syncer = Syncer(
        build_syncer.syncer_options(config, run_dir),
        plan,
        lambda: build.version_zero(config, layout),
        connecting.server_options(config),
        connecting.syncer_security(config),
        log.emit,
        disk,
        build_syncer.lease(config, disk),
        above_of(config, _data(config, run_dir), plan, log.emit, disk),
    )
    metrics = SyncerMetrics(config, syncer.status)
    log.follow(metrics.take)
    where = ("cluster.syncer.metrics", config.cluster.syncer.metrics)
    page = stack.enter_context(page_at(*where, metrics.families, log.emit))
    hands_over = "the syncer stops, and the sites train on until another takes its place"
    stopping = stack.enter_context(Stopping("a last round, then the syncer stops", hands_over))
    before = recent_events(run_dir.events, "published")[0]
    with (
        starting("is this run's syncer running already?"),
        failing(LeaseError),
        failing(LeaseRefusedError, code=ExitCode.MISMATCH),
    ):
        address = syncer.start(warm)
    stack.enter_context(tracked(config, lambda: stopping.handing_over))
    write_file(run_dir.address, address.encode())
    stack.callback(run_dir.address.unlink, missing_ok=True)
    _greet(config, run_dir, address, given, command)
    begins_again = config.run.resume == "never"
    if warm is None and not begins_again and (older := old_copy(before, syncer.status())):
        print(f"{_data(config, run_dir)}: {older}", file=sys.stderr, flush=True)
        syncer.api.old_copy = older
    if not has_several(config):  # Of several, each holds a part; `diloco up` knows the whole.
        log.emit("layout", {"fragments": [fragment.numel for fragment in layout.fragments]})
    if page:
        print(f"metrics at {page}", flush=True)
    ending = _wait(syncer, stopping)
    if ending is not None and syncer.backups is not None:
        made = syncer.backups.status()
        newest = f"{made['last'] or 'none'} in {made['url']}"
        failed = f"NO LAST BACKUP: {made['failing']}; the newest of this process is {newest}"
        print(failed if made["failing"] else f"last backup: {newest}")
    return ending


@contextmanager
def starting(is_locked: str) -> Iterator[None]:
    """Turn an error that keeps a syncer or a standby from starting into a message of one line.

    ``is_locked`` ends that line where another process holds the folder.
    """
    from diloco.syncer.store import StoreError

    try:
        with failing(StoreError, code=ExitCode.MISMATCH), failing(LockedError, end=f": {is_locked}"):
            yield
    except ValueError as error:
        # The wire names its own fields; any other error is not about these settings.
        if not str(error).startswith(FROM_SETTINGS):
            raise
        with section("cluster.syncer", address="listen"):
            raise


def _wait(syncer: Syncer, stopping: Stopping) -> Ending | None:
    from diloco.syncer.server import UpstreamRefusedError
    from diloco.syncer.snapshots import MemoryDamaged

    drained = False
    stopping.ask()  # The signal handler runs in this thread, and must not wait there for the decision loop.
    try:
        while (ending := syncer.wait(WAIT_S)) is None and not stopping.handing_over:
            if stopping.asked and not drained:
                drained = syncer.drain()
        if ending is not None:
            syncer.linger()
    except (MemoryDamaged, LeaseLostError, UpstreamRefusedError) as error:
        raise VerbError(ExitCode.FAILED, str(error)) from error
    except Exception as error:
        # A lost data folder explains whichever file was missing first.
        if (lost := syncer.room.lost()) is None:
            raise
        raise VerbError(ExitCode.FAILED, lost) from error
    finally:
        syncer.stop(HAND_OVER_S if stopping.handing_over else STOP_S)
    return ending


def old_copy(events: Sequence[Event], status: Mapping[str, Any]) -> str:
    """Return a warning where a syncer just started, with ``status``, lacks versions in ``events``; "" if it does not.

    A version is durable before it is published, so data that lack one are an old copy.
    """
    versions = [int(each["version"]) for each in status["fragments"]]
    told = []
    for each in events:
        if each["what"] == "published":
            told.append((whole(each, "lineage") or 1, whole(each, "version"), whole(each, "fragment")))
        elif each["what"] == "syncer_started" and set(versions_in(each).values()) == {0}:
            told.clear()  # The run was begun again, by run.resume=never.
    lacks = [each for each in told if each[2] < len(versions) and each[:2] > (status["lineage"], versions[each[2]])]
    if not lacks:
        return ""
    lineage, version, fragment = max(lacks)
    here = f"version {version} of fragment {fragment} was published, and here it is at {versions[fragment]}"
    return f"an old copy of the syncer's data: {here}. Sites that are ahead of it stop; {how_to_restore(lineage)}"


def again(config: RunConfig, given: argparse.Namespace, *, promoted: bool = False) -> str:
    """Return the command that resumes the run; a ``promoted`` standby's own command would follow a syncer again."""
    if not promoted:
        return f"the same command with run.name={config.run.name}"
    settings = [text for text in given.settings if not text.startswith(("run.name=", "cluster.standby."))]
    begin = ["--config", str(given.config)] if given.config is not None else []
    return f"`{shlex.join(['diloco', 'syncer', *begin, f'run.name={config.run.name}', *settings])}`"


def _greet(config: RunConfig, run_dir: RunDir, address: str, given: argparse.Namespace, command: str) -> None:
    which = f"syncer {config.cluster.syncer.index} of " if has_several(config) else ""
    where = f"{which}run {config.run.name} in {run_dir.root}, listening on {address} (process {os.getpid()})"
    print(f"{where}; {command} resumes it")
    if (least := quorum(config.outer.quorum)) != 1 and least != "all":
        print(f"note: outer.quorum={least}: no round closes before {least} sites have sent an update")
    for sentence in whole_steps(config):
        print(f"note: {sentence}")
    print(f"{JOINS}  {join_line(config, [address], given.settings, given.config)}", flush=True)


def join_line(config: RunConfig, addresses: Sequence[str], settings: Sequence[str], file: Path | None) -> str:
    """Return the command with which a site joins; a call of ``diloco.join`` where the model comes from a file.

    The syncer sends a site all settings that they share.  So the command has the settings given here only where some of
    them are a site's (a preset's inner optimizer, the text), and never the syncer's own.  ``addresses`` are of the
    syncers that this command runs, from its index on; there are placeholders for the others.
    """
    others = [f"SYNCER_{index}" for index in range(config.outer.num_syncers)]
    first = config.cluster.syncer.index
    others[first : first + len(addresses)] = addresses
    if config.model.kind == "file":
        where = BETWEEN.join(others)
        return f'diloco.join(model, optimizer, syncer="{where}", site="site-a", tokens_per_step=...)'
    own = "run.name= run.dir= run.resume= run.init_from= run.track= upstream. "
    own += "cluster.syncer cluster.replication cluster.lease cluster.standby"
    words = ["diloco", "site"]
    words += ["--config", shlex.quote(str(file)), f"run.name={config.run.name}"] if file is not None else []
    imported = "model=imported"  # By run.init_from, a setting of the syncer, which sends a site the model's settings.
    rest = [text for text in settings if not text.lstrip("+").startswith(tuple(own.split())) and text != imported]
    # The syncer sends shared settings, but every site needs its own copy of a tokenizer's file.
    told = [
        configs.SHORT.get(key, key).startswith(configs.SHARED) and not (key == "data.tokenizer" and "/" in value)
        for key, _, value in (text.lstrip("+").partition("=") for text in rest)
    ]
    if file is not None or not all(told):
        words += [shlex.quote(text) for text in rest]
    words += [f"site.syncer={BETWEEN.join(others)}", "site.id=site-a"]
    syncer = config.cluster.syncer
    words += ["site.tls_ca=ca.pem"] if syncer.tls_cert else []
    words += ["site.tls_cert=site-a.pem", "site.tls_key=site-a.key"] if syncer.require_client_cert else []
    words += ["site.token_file=site-a.token"] if syncer.tokens_file else []
    return " ".join(words)
