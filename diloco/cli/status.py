"""``diloco status``: the state of a running syncer, or of several; and ``diloco report``."""

from __future__ import annotations

import io
import json
import os
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from diloco.config import compose as configs
from diloco.config.arguments import OneLineParser, is_address, settings_parser, words_and_settings
from diloco.config.errors import ConfigError, ExitCode, VerbError, refusing, require
from diloco.config.placing import BETWEEN, SYNCERS, syncer_dirs
from diloco.config.run_dir import LATEST, RunDir, existing_run, run_dir_of
from diloco.durable import locked
from diloco.observe.console import SiteLines
from diloco.observe.eventlog import EventLog, new_events, recent_events
from diloco.observe.history import RunHistory
from diloco.observe.text import details, heading, site_cells, standby_line
from diloco.runs.process import Child, Interrupts, child_environment, end_all, verb
from diloco.sync.options import PROTOCOL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from rich.table import Table
    from rich.text import Text

    from diloco.config.schema import RunConfig
    from diloco.observe.dashboard import Dashboard
    from diloco.observe.eventlog import Event
    from diloco.runs.up import StatusWatch
    from diloco.wire.client import AdminClient

    Status = Mapping[str, Any]


EVERY_S = 1.0
PLAIN_WIDTH = 140
COLUMNS = (
    "site",
    "state",
    "step",
    "loss",
    "tokens/s",
    "processed",
    "merged",
    "in flight",
    "stale",
    "up",
    "down",
    "link",
    "heard",
)


def main(arguments: Sequence[str]) -> ExitCode:
    """Show the state of a running syncer: versions, sites, staleness, tokens, bytes, loss.

      diloco status 127.0.0.1:7077
      diloco status runs/nimble-otter --watch
      diloco status 127.0.0.1:7077,127.0.0.1:7078    a syncer and its standby: the one that leads, and what the other is
      diloco status 127.0.0.1:7077/127.0.0.1:7078    a run with two syncers

    Where the syncer authenticates callers: site.token_file=... site.tls_ca=...
    """
    parser = settings_parser("status", main.__doc__, file=False, shown=False)
    parser.add_argument("--json", action="store_true", help="print the syncer's answer as JSON")
    parser.add_argument("--watch", action="store_true", help="repeat every second, until Ctrl-C or the syncer is gone")
    given = parser.parse_args(arguments)
    targets, settings = words_and_settings(given)
    if not targets:
        raise ConfigError("give the syncer's HOST:PORT (each of several), or one run folder")
    addresses = [address for target in targets for address in syncer_addresses(target)]
    with suppress(*([KeyboardInterrupt] if given.watch else [])):
        if given.watch and not given.json and len(addresses) == 1:
            _watch(addresses[0], settings)
        while True:
            code = _show(addresses, settings, given.json)
            if not given.watch:
                return code
            time.sleep(EVERY_S)
    return ExitCode.OK


def _show(addresses: Sequence[str], settings: Sequence[str], as_json: bool) -> ExitCode:
    """Print the state of the syncer; of several that of the run and of each, and return 3 where one does not answer."""
    if len(addresses) == 1:
        _print(status_of(addresses[0], settings), as_json)
        return ExitCode.OK
    found = asked_all(addresses, settings)
    if as_json:
        print(json.dumps(as_one(found), sort_keys=True), flush=True)
    else:
        print(whole_line(found), flush=True)
        for address, status in found.items():
            held = ",".join(map(str, status.get("held", [])))
            if "unreachable" in status:
                print(f"\nsyncer {address}: {status['unreachable']}", flush=True)
                continue
            print(f"\nsyncer {address} holds fragments {held} of the model, and counts them from 0:", flush=True)
            _print(status, False)
    return ExitCode.UNREACHABLE if any("unreachable" in each for each in found.values()) else ExitCode.OK


def syncer_addresses(target: str) -> list[str]:
    """Return the addresses of all syncers in ``target``: separated by /, as for sites, or those of a run folder."""
    folder = Path(target) if Path(target).is_dir() else Path("runs") / target
    own = sorted((folder / SYNCERS).glob("*/syncer.address"), key=lambda path: path.parent.name)
    if own:
        return [path.read_text().strip() for path in own]
    parts = target.split(BETWEEN)
    if not Path(target).exists() and all(":" in each for each in parts):  # Others are the path of a run folder.
        return [syncer_address(each) for each in parts]
    return [syncer_address(target)]


