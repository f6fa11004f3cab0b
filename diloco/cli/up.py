"""``diloco up``: compose the configuration, make the run's folder, run it on this machine, and print the result."""

from __future__ import annotations

import lzma
import os
import zlib
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.config import compose as configs
from diloco.config.arguments import limit_threads, load_config, named_keys, settings_parser
from diloco.config.compose import check_trackers, enough_sites
from diloco.config.errors import (
    A_NAME,
    ConfigError,
    ExitCode,
    VerbError,
    advice,
    failing,
    refusing,
    require,
    whole_steps,
)
from diloco.config.placing import BETWEEN, is_syncer, port_after, syncer_configs, syncer_dir, syncer_dirs
from diloco.config.run_dir import LATEST, RunDir, name_run, point_latest, run_dir_of
from diloco.config.schema import SiteSection
from diloco.durable import LockedError, locked
from diloco.observe.eventlog import EventLog
from diloco.observe.history import RunHistory
from diloco.observe.report import rebuild
from diloco.observe.summary import closing_lines, summarize, write_summary
from diloco.observe.text import count
from diloco.observe.view import Facts, make_view
from diloco.open_files import raise_limit
from diloco.runs.memory_folder import check_memory_folder, clear_memory
from diloco.runs.process import Interrupts, child_environment
from diloco.runs.scenario import AT, Step, scenario_of
from diloco.runs.up import EVAL, OneSyncer, Outcome, StatusWatch, Up, UpOptions, check_syncers, children_of, syncers_of
from diloco.wan.process import RelayProcess

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.config.schema import DataSection, RunConfig


Keys = frozenset[str] | None


def main(arguments: Sequence[str]) -> ExitCode:
    """Run everything on this machine: a syncer, sites, emulated WAN links, and the faults of a scenario.

      diloco up
      diloco up run.seconds=60 scenario=none cluster=local4 network=transatlantic

    The same command resumes the latest run if that was drained.  Ctrl-C once: a last round, then everything ends (exit
    75); twice: stop at once.
    """
    given = settings_parser("up", main.__doc__).parse_args(arguments)
    config = load_config(given)
    # Copied first: the children do not get the thread limit of this process.
    environment = child_environment(os.environ)
    limit_threads(1)
    raise_limit()
    check(config)
    steps = scenario_of(config)

    from diloco.config import build, build_syncer

    build_syncer.check(config)
    build.check_kernels(config)
    check_memory_folder(config)
    with ExitStack() as stack:
        run_dir, again = choose_run(config, stack, named_keys(given))
        interrupts = stack.enter_context(Interrupts())
        print(f"run {run_dir.root.name} {'resumes' if again else 'begins'} in {run_dir.root}", flush=True)
        for sentence in advice(config):
            print(f"advice: {sentence}", flush=True)
        for sentence in whole_steps(config):
            print(f"note: {sentence}", flush=True)
        return _run(config, run_dir, steps, interrupts, environment)


def check(config: RunConfig) -> None:
    """Raise ConfigError for settings of other verbs that ``up`` sets itself, and for bad site names."""
    if not config.cluster.sites:
        raise ConfigError("cluster.sites is empty: diloco up needs at least one site")
    check_syncers(config)
    check_trackers(config.run.track)
    enough_sites(config)
    for name, site in config.cluster.sites.items():
        require(site.nodes == 1, f"cluster.sites.{name}.nodes", site.nodes, "diloco up has one machine; leave it out")
        if not configs.is_name(name):
            raise ConfigError(f"cluster.sites has {name!r}: {A_NAME}")
        if name in RESERVED or is_syncer(name):
            raise ConfigError(f"cluster.sites has {name!r}: that is the name of another process of the run")
    for key in ("id", "syncer", "index", "num_sites", "nodes"):
        value = getattr(config.site, key)
        if value != getattr(SiteSection(), key):
            raise ConfigError(f"site.{key} is {value!r}: diloco up gives each of cluster.sites its own; leave it out")
    folder, mode, endpoint = config.cluster.syncer.folder, config.cluster.replication.mode, config.upstream.endpoint
    in_the_run = "diloco up keeps all data in the run's folder; leave it out"
    require(not folder, "cluster.syncer.folder", folder, in_the_run)
    alone = "it acknowledges nothing without a standby, and diloco up starts none; start syncer, standby, sites by hand"
    require(mode != "sync", "cluster.replication.mode", mode, alone)
    whole = "diloco up runs a whole run; start a region with diloco syncer"
    require(endpoint is None, "upstream.endpoint", endpoint, whole)


