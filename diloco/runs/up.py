"""A whole run on this machine: syncer, sites, links between them, an observer, and the faults of a scenario.

``Up`` owns the children and one loop: read new events, restart children that died, play due faults, count the links'
bytes, draw the view.  The truth of the run is ``events.jsonl``; the events of ``up`` go there too and are read back.
"""

from __future__ import annotations

import math
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from diloco.config.errors import ExitCode, failing, require, section
from diloco.config.placing import BETWEEN, backup_of, check_lease, has_several, syncer_configs, syncer_dir, syncer_name
from diloco.config.run_dir import RunDir, run_dir_of
from diloco.config.schema import SyncerSection
from diloco.observe.eventlog import EventLog, event_blocks, new_events
from diloco.observe.text import shortened
from diloco.runs.process import Child, end_all, verb
from diloco.runs.scenario import Faults, Schedule, Step, late_sites, not_yet_played, site_of
from diloco.wan.process import ChildDiedError
from diloco.wan.relay import format_address, parse_address
from diloco.wire.client import AdminClient
from diloco.wire.messages import Refused, Unreachable
from diloco.wire.options import is_loopback

if TYPE_CHECKING:
    from diloco.config.schema import RunConfig
    from diloco.observe.history import RunHistory
    from diloco.observe.view import LiveView, PlainView
    from diloco.runs.process import Interrupts
    from diloco.wan.process import RelayProcess
    from diloco.wire.options import SecurityOptions


EVAL = "eval"
EVAL_EVERY_S = "10"
TICK_S = 0.1
LINKS_EVERY_S = 1.0
END_GRACE_S = 5.0
FAREWELL_S = 2.0
"""How long a site may take to end after the syncer has."""
WORDS_MAX = 160
"""Most characters of a child's last words in the summary; its log has all of them."""


@dataclass(kw_only=True, slots=True)
class UpOptions:
    """The settings of ``Up``."""

    sites: Mapping[str, Sequence[str]]
    """The arguments of ``diloco site`` for each site."""
    syncers: Sequence[OneSyncer]
    steps: Sequence[Step]
    links: Mapping[str, Mapping[str, float]]
    """The options of each site's link."""
    layout: Sequence[int]
    """The number of values in each fragment."""
    references: Mapping[str, float]
    """Bits per byte of the text under ordinary compressors."""
    ending_s_max: float
    """The longest time from the last round to the end of the last process."""


@dataclass(slots=True)
class Outcome:
    """How the loop ended: ``code`` for the shell, ``wrong`` for the summary."""

    code: ExitCode = ExitCode.OK
    wrong: list[str] = field(default_factory=list)
    status: dict[str, object] | None = None


def children_of(options: UpOptions, run_dir: RunDir) -> dict[str, Child]:
    """Return the processes of a run, none of them started, in the order of their start."""
    config, logs = ["--config", str(run_dir.config)], run_dir.root / "logs"
    syncers = []
    for index, each in enumerate(options.syncers):
        own = [f"cluster.syncer.index={index}", f"cluster.syncer.listen={each.address}", "run.track=[]"]
        syncers.append(Child(each.name, verb("syncer", *config, *own), logs / f"{each.name}.log"))
    addresses = BETWEEN.join(each.address for each in options.syncers)
    follow = verb("eval", str(run_dir.root), "--syncer", addresses, "--follow", "--every", EVAL_EVERY_S)
    evaluator = Child(EVAL, follow, logs / "eval.log", niceness=5)
    sites = [
        Child(name, verb("site", *config, *settings), logs / f"{name}.log") for name, settings in options.sites.items()
    ]
    return {child.name: child for child in [*syncers, *sites, evaluator]}