def syncer_address(target: str) -> str:
    """Return the syncer's ``HOST:PORT``, given as such or by a run folder; exit 3 when none runs there.

    A syncer and its standby, separated by a comma, stay together: ``leading`` returns the one that leads.
    """
    if is_address(target):
        return target
    run_dir = existing_run(target)
    if not run_dir.address.is_file():
        why = f"{run_dir.address} is not there"
        if run_dir.final_model.is_file():
            why = f"the run has finished (diloco report {run_dir.root})"
        elif at := RunHistory(recent_events(run_dir.events, "published")[0]).whole_at:
            why = f"the folder is of one site or standby, whose syncer is at {at} (diloco status {at})"
        raise VerbError(ExitCode.UNREACHABLE, f"no syncer of {run_dir.root} is running: {why}")
    return run_dir.address.read_text().strip()


def leading(address: str, settings: Sequence[str]) -> tuple[str, dict[str, Status]]:
    """Return which of the addresses, separated by commas, leads the run, and the answer of each.

    The leader is the syncer of the highest lineage and epoch; where no syncer answers, a standby, or the first address.
    A single address leads without being asked.
    """
    addresses = [each.strip() for each in address.split(",")]
    if len(addresses) == 1:
        return address, {}
    refused: list[VerbError] = []
    found = asked_all(addresses, settings, refused)
    if refused and all("unreachable" in status for status in found.values()):
        raise refused[0]
    ranks = {
        each: ("unreachable" not in status, "fragments" in status, status.get("lineage", 1), status.get("epoch", 0))
        for each, status in found.items()
    }
    return max(addresses, key=lambda each: ranks[each]), found


def serving(target: str, settings: Sequence[str]) -> list[str]:
    """Return the address of each syncer of ``target`` that leads.

    VerbError, exit 3: another run's syncer is at the address that a killed one has left in the run's folder.
    """
    from diloco.wire.messages import MalformedMessage

    addresses = [leading(each, settings)[0] for each in syncer_addresses(target)]
    run, found = None, {}
    with suppress(ConfigError):  # ``target`` is no folder, or one without a configuration.
        run = configs.read(existing_run(target).config).run.name
        for address in addresses:
            with suppress(VerbError, MalformedMessage):  # One that does not answer a command either.
                found[address] = status_of(address, settings)
    for address, status in found.items():
        if (other := status.get("run_id", run)) != run:
            raise VerbError(ExitCode.UNREACHABLE, f"no syncer of {target} is running: {address} serves run {other}")
    return addresses


@contextmanager
def asking(address: str, settings: Sequence[str], called: str = "", token: str = "") -> Iterator[AdminClient]:
    """Yield a client of the process at ``address``, ``called`` so in messages; ``settings`` say how to reach it.

    A ``token``, of a person elsewhere, takes the place of the credentials in ``settings``; a syncer that would let any
    caller in gets nothing then.  VerbError: exit 3 where it does not answer; exit 1, with its reason, where it
    refuses.
    """
    from diloco.config import connecting
    from diloco.wire.checkup import Checkup
    from diloco.wire.client import AdminClient
    from diloco.wire.messages import ProbeAsk, Refused, Unreachable
    from diloco.wire.options import SecurityOptions

    called = called or f"the syncer at {address}"
    security = connecting.site_security(configs.compose(settings)) if settings else SecurityOptions()
    with refusing(ValueError, OSError, begin=f"syncer {address}: "):
        if token:
            security = replace(security, token=token, token_file="", tls_cert="", tls_key="")
        client = AdminClient(address, security)
    with client:
        try:
            if token:
                with Checkup(address, security) as checkup:
                    known = checkup.probe(ProbeAsk(PROTOCOL)).answer.identity
                if not known:
                    why = "lets any caller in, so a token proves no operator: use the verb itself, as in diloco drain"
                    raise VerbError(ExitCode.FAILED, f"{called} {why}")
            yield client
        except Unreachable as error:
            why = connecting.unanswered(address, security, error.why)
            raise VerbError(ExitCode.UNREACHABLE, f"{called} does not answer: {why}") from error
        except Refused as error:
            raise VerbError(ExitCode.FAILED, f"{called} refuses: {error.text}") from error