RESERVED = (EVAL, "up")
OF_A_SITE = ("slowdown", "nproc", "parallel", "tensor_ranks", "shard_ranks")
"""What each of ``cluster.sites`` says of the site settings of the same names."""


def choose_run(config: RunConfig, stack: ExitStack, named: Keys = frozenset()) -> tuple[RunDir, bool]:
    """Choose and lock the run's folder; return it, and whether it resumes an earlier run.  Sets ``config.run.name``.

    ``named`` is what ``named_keys`` returns.
    """
    resume = config.run.resume
    latest = _unfinished_latest(config) if config.run.name is None and resume != "never" else None
    other = _differences(config, latest, named) if latest is not None else ""
    if latest is not None and not other:
        try:
            stack.enter_context(locked(latest.root))
            config.run.name = latest.root.name
            return _settled(config, latest, named), True
        except LockedError:
            pass  # Another process runs it: this is a new run.
    why_not = f"{latest.root} is another run: {other}" if latest is not None and other else ""
    if resume == "must" and config.run.name is None:
        reason = why_not or f"the latest run in {config.run.dir} cannot be resumed"
        raise ConfigError(f"run.resume is 'must': {reason}")
    if why_not:
        print(f"a new run, since {why_not}", flush=True)
    name_run(config)
    run_dir = run_dir_of(config)
    there = run_dir.config.is_file()
    if there and resume == "never":
        raise ConfigError(f"run.resume is 'never': {run_dir.root} holds a run; take another run.name")
    if there and finished(run_dir):
        raise ConfigError(f"run {config.run.name} has finished, see {run_dir.report}; take another run.name")
    if not there and resume == "must":
        raise ConfigError(f"run.resume is 'must': there is no run {config.run.name} in {config.run.dir}")
    if not any(each.syncer.is_dir() or each.has_lost(each.syncer) for each in syncer_dirs(config, run_dir)):
        from diloco.config import build

        build.check_version_zero(config)
    with failing(LockedError, end=": it is running already"):
        stack.enter_context(locked(run_dir.root))
    if there:
        configs.require_same(_as_in(config, run_dir, named)[0], run_dir.config)
        if anew := _differences(config, run_dir, named):
            print(f"changed: {anew}", flush=True)
    return _settled(config, run_dir, named), there


def _settled(config: RunConfig, run_dir: RunDir, named: Keys) -> RunDir:
    """Write the configuration into the folder.

    ``run.resume`` becomes "auto", whatever value ``up`` got: a restarted child resumes there.
    """
    from diloco.config import build_syncer

    for part in syncer_configs(config):
        build_syncer.check_backup(part, syncer_dir(part), syncer_dir(part).syncer)
    run_dir.summary.unlink(missing_ok=True)
    config.run.resume = "auto"
    if run_dir.config.is_file():
        there, kept = _as_in(config, run_dir, named)
        if kept:
            print(f"note: {' '.join(kept)}, as in the run's configuration", flush=True)
        config.data.leased, config.outer, config.codec = there.data.leased, there.outer, there.codec
    elif config.data.leased is None:  # All sites have this machine's text.
        config.data.leased = not (config.inner.deterministic or config.outer.lock_step)
    configs.write(config, run_dir.config)
    point_latest(run_dir)
    return run_dir