class Up:
    """One run, from the start of its children to the end of the last one."""

    def __init__(
        self,
        options: UpOptions,
        children: dict[str, Child],
        run_dir: RunDir,
        log: EventLog,
        history: RunHistory,
        relay: RelayProcess | None,
        environment: Mapping[str, str],
    ) -> None:
        self.options, self.run_dir, self.log, self.history, self.relay = options, run_dir, log, history, relay
        self.outcome = Outcome()
        self._environment = environment
        self._next_links_s = 0.0
        self._ends_at_s: float | None = None
        self._draining = False
        self._syncer_gone_s: float | None = None
        self._terminated: set[int] = set()  # The processes of syncers that were asked to drain by a signal.
        self._syncers = {each.name: each for each in options.syncers}
        self._lost: set[str] = set()
        self._units: dict[str, object] = {}  # As emitted last.
        self._first_step_s: float | None = None
        self.children, self.sites = children, [children[name] for name in options.sites]
        self._faults = Faults(self.children, relay, options.links, self.start, log.emit)
        # Events of an earlier `diloco up` of this run are not about our children, and faults that the scenario played
        # then are not played again.
        self._blocks, is_begun = event_blocks(run_dir.events), False
        for event in new_events(self._blocks):
            history.take(event)
            is_begun = True
        history.begin_again()
        played = [(fault.what, fault.target) for fault in history.faults]
        self.schedule = Schedule(not_yet_played(options.steps, played, history.progress if is_begun else -1.0))

    # --- the loop ----------------------------------------------------------------------------------------------

    def run(self, view: LiveView | PlainView, watches: Sequence[StatusWatch], interrupts: Interrupts) -> Outcome:
        """Start everything, keep it going until the run has ended, and leave no process behind.

        ``watches`` has one for each syncer.
        """
        try:
            with failing(ChildDiedError):
                self._begin()
                while not self._over():
                    self._turn(view, watches, interrupts)
                    time.sleep(TICK_S)
        finally:
            for name in sorted(self._lost):
                how = self._syncers[name].restore
                self.outcome.wrong.append(f"the {name}'s data are gone: {how}, then the same command")
            end_all(self.children.values(), 0.0 if interrupts.count > 1 else END_GRACE_S)
            self.read()
            left = [f"{step.do} {step.target}" for step in self.schedule.waiting]
            if left and self.history.ending == "finished":  # A drained run can go on.
                self.outcome.wrong.append(f"the run ended before: {', '.join(left)}")
            view.show()
        self.outcome.status = together([watch.latest for watch in watches])
        if interrupts.count > 1:
            self.outcome.code = ExitCode.FAILED
            self.outcome.wrong.append("stopped at once, by hand")
        return self.outcome

    def _begin(self) -> None:
        # A site that joined late in an earlier part of the run starts with the others now.
        late = late_sites(self.schedule.waiting)
        facts: dict[str, object] = {"state": "started", "name": self.run_dir.root.name}
        self.log.emit("run", {**facts, "sites": list(self.options.sites), "syncers": len(self._syncers)})
        self.log.emit("layout", {"fragments": list(self.options.layout)})
        if self.options.references:
            self.log.emit("reference", {"bits_per_byte": dict(self.options.references)})
        for child in self.children.values():
            if child.name not in late:
                self.start(child)

    def _turn(self, view: LiveView | PlainView, watches: Sequence[StatusWatch], interrupts: Interrupts) -> None:
        now_s = time.monotonic()
        self.read()
        for child in self.children.values():
            if child.ended():
                self._ended(child, now_s)
            elif child.wanted and not child.running and now_s >= child.next_start_s and self._may_start(child, view):
                self.start(child)
        if interrupts.count and not self._draining:
            view.say("asked to stop: a last round, then everything ends; again: stop at once")
            self._drain(watches, now_s)
        if interrupts.count > 1 or (self._draining and self._lost):
            self._ends_at_s = now_s
        if self._first_step_s is not None and not self._draining and not self._winding_up():
            self._faults.play(self.schedule.due(now_s - self._first_step_s, self.history.progress))
        self._watch_the_end(watches, now_s)
        self._count_links(now_s)
        units = units_of([watch.latest for watch in watches])
        if isinstance(units, dict) and units != self._units:  # Where the units of the data are.
            self._units = units
            self.log.emit("units", units)
        view.show()

    def read(self) -> None:
        """Read the events since the last call."""
        for event in new_events(self._blocks):
            self.history.take(event)
            child = self.children.get(str(event["who"]))
            if child is not None and event["what"] in ("joined", "syncer_started", "eval"):
                child.proven = True
            if event["what"] == "step" and self._first_step_s is None:
                self._first_step_s = time.monotonic()

    def _may_start(self, child: Child, view: LiveView | PlainView) -> bool:
        """Return whether to start a child; not a syncer without its folder: sites train on until it is restored."""
        if child.name not in self._syncers or self._winding_up():
            return not self._winding_up()
        syncer = self._syncers[child.name]
        lost = syncer.run_dir.has_lost(syncer.run_dir.syncer)
        if lost and child.name not in self._lost:
            self.log.emit("lost", {"folder": str(syncer.run_dir.syncer)})
            view.say(f"to restore the run and have the syncer restarted, type:  {syncer.restore}")
        (self._lost.add if lost else self._lost.discard)(child.name)
        return not lost

    # --- children ----------------------------------------------------------------------------------------------

    def start(self, child: Child) -> None:
        """Start a child and log it."""
        child.start(self._environment)
        self.say_process(child, "started")

    def say_process(self, child: Child, state: str, **more: object) -> None:
        """Log the state of a child's process."""
        facts: dict[str, object] = {"name": child.name, "pid": child.pid, "state": state, **more}
        self.log.emit("process", {**facts, "site": True} if child.name in self.options.sites else facts)

    def _ended(self, child: Child, now_s: float) -> None:
        """Handle a child's end: it is orderly, or the child is started again, or the run fails."""
        orderly = child.code in (ExitCode.OK, ExitCode.DRAINED) or (child.name == EVAL and self._draining)
        if orderly or not child.wanted:
            self.say_process(child, "ended" if orderly else "killed", code=child.code)
            child.wanted = False
            return
        words = child.last_words() or "it printed nothing"
        self.say_process(child, "ended", code=child.code, unasked=True, why=words)
        told = f"{child.name} ended with exit code {child.code}: {shortened(words, WORDS_MAX)} ({child.log})"
        if not child.proven and self._first_step_s is None and child.name != EVAL:
            raise child.error(f"could not start: {told}")
        if self._winding_up() or child.code in (ExitCode.USAGE, ExitCode.MISMATCH):
            child.wanted = False
            self.outcome.wrong.append(told)
            return
        if not child.backed_off(now_s):
            child.wanted = False
            self.outcome.wrong.append(f"{told}, for the {child.deaths}th time in a row")
            if child.name in self._syncers:
                raise child.error(f"gave up on the {child.name}: {told}")

    # --- the end -----------------------------------------------------------------------------------------------

    def _winding_up(self) -> bool:
        """Return whether the run has its final versions, so that no child needs a restart."""
        return self.history.ending is not None

    def _drain(self, watches: Sequence[StatusWatch], now_s: float) -> None:
        self._draining = True
        self._faults.play(self.schedule.heal_all())
        for watch in watches:
            watch.drain()
        self._ends_at_s = self._ends_at_s or now_s + self.options.ending_s_max

    def _watch_the_end(self, watches: Sequence[StatusWatch], now_s: float) -> None:
        ending = self._draining or self._winding_up() or self.history.last_round
        no_site = not any(site.wanted or site.running for site in self.sites)
        if no_site and not ending and not self.schedule.healing and not late_sites(self.schedule.waiting):
            self.outcome.wrong.append("every site had ended before the run did")
            self._drain(watches, now_s)
        refused = any(watch.drain_refused for watch in watches)
        if self._draining and refused and not all(watch.drain_accepted for watch in watches):
            # Draining takes an administrator's token, and we have none; but the syncer is our own child.  The watch
            # asks again and is refused again, but each process gets one SIGTERM: a second would end it at once.
            for child in [self.children[name] for name in self._syncers]:
                if child.pid not in self._terminated:
                    self._terminated.add(child.pid)
                    child.signal(signal.SIGTERM)
            for watch in watches:
                watch.drain_refused = ""
        if (self._winding_up() or self.history.last_round) and self._ends_at_s is None:
            for watch in watches:
                watch.hurry()
            self._ends_at_s = now_s + self.options.ending_s_max
        gone = not any(self.children[name].running for name in self._syncers)
        if self._winding_up() and gone and self._syncer_gone_s is None:
            self._syncer_gone_s = now_s
        if self._syncer_gone_s is not None and now_s >= self._syncer_gone_s + FAREWELL_S:
            # A site that was cut off while the run ended would wait for a syncer that does not come back.  So would the
            # observer, when there is no final version to evaluate.
            self._syncer_gone_s = math.inf  # This is said once.
            drained, observer = self.history.ending == "drained", self.children[EVAL]
            known = any(evaluation.whole for evaluation in self.history.evaluations[-1:])
            if observer.running and not (drained or known):
                self.log.emit("evaluating", {"seconds_max": self.options.ending_s_max})
            observers = [observer] if drained else []
            for straggler in [*self.sites, *observers]:
                straggler.wanted = False
                straggler.signal(signal.SIGTERM)

    def _over(self) -> bool:
        if self._ends_at_s is not None and time.monotonic() >= self._ends_at_s:
            late = [child.name for child in self.children.values() if child.running]
            if late and not self._lost:
                self.outcome.wrong.append(f"{', '.join(late)} did not end in time")
            return True
        return self._winding_up() and not any(child.running for child in self.children.values())

    def _count_links(self, now_s: float) -> None:
        if self.relay is None or now_s < self._next_links_s:
            return
        self._next_links_s = now_s + LINKS_EVERY_S
        total: dict[str, dict[str, float]] = {}
        for link, stats in self.relay.stats().items():
            site = total.setdefault(site_of(link), dict.fromkeys(("bytes_up", "bytes_down"), 0))
            for name in site:
                site[name] += stats[name]
        for name, counts in total.items():
            self.log.emit("link", {"site": name, **counts})