def commanded(
    verb: str, words: Sequence[str | int], addresses: Sequence[str], settings: Sequence[str], token: str = ""
) -> Iterator[str]:
    """Call the method ``verb`` of ``AdminClient`` at each syncer; yield the address once it is done there.

    A syncer's failure is raised after the others have got the command.  ``token``: see ``asking``.
    """
    from diloco.wire.messages import MalformedMessage

    failed: VerbError | None = None
    for address in addresses:
        try:
            with refusing(MalformedMessage), asking(address, settings, token=token) as client:
                getattr(client, verb)(*words)
        except VerbError as error:
            failed = error
            continue
        yield address
    if failed is not None:
        raise failed


def status_of(address: str, settings: Sequence[str]) -> Status:
    """Return the syncer's status; of several addresses the leader's, with a line on each other one in ``others``."""
    leads, found = leading(address, settings)
    if found and "unreachable" not in (status := found[leads]):
        return {**status, "others": [_beside(status, each, other) for each, other in found.items() if each != leads]}
    with asking(leads, settings) as client:
        return client.status()


def _beside(leads: Status, address: str, other: Status) -> str:
    """Return one line about another process, beside the one that ``leads`` the run."""
    if "unreachable" in other:
        return str(other["unreachable"])
    if "fragments" not in other:
        return f"{address}: {standby_line(other)}"
    if other["run_id"] != leads["run_id"]:  # A standby does not lead where a syncer answers.
        return f"the syncer at {address} serves another run, {other['run_id']}"
    theirs, ours = ((each.get("lineage", 1), each["epoch"]) for each in (other, leads))
    what = "AN OLD ONE: stop it" if theirs < ours else "the same one, or a copy of it"
    return f"the syncer at {address} is {what} (lineage {theirs[0]}, epoch {theirs[1]})"


def _print(status: Status, as_json: bool) -> None:
    if as_json:
        print(json.dumps(status, sort_keys=True), flush=True)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console()
    console = console if console.is_terminal else Console(width=PLAIN_WIDTH)
    for part in _parts(status):
        console.print(part, soft_wrap=isinstance(part, Text))


def _parts(status: Status) -> list[Text | Table]:
    """Return what is shown of a syncer or a standby, from the top down."""
    from rich.text import Text

    if status.get("role") == "standby":
        return [Text(standby_line(status))]
    return [Text(heading(status)), sites_table(status), *map(Text, details(status).splitlines())]


def _watch(address: str, settings: Sequence[str]) -> NoReturn:
    from rich.console import Console, Group
    from rich.live import Live

    with Live(console=Console(), auto_refresh=False) as live:
        while True:
            live.update(Group(*_parts(status_of(address, settings))), refresh=True)
            time.sleep(EVERY_S)


def sites_table(status: Status) -> Table:
    """Return a table with one row a site."""
    from rich.table import Table

    table = Table()
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("site", "state") else "right")
    for name in status["sites"]:
        cells = site_cells(status, name)
        table.add_row(*(cells[column] for column in COLUMNS))
    return table


# --- ``diloco status`` of a run with several syncers -----------------------------------------------------------------


def asked_all(
    addresses: Sequence[str], settings: Sequence[str], refused: list[VerbError] | None = None
) -> dict[str, Status]:
    """Return each process's status by its address; ``{"unreachable": why}`` for one that does not answer.

    A refusal ends the verb; with a list for those that ``refused``, it counts as no answer and is added there.
    """
    found: dict[str, Status] = {}
    for address in addresses:
        try:
            found[address] = status_of(address, settings)
        except VerbError as error:
            found[address] = {"unreachable": str(error)}
            if error.code is ExitCode.UNREACHABLE:
                continue
            if refused is None:
                raise
            refused.append(error)
    return found