def finished(run_dir: RunDir) -> bool:
    """Return whether every syncer of the run has written its final model."""
    return all(each.final_model.is_file() for each in syncer_dirs(configs.read(run_dir.config), run_dir))


def _unfinished_latest(config: RunConfig) -> RunDir | None:
    """Return the latest run, if it has not finished and ``up`` can resume it."""
    link = Path(config.run.dir) / LATEST
    run_dir = RunDir(Path(config.run.dir) / os.readlink(link)) if link.is_symlink() else None
    if run_dir is None or not run_dir.config.is_file():
        return None
    try:
        dirs = syncer_dirs(configs.read(run_dir.config), run_dir)
    except ConfigError:
        return None  # Another version of this program wrote it, and this one cannot resume it.
    if finished(run_dir):
        return None
    # A run of `diloco train` has no syncer's folder: it is not a run of sites.
    return run_dir if any(each.syncer.is_dir() or each.has_lost(each.syncer) for each in dirs) else None


def _differences(config: RunConfig, run_dir: RunDir, named: Keys) -> str:
    """Return in words the settings that differ from the run's folder, except those that only say how to resume."""
    before, after = configs.read(run_dir.config), _as_in(config, run_dir, named)[0]
    changed = configs.differences(configs.as_text(before), configs.as_text(after))
    found = [
        f"{key} is {now or 'not set'} now and was {was or 'not set'}"
        for key, (was, now) in changed.items()
        if key not in configs.HOW_TO_GO_ON
    ]
    more = [f"and {len(found) - NAMED_MAX} more"] if len(found) > NAMED_MAX else []
    return "; ".join(found[:NAMED_MAX] + more)


def _as_in(config: RunConfig, run_dir: RunDir, named: Keys) -> tuple[RunConfig, list[str]]:
    """Return ``configs.keep_run_settings`` of ``config``, with the run's ``data.leased`` where it is not set.

    A run of an earlier release has no leases.
    """
    there = configs.read(run_dir.config)
    leased = there.data.leased if config.data.leased is None else config.data.leased
    config = replace(config, data=replace(config.data, leased=leased))
    return (config, []) if named is None else configs.keep_run_settings(config, run_dir.config, named)


NAMED_MAX = 3


def _run(
    config: RunConfig, run_dir: RunDir, steps: list[Step], interrupts: Interrupts, environment: dict[str, str]
) -> ExitCode:
    """Start the run, wait for its end, and print the result."""
    from diloco.cli.status import dashboard_of, tracked
    from diloco.config import build, connecting
    from diloco.inner.data import DataError
    from diloco.observe.dashboard import served

    if not Path(config.data.cache).is_dir():
        print("preparing the text, once for all runs", flush=True)
    with refusing(DataError, begin="data: "):
        build.corpus(config)
        references = reference_bits(config.data)
    history = RunHistory()
    failed = None
    with ExitStack() as stack:
        stack.enter_context(tracked(config, lambda: interrupts.count > 1))
        log = stack.enter_context(closing(EventLog(run_dir.events, "up")))
        for name in config.cluster.sites:  # A killed site that was not started again left its files in memory.
            stack.callback(clear_memory, replace(config, site=replace(config.site, id=name)))
        syncers = syncers_of(config)
        relay = stack.enter_context(RelayProcess()) if config.network.emulate else None
        options = up_options(config, syncers, relay, steps, references)
        children = children_of(options, run_dir)
        up = Up(options, children, run_dir, log, history, relay, environment)
        security = connecting.site_security(config)
        watches = [stack.enter_context(closing(StatusWatch(each.address, security))) for each in syncers]
        page = dashboard_of(run_dir.root.name, run_dir, config, watches)
        print(f"watch it at {stack.enter_context(served(page, '127.0.0.1', 0))}", flush=True)
        try:
            with make_view(history, facts_of(config, sum(options.layout))) as view:
                outcome = up.run(view, watches, interrupts)
        except VerbError as error:
            outcome, failed = up.outcome, error
            outcome.wrong.append(str(error))
        summary = summarize(history, outcome.status, asdict(config), outcome.wrong)
        log.emit("run", {"state": "ended", "status": summary["status"]})
    write_summary(run_dir.summary, summary)
    _, history = rebuild(run_dir.root)
    if failed is not None:
        raise failed
    print("\n".join(["", *closing_lines(summary, history, run_dir.root)]), flush=True)
    return exit_code(history, outcome, str(summary["status"]))