# --- The syncers of ``diloco up`` ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OneSyncer:
    """One syncer process: its name, listen address and run folder, and the command to show when the folder is lost."""

    name: str
    address: str
    run_dir: RunDir
    restore: str


def syncers_of(config: RunConfig) -> list[OneSyncer]:
    """Return all syncers of the run, ordered by number; a lost one comes from its backups, if there are any."""
    site, found = run_dir_of(config).site(next(iter(config.cluster.sites))).root, []
    for index, part in enumerate(syncer_configs(config)):
        run_dir, backup = syncer_dir(part), backup_of(part)
        restore = f"diloco restore {run_dir.root} " + (f"--from {backup}" if backup else f"--from-site {site}")
        found.append(OneSyncer(syncer_name(index), syncer_address(part), run_dir, restore))
    return found


def syncer_address(config: RunConfig) -> str:
    """Return the syncer's listen address: as configured, or on any free port where no port was configured."""
    host, port = parse_address(config.cluster.syncer.listen)
    if port and config.cluster.syncer.listen != SyncerSection().listen:
        return config.cluster.syncer.listen
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
        return format_address(host, free.getsockname()[1])


def check_syncers(config: RunConfig) -> None:
    """Raise ConfigError for settings that the syncers, or the links to them, on one machine cannot have."""
    with section("cluster.syncer", address="listen"):
        parse_address(listen := config.cluster.syncer.listen)
    near = "emulated links stay on this machine: 127.0.0.1:PORT, or network.emulate=false"
    require(not config.network.emulate or is_loopback(listen), "cluster.syncer.listen", listen, near)
    if not has_several(config):
        return
    usual = SyncerSection()
    own = "diloco up gives each of outer.num_syncers its own; leave it out"
    for name in ("index", "processes", "listen", "metrics"):
        value = getattr(config.cluster.syncer, name)
        require(value == getattr(usual, name), f"cluster.syncer.{name}", value, own)
    check_lease(config)