def as_one(found: Mapping[str, Status]) -> dict[str, Any]:
    """Return the whole run as one object; its tokens and versions are of the fragments whose syncers answered."""
    known = [each for each in found.values() if "fragments" in each]  # A standby has none.
    versions = {
        place: fragment["version"]
        for each in known
        for place, fragment in zip(each.get("held") or range(len(each["fragments"])), each["fragments"], strict=True)
    }
    counts = [len(each["fragments"]) for each in known]
    weighted = sum(each["run_tokens"] * count for each, count in zip(known, counts, strict=True))
    return {
        "run_id": known[0]["run_id"] if known else None,
        "run_tokens": weighted // sum(counts) if known else None,
        "progress": [min(each["progress"] for each in known), max(each["progress"] for each in known)] if known else [],
        "versions": {str(place): versions[place] for place in sorted(versions)},
        "syncers": dict(found),
    }


def whole_line(found: Mapping[str, Status]) -> str:
    """Return one line about the run."""
    one = as_one(found)
    silent = [address for address, each in found.items() if "unreachable" in each]
    away = f"  DOES NOT ANSWER: {', '.join(silent)}" if silent else ""
    if one["run_id"] is None:
        return f"{len(found)} syncers{away}"
    least, most = (f"{share:.0%}" for share in one["progress"])
    shares = least if least == most else f"{least} to {most}"
    told = ",".join(f"{place}:{version}" for place, version in one["versions"].items())
    return (
        f"run {one['run_id']} on {len(found)} syncers  {shares} of the run  versions {told}  "
        f"{one['run_tokens']:,} tokens merged, the mean over these fragments{away}"
    )


# --- ``diloco report RUN_DIR`` ---------------------------------------------------------------------------------------


def report(arguments: Sequence[str]) -> ExitCode:
    """Write report.html into a run's folder, from its events.jsonl and summary.json, and print the summary.
    For a failed or running run it has what is known by then.
    """
    from diloco.observe.report import rebuild
    from diloco.observe.summary import closing_lines

    parser = OneLineParser("report", report.__doc__)
    parser.add_argument("run", metavar="RUN_DIR", help="a run's folder, or its name below runs/")
    run_dir = existing_run(parser.parse_args(arguments).run).root
    if (run_dir / "train").is_dir():
        raise ConfigError(f"{str(run_dir)!r} is a run of diloco train; its figures are in {run_dir / 'summary.json'}")
    summary, history = rebuild(run_dir)
    print("\n".join(closing_lines(summary, history, run_dir)))
    print(f"report  {run_dir / 'report.html'}")
    return ExitCode.OK


# --- ``diloco dashboard`` ---------------------------------------------------------------------------------------------

DASHBOARD_PORT = 8070
ANSWERS_S = 5.0
"""A syncer whose last answer is older than this counts as silent."""