def exit_code(history: RunHistory, outcome: Outcome, status: str) -> ExitCode:
    """Return the exit code for the shell."""
    if outcome.code is not ExitCode.OK:
        return outcome.code
    if history.ending == "drained":
        return ExitCode.DRAINED
    return ExitCode.OK if status == "ok" else ExitCode.FAILED


def up_options(
    config: RunConfig,
    syncers: Sequence[OneSyncer],
    relay: RelayProcess | None,
    steps: list[Step],
    references: dict[str, float],
) -> UpOptions:
    """Make the links, one from each site to each syncer, and return the settings of ``Up``."""
    from diloco.config import build, connecting

    links, sites = {}, {}
    num_sites = len(config.cluster.sites)
    for index, (name, site) in enumerate(config.cluster.sites.items()):
        link = connecting.link_options(config, name)
        dials = []
        for number, syncer in enumerate(syncers):
            own = f"{name}{AT}{number}" if number else name
            links[own] = {key: float(value) for key, value in asdict(link).items()}
            dials.append(relay.add(own, link, syncer.address) if relay is not None else syncer.address)
        # Assigned here for all sites: no two sites may take the same share of the text.
        settings = {"id": name, "index": index, "num_sites": num_sites, "syncer": BETWEEN.join(dials)}
        settings |= {key: getattr(site, key) for key in OF_A_SITE}
        if config.site.metrics:
            settings["metrics"] = port_after(config.site.metrics, index)
        sites[name] = [f"site.{key}={value}" for key, value in settings.items()]
    waits = config.outer.final_wait_s + config.cluster.syncer.linger_s + 2 * config.site.finish_timeout_s
    return UpOptions(
        sites=sites,
        links=links,
        syncers=syncers,
        steps=steps,
        layout=[fragment.numel for fragment in build.whole_layout(config).fragments],
        references=references,
        ending_s_max=waits + EVALUATION_S_MAX,
    )


EVALUATION_S_MAX = 600.0
"""For the whole validation text: it takes seconds on a GPU, minutes for a model of 60M parameters on one core."""


def facts_of(config: RunConfig, values: int) -> Facts:
    """Return the facts in the head of the view."""
    model, codec, outer = config.model, config.codec, config.outer
    codecs = codec.up if codec.up == codec.down else f"{codec.up} up, {codec.down} down"
    size = f"{model.layers}x{model.dim} transformer, {count(values)} values"
    words = [size, config.data.kind, codecs, f"quorum {outer.quorum}", f"H {outer.inner_steps}"]
    return Facts(name=config.run.name or "", what=" · ".join(words), seconds=config.run.seconds)


# --- Bits per byte of the validation text under ordinary compressors -------------------------------------------------

TEXT_BYTES_MAX = 4_000_000


def reference_bits(data: DataSection) -> dict[str, float]:
    """Return the bits per byte of the validation split, compressed in one piece; empty for any other corpus.

    Only the built-in corpus is compressed: reading all of a user's text could take longer than the run.
    """
    if data.kind != "stdlib":
        return {}
    from diloco.inner.corpus import read_corpus, read_text, source_files

    documents = read_corpus(data.kind, source_files(data.kind, data.path, data.pattern)).split("validation")
    text = "\n".join(read_text(data.kind, document) for document in documents).encode()[:TEXT_BYTES_MAX]
    sizes = {"zlib -9": len(zlib.compress(text, 9)), "xz": len(lzma.compress(text))}
    return {name: round(8 * size / len(text), 4) for name, size in sizes.items()}
