"""A scenario: the faults of a run and their times, as a YAML file that a user can write.

    - {at_s: 30, do: kill, target: site-b, for_s: 8}            # SIGKILL; started again after 8 s
    - {at_progress: 0.4, do: partition, target: link:site-c, for_s: 10}
    - {at_progress: 0.6, do: kill, target: syncer, for_s: 3}

``at_s`` counts from the first step of any site; ``at_progress`` is the share of the run that is done, for scenarios
that must fit slow machines and fast ones.  Kinds:

    kill       site or syncer   SIGKILL; started again after for_s, a site without it stays dead
    stop       site or syncer   SIGSTOP, and SIGCONT after for_s
    partition  link             nothing crosses it for for_s
    half_open  link             one direction (up, the default, or down) is silent for for_s
    reset      link             its connections are reset
    set        link             set rtt_ms, jitter_ms, mbps, queue_kib, stall_percent, stall_ms, for good or for_s
    start      site             it is absent until then (a late joiner)
    leave      site             SIGTERM: it leaves for good

Of several syncers the first is ``syncer``, the others are ``syncer-1`` and so on; a fault on a site's link is on its
links to all of them.  Reading a file and playing it are pure; ``up`` carries out what ``Schedule.due`` returns.
"""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import dataclass, field
from math import inf
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]

from diloco.config import compose as configs
from diloco.config.errors import ConfigError
from diloco.config.keys import hint
from diloco.config.placing import is_syncer, syncer_name
from diloco.wan.link import LinkOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from diloco.config.schema import RunConfig
    from diloco.runs.process import Child
    from diloco.wan.process import RelayProcess


DEMO = "demo"
DEMO_SITES = ("site-a", "site-b", "site-c")
LINK = "link:"
LINK_FIELDS = ("rtt_ms", "jitter_ms", "mbps", "queue_kib", "stall_percent", "stall_ms")
COMMON_FIELDS = ("at_s", "at_progress", "do", "target")
# For each kind its targets, and whether for_s is given: "must", "may" or "never".
KINDS: Mapping[str, tuple[str, str]] = {
    "kill": ("process", "may"),
    "stop": ("process", "must"),
    "partition": ("link", "must"),
    "half_open": ("link", "must"),
    "reset": ("link", "never"),
    "set": ("link", "may"),
    "start": ("site", "never"),
    "leave": ("site", "never"),
}
LASTS_S_MAX = 3600.0


class ScenarioError(ConfigError):
    """A scenario that cannot be played; the text names the file, the line and the value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One thing to do.  Exactly one of ``at_s`` and ``at_progress`` is set."""

    do: str
    target: str
    at_s: float | None = None
    at_progress: float | None = None
    for_s: float | None = None
    direction: str = "up"
    changes: dict[str, float] = field(default_factory=dict)
    line: int = 0

    @property
    def site(self) -> str:
        """The site that it is about, "" for a syncer."""
        return "" if is_syncer(self.target) else self.target.removeprefix(LINK)


@dataclass(frozen=True, slots=True)
class Play:
    """Carry out ``step`` now, or end it (``heals``)."""

    step: Step
    heals: bool = False


class Schedule:
    """Decides when each step of a scenario is due."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.waiting = list(steps)
        """The steps that have not begun."""
        self.healing: list[tuple[float, Step]] = []
        """The steps that last, each with the time of its end."""

    def due(self, run_s: float, progress: float) -> list[Play]:
        """Return what to do now: first what ends, then what begins.  Each step begins once and ends at most once."""
        plays = [Play(step, heals=True) for end_s, step in sorted(self.healing, key=itemgetter(0)) if run_s >= end_s]
        self.healing = [(end_s, step) for end_s, step in self.healing if run_s < end_s]
        for step in [step for step in self.waiting if _reached(step, run_s, progress)]:
            self.waiting.remove(step)
            plays.append(Play(step))
            if step.for_s is not None:
                self.healing.append((run_s + step.for_s, step))
        return plays

    def heal_all(self) -> list[Play]:
        """Return the ends of all lasting steps, and begin no more: the run is being drained."""
        self.waiting = []
        return self.due(inf, 0.0)


def not_yet_played(steps: Sequence[Step], played: Iterable[tuple[str, str]], progress: float) -> list[Step]:
    """Return the steps of a scenario that are left for a run that resumes at ``progress``.

    ``played`` are the kind and the target of each step in the earlier parts of the run; of equal steps, the first in
    the file count as played.  A step that was not played before its ``at_progress`` passed is dropped.
    """
    done = Counter(played)
    left = []
    for step in steps:
        key = (step.do, step.target)
        if done[key]:
            done[key] -= 1
        elif step.at_progress is None or step.at_progress > progress:
            left.append(step)
    return left


def late_sites(steps: Sequence[Step]) -> set[str]:
    """Return the sites that are absent at the beginning."""
    return {step.target for step in steps if step.do == "start"}


def load_scenario(text: str, file: str, sites: Sequence[str], syncers: Sequence[str] = (syncer_name(0),)) -> list[Step]:
    """Read a scenario for a run with these ``sites``; ``ScenarioError`` names ``file``, line and value."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise _not_yaml(file, error) from None
    if root is None:
        return []
    if not isinstance(root, yaml.SequenceNode):
        raise ScenarioError(f"{file}:{root.start_mark.line + 1}: a scenario is a list of steps, each with a dash")
    steps = [_Reader(file, node, sites, syncers).step() for node in root.value]
    seen: dict[str, int] = {}
    for step in steps:  # What each step alone cannot show: a site starts late only once.
        if step.do == "start":
            if step.target in seen:
                raise ScenarioError(f"{file}:{step.line}: {step.target} starts already in line {seen[step.target]}")
            seen[step.target] = step.line
    return steps