def dashboard(arguments: Sequence[str]) -> ExitCode:
    """Serve a page that follows a run: losses, rounds, sites, where every token is, and what happens.

      diloco dashboard                        the latest run in runs/
      diloco dashboard nimble-otter           a run on this machine, running or finished
      diloco dashboard 127.0.0.1:7077         a syncer elsewhere: charts begin with the command

    The page asks for no password: from another machine reach it by ssh -L 8070:127.0.0.1:8070 HOST, or give --host an
    address in a private network.  It only reads, until a person gives an operator's token in it: then it has buttons to
    drain the run, to evict sites and to decide on held updates.  The syncer must know tokens, by its
    cluster.syncer.tokens_file.  Ctrl-C ends it.
    """
    from diloco.config import connecting
    from diloco.observe.dashboard import served
    from diloco.runs.up import StatusWatch
    from diloco.wire.options import SecurityOptions

    parser = settings_parser("dashboard", dashboard.__doc__, file=False, shown=False)
    parser.add_argument("--port", type=int, default=DASHBOARD_PORT, help=f"default: {DASHBOARD_PORT}; 0: a free one")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at; default: this machine only")
    given = parser.parse_args(arguments)
    targets, settings = words_and_settings(given)
    run_dir = None
    if not targets or not all(is_address(each) for each in targets):
        if len(targets) > 1:
            raise ConfigError("give one run folder, or the HOST:PORT of its syncers")
        run_dir = existing_run(targets[0] if targets else LATEST)
    addresses: list[str] = []
    with suppress(*([VerbError] if run_dir else [])):  # Of a finished run, without a syncer, the folder makes the page.
        addresses = [each for target in targets or [LATEST] for each in serving(target, settings)]
    with ExitStack() as stack:
        security = connecting.site_security(configs.compose(settings)) if settings else SecurityOptions()
        watches = [stack.enter_context(closing(StatusWatch(each, security))) for each in addresses]
        config = configs.read(run_dir.config) if run_dir is not None and run_dir.config.is_file() else None
        title = run_dir.root.resolve().name if run_dir is not None else ", ".join(addresses)
        operate = lambda order, token: commanded(order["verb"], order["words"], order["syncers"], settings, token)  # noqa: E731
        page = dashboard_of(title, run_dir, config, watches, operate)
        where = f"--host {given.host} --port {given.port}: cannot listen there: "
        with refusing(OSError, OverflowError, begin=where):
            url = stack.enter_context(served(page, given.host, given.port))
        print(f"dashboard of {title} at {url}", flush=True)
        with suppress(KeyboardInterrupt):
            while True:
                time.sleep(EVERY_S)
    return ExitCode.OK


def dashboard_of(
    title: str,
    run_dir: RunDir | None,
    config: RunConfig | None,
    watches: Sequence[StatusWatch],
    operate: Callable[[Mapping[str, Any], str], Iterable[str]] | None = None,
) -> Dashboard:
    """Return the page of a run; without ``run_dir`` its history is what the first of ``watches`` hears."""
    from diloco.observe.dashboard import Dashboard
    from diloco.runs.up import together

    def ask() -> tuple[dict[str, Any] | None, dict[str, dict[str, Any]]]:
        now = time.monotonic()
        found: dict[str, dict[str, Any]] = {}
        for each in watches:
            latest = each.latest if now - each.answered_s < ANSWERS_S else None
            found[each.address] = latest or {"unreachable": f"{each.address} does not answer"}
        first = next(iter(found.values()), {})
        if "fragments" not in first:  # Another syncer has other fragments.
            return None, found
        same = [each for each in found.values() if each.get("run_id") == first["run_id"]]  # A region has its own run.
        return {**first, **(together(same) or {} if len(same) > 1 else {})}, found

    events, text = run_dir.events if run_dir else None, configs.to_yaml(config) if config else ""
    return Dashboard(title, events, text, ask, operate)


# --- ``diloco runs`` and ``diloco logs`` -----------------------------------------------------------------------------

FOLLOW_S = 0.3
QUIET_S = 3.0
"""Silence after the final version, or the end of `diloco up`, that ends ``diloco logs``."""
FREQUENT = frozenset({"grace", "outer_step_started", "round_closed", "published", "link", "units", "reported"})
"""Events of every round or every second, which ``diloco logs`` leaves out."""


def runs(arguments: Sequence[str]) -> ExitCode:
    """List the runs in a folder: the state, latest version, tokens and time of the last event of each."""
    parser = OneLineParser("runs", runs.__doc__)
    parser.add_argument("folder", nargs="?", default="runs", type=Path, help="the folder of the runs; default: runs")
    folder = parser.parse_args(arguments).folder
    places = {path.parent for name in ("config.yaml", "events.jsonl") for path in folder.glob(f"*/{name}")}
    found = [RunDir(place) for place in places if not place.is_symlink()]
    if not found:
        raise ConfigError(f"{str(folder)!r} holds no run: no config.yaml and no events.jsonl in any folder of it")
    touched_s = {each.root: (each.events if each.events.is_file() else each.config).stat().st_mtime for each in found}
    for run_dir in sorted(found, key=lambda each: (-touched_s[each.root], each.root.name)):
        events = recent_events(run_dir.events, "published")[0]
        part = RunHistory(events)
        last: Mapping[str, Any] = next((each for each in reversed(events) if each["what"] == "published"), {})
        heard = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(touched_s[run_dir.root]))
        figures = f"version {last['version']:,}, {last['run_tokens']:,} tokens" if last else "no version here"
        if trained := [event for event in events if event["who"] == "train" and event["what"] == "step"]:
            figures = f"step {trained[-1]['step']:,}, {trained[-1]['tokens_total']:,} tokens"
        if part.whole_at and part.sites:
            figures = ", ".join(f"{name} at step {site.step:,}" for name, site in part.sites.items())
        stands = f"part, syncer at {part.whole_at}" if part.whole_at else _stands(run_dir)
        print(f"{run_dir.root.name:<24} {stands:<32} {heard}  {figures}", flush=True)
    return ExitCode.OK