# --- Polls a syncer's status, and sends it a request to drain, in a thread of its own --------------------------------

Status = dict[str, Any]
EVERY_S = 1.0
EVERY_S_AT_THE_END = 0.15
CLOSE_WAIT_S = 15.0
MEANS = ("tokens_merged", "tokens_in_flight")


def together(latest: Sequence[Status | None]) -> Status | None:
    """Combine the latest status of each syncer into that of one syncer with all fragments; None before any answer.

    Tokens are means over the fragments: each syncer counts every token that its own fragments have, so that a sum over
    syncers would count it repeatedly.
    """
    told = [status for status in latest if status is not None]
    if len(latest) == 1 or not told:
        return told[0] if told else None
    counts = [len(each.get("fragments") or ()) for each in told]
    parts = [(count, each.get("sites") or {}) for count, each in zip(counts, told, strict=True)]
    sites: dict[str, dict[str, object]] = {}
    for name in sorted({name for _, part in parts for name in part}):
        known = [(count, part[name]) for count, part in parts if name in part]
        refused: Counter[str] = Counter()
        for _, site in known:
            refused.update(site.get("updates_refused", {}))
        sites[name] = {
            **{field: sum(n * (s.get(field) or 0) for n, s in known) // sum(counts) for field in MEANS},
            "tokens_processed": max(site.get("tokens_processed") or 0 for _, site in known),
            "updates_merged": sum(site.get("updates_merged") or 0 for _, site in known),
            "undecided": sum(site.get("undecided") or 0 for _, site in known),
            "updates_refused": dict(refused),
        }
    return {"sites": sites, "units": units_of(latest)}


def units_of(latest: Sequence[Status | None]) -> Any:
    """Return where the units of the data are, from the one syncer that leases them; None where none says so."""
    return next((status["units"] for status in latest if status is not None and status.get("units")), None)


class StatusWatch:
    """Polls one syncer; ``latest`` is the newest answer, and ``answered_s`` the monotonic instant of it.

    The last answer before the syncer ends holds the final counts, so it is asked more often towards the end.
    """

    def __init__(self, address: str, security: SecurityOptions) -> None:
        self.address = address
        self.latest: Status | None = None
        self.answered_s = -math.inf
        self.drain_accepted = False
        self.drain_refused = ""
        self._client = AdminClient(address, security)
        self._drain = False
        self._every_s = EVERY_S
        self._ended = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status-watch", daemon=True)
        self._thread.start()

    def hurry(self) -> None:
        """Poll several times a second: the end is near."""
        self._every_s = EVERY_S_AT_THE_END
        self._wake.set()

    def drain(self) -> None:
        """Ask for the last round, again and again until the syncer has accepted it; the end is near then."""
        self._drain = True
        self.hurry()

    def close(self) -> None:
        """End the thread."""
        self._ended = True
        self._wake.set()
        self._client.close()
        self._thread.join(CLOSE_WAIT_S)

    def _run(self) -> None:
        while not self._ended:
            self._wake.clear()
            try:
                if self._drain and not self.drain_accepted:
                    self._client.drain()
                    self.drain_accepted = True
                self.latest, self.answered_s = self._client.status(), time.monotonic()
            except Unreachable:
                pass  # It is starting, was killed by the scenario, or has ended: the next turn asks again.
            except Refused as error:
                self.drain_refused = error.text
            self._wake.wait(self._every_s)