class _Reader:
    """Reads one step, and names its line in errors."""

    def __init__(self, file: str, node: yaml.Node, sites: Sequence[str], syncers: Sequence[str]) -> None:
        self._file = file
        self._where = f"{file}:{node.start_mark.line + 1}"
        self._line = node.start_mark.line + 1
        self._sites, self._syncers = list(sites), list(syncers)
        self._values = self._mapping(node)

    def _mapping(self, node: yaml.Node) -> dict[str, object]:
        if not isinstance(node, yaml.MappingNode):
            raise ScenarioError(f"{self._where}: a step is a mapping such as {{at_s: 30, do: kill, target: site-b}}")
        values: dict[str, object] = {}
        # A loader for each step: simple values are made as YAML would, and duplicate keys are noticed.
        loader = yaml.SafeLoader("")
        for key_node, value_node in node.value:
            key = str(key_node.value)
            if key in values:
                raise ScenarioError(f"{self._where}: {key} is given twice")
            try:
                values[key] = loader.construct_object(value_node, deep=True)
            except yaml.YAMLError as error:
                raise _not_yaml(self._file, error) from None
            except ValueError as error:  # Such as a date with a 13th month.
                raise ScenarioError(f"{self._where}: {key} is {value_node.value!r}: {error}") from None
        return values

    def step(self) -> Step:
        do = self._choice("do", tuple(KINDS))
        takes, lasts = KINDS[do]
        target = str(self._values.get("target", ""))
        links = [LINK + site for site in self._sites]
        allowed = {"link": links, "site": self._sites, "process": [*self._sites, *self._syncers]}[takes]
        if target not in allowed:
            raise self._wrong(f"target of {do} is {target!r}: one of {', '.join(allowed)}")
        for_s = self._number("for_s", LASTS_S_MAX, "seconds, more than 0", zero=False)
        if lasts == "must" and for_s is None:
            raise self._wrong(f"{do} needs for_s: how many seconds it lasts")
        if lasts == "never" and for_s is not None:
            raise self._wrong(f"{do} takes no for_s")
        if do == "kill" and is_syncer(target) and for_s is None:
            raise self._wrong(f"kill {target} needs for_s: without a syncer the run cannot end")
        own = {"set": LINK_FIELDS, "half_open": ("direction",)}.get(do, ())
        self._only(do, (*COMMON_FIELDS, "for_s", *own))
        if ("at_s" in self._values) == ("at_progress" in self._values):
            raise self._wrong("a step has either at_s (seconds) or at_progress (0 to 1)")
        return Step(
            do=do,
            target=target,
            at_s=self._number("at_s", 1e9, "seconds from the first step, 0 or more"),
            at_progress=self._number("at_progress", 1.0, "the share of the run that is done, 0 to 1"),
            for_s=for_s,
            changes=self._changes() if do == "set" else {},
            direction=self._choice("direction", ("up", "down")) if "direction" in self._values else "up",
            line=self._line,
        )

    def _changes(self) -> dict[str, float]:
        given = {name: self._number(name, 1e9, "a number, 0 or more") for name in LINK_FIELDS}
        changes = {name: value for name, value in given.items() if value is not None}
        if not changes:
            raise self._wrong(f"set changes nothing: give one of {', '.join(LINK_FIELDS)}")
        # The jitter must fit a round trip that may not be given here, so the pair is checked when it is applied.
        alone = {name: value for name, value in changes.items() if name != "jitter_ms" or "rtt_ms" in changes}
        try:
            LinkOptions(**alone)  # type: ignore[arg-type]
        except ValueError as error:
            raise self._wrong(str(error)) from None
        return changes

    def _choice(self, name: str, allowed: tuple[str, ...]) -> str:
        value = self._values.get(name, "")
        if value not in allowed:
            raise self._wrong(f"{name} is {value!r}: one of {', '.join(allowed)}")
        return str(value)

    def _number(self, name: str, most: float, wanted: str, *, zero: bool = True) -> float | None:
        """Return a number from 0 (excluded without ``zero``) to ``most``; None where the step has none of that name."""
        if name not in self._values:
            return None
        value: Any = self._values[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= most or (value == 0 and not zero):
            raise self._wrong(f"{name} is {value!r}: {wanted}")
        return float(value)

    def _only(self, do: str, allowed: tuple[str, ...]) -> None:
        for name in self._values:
            if name not in allowed:
                takes = f"{do} takes {', '.join(allowed)}"
                raise self._wrong(f"unknown key {name}: {hint(name, allowed, takes)}")

    def _wrong(self, text: str) -> ScenarioError:
        return ScenarioError(f"{self._where}: {text}")


def _not_yaml(file: str, error: yaml.YAMLError) -> ScenarioError:
    mark = getattr(error, "problem_mark", None)
    where = f"{file}:{mark.line + 1}" if mark is not None else file
    return ScenarioError(f"{where}: not YAML: {getattr(error, 'problem', None) or error}")


def _reached(step: Step, run_s: float, progress: float) -> bool:
    if step.at_s is not None:
        return run_s >= step.at_s
    assert step.at_progress is not None
    return progress >= step.at_progress


def scenario_of(config: RunConfig) -> list[Step]:
    """Return the steps of ``scenario``: a file, a built-in name, or "none"; for null those of the demo that apply."""
    sites = list(config.cluster.sites)
    chosen = DEMO if config.scenario is None else config.scenario
    ours = configs.folder() / "scenario" / f"{chosen}.yaml"
    file = ours if ours.is_file() and not Path(chosen).is_file() else Path(chosen)
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(sorted(path.stem for path in ours.parent.glob("*.yaml")))
        raise ConfigError(f"scenario is {chosen!r}: neither a file that can be read nor one of {known}") from error
    if config.scenario is not None:
        names = [syncer_name(index) for index in range(config.outer.num_syncers)]
        steps = load_scenario(text, str(file), sites, names)
    else:
        steps = [step for step in load_scenario(text, str(file), [*sites, *DEMO_SITES]) if step.site in ["", *sites]]
    if not config.network.emulate:
        broken = [step for step in steps if step.target.startswith(LINK)]
        if config.scenario is not None and broken:
            raise ConfigError(f"{file}:{broken[0].line}: {broken[0].target} is no link: network.emulate is false")
        steps = [step for step in steps if step not in broken]
    return steps


AT = "@"
"""Separates the site from the syncer's number in the name of a link to a syncer that is not the first."""


def site_of(link: str) -> str:
    """Return the site of ``link``."""
    return link.partition(AT)[0]


# --- Inject a scenario's faults into the child processes and links of ``diloco up``, and log them as events ----------


class Faults:
    """``start`` restarts a child; ``links`` are the options of each link without faults."""

    def __init__(
        self,
        children: Mapping[str, Child],
        relay: RelayProcess | None,
        links: Mapping[str, Mapping[str, float]],
        start: Callable[[Child], None],
        emit: Callable[[str, dict[str, object]], None],
    ) -> None:
        self._children, self._relay, self._links = children, relay, links
        self._start, self._emit = start, emit

    def play(self, plays: Iterable[Play]) -> None:
        """Begin and end faults.  An impossible one (its target has ended) is skipped, with an event that says why."""
        for play in plays:
            step = play.step
            act = self._heal if play.heals else self._begin
            why = act(step)
            facts: dict[str, object] = {"fault": step.do, "target": step.target}
            if why:
                self._emit("skipped", {**facts, "why": why})
            elif play.heals:
                self._emit("healed", facts)
            else:
                self._emit("fault", {**facts, "seconds": step.for_s})
                if step.do == "start":
                    self._start(self._children[step.target])

    def _begin(self, step: Step) -> str:
        """Begin the fault; return "" or the reason why that is impossible."""
        if step.target.startswith(LINK):
            return self._on_links(step)
        child = self._children[step.target]
        if step.do == "start":
            return "it runs already" if child.running else ""
        if not child.running:
            return "it does not run"
        if step.do != "stop":
            # The supervisor must not take this end for an accident and restart the child too early.
            child.wanted = False
        child.signal({"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "leave": signal.SIGTERM}[step.do])
        return ""

    def _heal(self, step: Step) -> str:
        if step.target.startswith(LINK):
            return self._on_links(step, heals=True)
        child = self._children[step.target]
        if step.do == "stop":
            child.signal(signal.SIGCONT)
            return "" if child.running else "it has ended"
        if child.running and not child.ended():
            return "it runs already"
        self._start(child)
        return ""

    def _on_links(self, step: Step, *, heals: bool = False) -> str:
        """Begin or end the fault on the site's links to all syncers."""
        assert self._relay is not None, "scenario_of leaves no step on a link where there is no relay"
        for link in (link for link in self._links if site_of(link) == step.site):
            if step.do == "set":
                usual = {name: self._links[link][name] for name in step.changes}
                try:
                    self._relay.set(link, **(usual if heals else step.changes))
                except ValueError as error:
                    return str(error)
            elif heals:
                self._relay.heal(link)
            elif step.do == "reset":
                self._relay.reset(link)
            else:
                self._relay.partition(link, "both" if step.do == "partition" else step.direction)
        return ""