def _stands(run_dir: RunDir) -> str:
    """Return a run's state by its folder; a killed syncer has left its address there."""
    try:
        config = configs.read(run_dir.config) if run_dir.config.is_file() else None
        dirs = syncer_dirs(config, run_dir) if config is not None else [run_dir]
        if all(each.final_model.is_file() for each in dirs):
            return "finished"
        alone = run_dir.train.is_dir() and run_dir.summary.is_file()
        if alone and json.loads(run_dir.summary.read_bytes())["status"] == "ok":
            return "finished"
    except ValueError as error:
        return f"cannot be read: {error}"
    addresses = [each.address.read_text().strip() for each in dirs if each.address.is_file()]
    return f"syncer at {BETWEEN.join(addresses)}" if addresses else "stopped"


def logs(arguments: Sequence[str]) -> ExitCode:
    """Follow the logs of a run's processes on this machine until the run has ended or Ctrl-C.

      diloco logs runs/nimble-otter
      diloco logs nimble-otter site-b --lines 100

    The lines come from events.jsonl in the run's folder, which has every event with its time.
    """
    parser = OneLineParser("logs", logs.__doc__)
    parser.add_argument("run", metavar="RUN", help="a run's folder, or its name below runs/")
    parser.add_argument("who", metavar="SITE", nargs="?", help="one site, or syncer; default: all")
    parser.add_argument("--lines", type=int, default=20, metavar="N", help="past lines to begin with (default 20)")
    given = parser.parse_args(arguments)
    require(given.lines >= 0, "--lines", given.lines, "0 or more")
    run_dir = existing_run(given.run)
    every = configs.read(run_dir.config).run.log_every if run_dir.config.is_file() else 1
    out, says = io.StringIO(), dict[str, SiteLines]()

    def lines(events: Sequence[Event]) -> list[str]:
        for event in events:
            who = str(event["who"])
            if event["what"] not in FREQUENT and given.who in (None, who):
                says.setdefault(who, SiteLines(every, [out]))(event)
        found = out.getvalue().splitlines()
        out.seek(out.truncate(0))
        return found

    events, blocks = recent_events(run_dir.events, "step")
    if given.who is not None and not any(event["who"] == given.who for event in events):
        known = ", ".join(sorted({str(event["who"]) for event in events})) or "none yet"
        raise ConfigError(f"{given.who!r} has no events in {run_dir.events}; processes with events: {known}")
    print("".join(f"{line}\n" for line in lines(events)[-given.lines or None :] if given.lines), end="", flush=True)
    ended, until = _has_ended(events) or _stands(run_dir) == "finished", 0.0
    with suppress(KeyboardInterrupt):
        while not ended or time.monotonic() < until:
            time.sleep(FOLLOW_S)
            events = list(new_events(blocks))
            if events:
                ended, until = ended or _has_ended(events), time.monotonic() + QUIET_S
                print("".join(f"{line}\n" for line in lines(events)), end="", flush=True)
    return ExitCode.OK


def _has_ended(events: Sequence[Event]) -> bool:
    """Return whether the final version came, with no start of a syncer since: a drained run may have been resumed.

    Without a syncer's events, as on a site's machine, return whether the site has ended, or the training alone.
    """
    for end, start in (("final", "syncer_started"), ("site_done", "joined"), ("eval", "resumed")):
        if words := [event["what"] for event in events if event["what"] in (end, start)]:
            return words[-1] == end
    return False


# --- ``diloco track`` and ``run.track`` ------------------------------------------------------------------------------

TRACK_S = 2.0
TRACK_AGAIN_S = 20.0
TRACK_END_S = 30.0
"""How long a tracker may take for what is left at the end of the run."""
TRACK_HURRY_S = 2.0


def track(arguments: Sequence[str]) -> ExitCode:
    """Send the curves of a run to an experiment tracker, as far as it lacks them.

      diloco track nimble-otter wandb
      diloco track runs/nimble-otter mlflow --follow

    run.track=wandb does this during a run.  Afterwards this command sends what came late: the final version's loss of
    `diloco eval`, or what a tracker that was down has missed.  The same run of the tracker goes on.  Server and
    credentials are those of the tracker's own environment variables, such as WANDB_API_KEY, WANDB_MODE and
    MLFLOW_TRACKING_URI.
    """
    from diloco.observe.track import Sender

    parser = OneLineParser("track", track.__doc__)
    parser.add_argument("run", metavar="RUN", help="a run's folder, or its name below runs/")
    parser.add_argument("tracker", choices=configs.TRACKERS, help=f"one of {', '.join(configs.TRACKERS)}")
    parser.add_argument("--follow", action="store_true", help="send what comes, until Ctrl-C")
    given = parser.parse_args(arguments)
    configs.check_trackers([given.tracker])
    run_dir, name = existing_run(given.run), given.tracker
    folder = run_dir.root / "track" / name
    config = asdict(configs.read(run_dir.config)) if run_dir.config.is_file() else {}
    sender, sent, failing = None, 0, False
    with Interrupts() as interrupts, ExitStack() as stack:
        while True:
            ends = not given.follow or interrupts.count > 0
            try:
                if sender is None:
                    stack.enter_context(locked(folder))
                    sender = Sender(folder, config)
                sent += sender.send(ends=ends)
                if ends:
                    print(f"{name}: {sent} points sent of {run_dir.root.resolve().name}")
                    return ExitCode.OK
                failing = False
            except Exception as error:  # Whatever a tracker's package raises.
                if sender is None:
                    stack.pop_all().close()
                why = f"{name} takes no points, and what waits is sent once it does: {error!r}"
                if given.follow and not failing:
                    _note(run_dir, why)
                if ends:
                    raise VerbError(ExitCode.FAILED, why) from error
                failing = True
            until = time.monotonic() + (TRACK_AGAIN_S if failing else TRACK_S)
            while time.monotonic() < until and not interrupts.count:
                time.sleep(FOLLOW_S)


@contextmanager
def tracked(config: RunConfig, hurries: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Have a process for each of ``run.track`` follow the run, and give it ``TRACK_END_S`` after the end.

    It gets ``TRACK_HURRY_S`` where ``hurries``: the caller is to stop at once, or another process takes its place.
    Of several syncers the first one does it.  A tracker that is still busy then is killed.
    """
    run_dir, names = run_dir_of(config), config.run.track if not config.cluster.syncer.index else []
    children = []
    for name in names:
        command = verb("track", str(run_dir.root), name, "--follow")
        children.append(Child(name, command, run_dir.root / "logs" / f"track-{name}.log", niceness=5))
        children[-1].start(child_environment(os.environ))
    try:
        yield
    finally:
        grace_s, gone = TRACK_HURRY_S if hurries() else TRACK_END_S, [child.name for child in children if child.ended()]
        if children:
            print(f"sending the rest to {', '.join(names)}, for at most {grace_s:.0f} s", flush=True)
        end_all(children, grace_s)
        for child in children:
            if child.code not in (ExitCode.OK, ExitCode.FAILED):  # It has said itself why it failed.
                why = f"had ended with code {child.code}" if child.name in gone else "did not end in time"
                _note(run_dir, f"{child.name} {why}: diloco track {run_dir.root} {child.name} sends the rest")


def _note(run_dir: RunDir, why: str) -> None:
    """Log an event about a tracker, and print it."""
    with closing(EventLog(run_dir.events, "track")) as log:
        log.emit("note", {"note": "tracker", "why": why})
    print(f"tracker {why}", flush=True)
