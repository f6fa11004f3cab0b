"""Compare a real run with its simulation: the measurements that the simulation gets, and the results of both.

It gets what only the machine and the text determine: the time of inner steps at each site, when each site joined, the
time of encoding and of an outer step, the encoded bytes of updates and versions, and the scenario's faults.  It must
predict everything else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from diloco.config.errors import ConfigError
from diloco.lab.fleet import faults_of
from diloco.observe.eventlog import read_events
from diloco.observe.history import RunHistory
from diloco.observe.text import number, whole
from diloco.runs.scenario import Step

if TYPE_CHECKING:
    from diloco.config.run_dir import RunDir
    from diloco.observe.eventlog import Event
    from diloco.sim.fleet_plan import FleetPlan, FleetResult


@dataclass(frozen=True, slots=True)
class Column:
    """One site's results.  ``idle_share`` is of the time from its first step to the end of its training."""

    steps: int
    updates_merged: int
    bytes_up: int
    bytes_down: int
    idle_share: float


@dataclass(frozen=True, slots=True)
class MadeRun:
    """The measurements of a real run.  ``update_bytes`` and ``version_bytes`` are each fragment's means, or None.

    ``sites`` has for each site the fields of a ``FleetSite`` that were measured: step_s, steps_s, seal_s and starts_s.
    """

    sites: Mapping[str, Mapping[str, Any]]
    merge_s: float
    update_bytes: Sequence[int | None]
    version_bytes: Sequence[int | None]
    versions: Sequence[int]
    faults: Sequence[Step]
    columns: Mapping[str, Column]


def read_made(folder: RunDir) -> MadeRun:
    """Read the measurements from the ``events.jsonl`` of a run; ConfigError for a run that did not end."""
    events = list(read_events(folder.events))
    history = RunHistory(events)
    trained = {name: site for name, site in sorted(history.sites.items()) if site.meter("inner_steps")}
    if not trained or history.ending is None:
        raise ConfigError(f"{folder.root} has no run that ended: there is nothing to compare a simulation with")
    joined: dict[str, float] = {}
    for event in events:
        if event.get("what") == "site_joined":
            joined.setdefault(str(event.get("site")), number(event, "at") or 0.0)
    first = min(joined.values(), default=0.0)
    sites, columns = {}, {}
    for name, site in trained.items():
        # Stalls of training, without the copying of values, which is work.
        idle_s, train_s = site.meter("stall_s") - site.meter("adopt_s"), site.meter("train_s")
        step_s = (train_s - idle_s) / site.meter("inner_steps")
        sites[name] = {
            "step_s": step_s,
            "steps_s": _steps_s(events, name, step_s),
            "seal_s": _seal_s(events, name),
            "starts_s": joined.get(name, first) - first,
        }
        steps, idle_share = int(site.meter("inner_steps")), idle_s / max(train_s, 1e-9)
        columns[name] = Column(steps, site.merges, site.bytes_up, site.bytes_down, idle_share)
    return MadeRun(
        sites=sites,
        merge_s=_merge_s(events),
        update_bytes=_mean_bytes(events, "pushed", len(history.layout)),
        version_bytes=_mean_bytes(events, "published", len(history.layout)),
        versions=list(history.versions),
        faults=_faults(events),
        columns=columns,
    )


def simulated(found: FleetResult, names: Sequence[str]) -> dict[str, Column]:
    """Return the results of each site in a simulation."""
    return {
        name: Column(site.steps, site.rounds, site.bytes_up, site.bytes_down, site.idle_s / max(site.training_s, 1e-9))
        for name, site in zip(names, found.sites, strict=True)
    }


def _steps_s(events: Sequence[Event], name: str, step_s: float) -> tuple[float, ...]:
    """Return the time of each step, scaled so that the mean is ``step_s``, which includes the time between steps.

    Single times, because sites on one machine are slow at the same times, which a mean hides.
    """
    mine = [event for event in events if event.get("what") == "step" and event.get("who") == name]
    steps = [number(event, "step_s") or 0.0 for event in mine]
    total = sum(steps)
    return tuple(step * step_s * len(steps) / total for step in steps) if total else ()


def _seal_s(events: Sequence[Event], name: str) -> float:
    """Return the median time from the step at which an update was measured until it was sealed."""
    stepped, took = 0.0, []
    for event in events:
        if event.get("who") == name and event.get("what") == "step":
            stepped = number(event, "at") or 0.0
        elif event.get("who") == name and event.get("what") == "sealed" and stepped:
            took.append((number(event, "at") or 0.0) - stepped)
    return median(took) if took else 0.0


def _faults(events: Sequence[Event]) -> list[Step]:
    """Return the scenario's faults with their times and durations; a kill lasts until the process is back."""
    first = [(number(each, "at") or 0.0) - (number(each, "step_s") or 0.0) for each in events if each["what"] == "step"]
    steps = []
    for place, event in enumerate(events):
        if event.get("what") != "fault":
            continue
        what, target, at = str(event.get("fault")), str(event.get("target")), number(event, "at") or 0.0
        again = [
            number(later, "at") or 0.0
            for later in events[place:]
            if (later.get("what"), later.get("site")) == ("site_joined", target)
            or (later.get("what"), later.get("who")) == ("syncer_started", target)
        ]
        lasts_s = again[0] - at if what == "kill" and again else number(event, "seconds")
        steps.append(Step(do=what, target=target, at_s=max(0.0, at - first[0]), for_s=lasts_s))
    return steps


def _merge_s(events: Sequence[Event]) -> float:
    """Return the median time from the close of a round to its version."""
    closed: dict[int, float] = {}
    took = []
    for event in events:
        at, fragment = number(event, "at") or 0.0, whole(event, "fragment")
        if event.get("what") == "round_closed":
            closed[fragment] = at
        elif event.get("what") == "published" and fragment in closed:
            took.append(at - closed.pop(fragment))
    return median(took) if took else 0.0


def _mean_bytes(events: Sequence[Event], what: str, fragments: int) -> list[int | None]:
    sizes: dict[int, list[int]] = defaultdict(list)
    for event in events:
        if event.get("what") == what and whole(event, "bytes"):
            sizes[whole(event, "fragment")].append(whole(event, "bytes"))
    return [round(sum(sizes[each]) / len(sizes[each])) if sizes[each] else None for each in range(fragments)]


def as_made(plan: FleetPlan, names: Sequence[str], made: MadeRun) -> FleetPlan:
    """Return the configuration's ``plan`` with the real run's measurements filled in."""
    missing = [name for name in names if name not in made.sites]
    if missing:
        raise ConfigError(f"cluster.sites has {missing[0]}, which made no step in the run")
    return replace(
        plan,
        sites=tuple(replace(site, **made.sites[name]) for name, site in zip(names, plan.sites, strict=True)),
        merge_s=made.merge_s,
        faults=faults_of(made.faults, names),
        update_bytes=_known(made.update_bytes, plan.update_bytes),
        version_bytes=_known(made.version_bytes, plan.version_bytes),
    )


def _known(measured: Sequence[int | None], otherwise: Sequence[int]) -> tuple[int, ...]:
    return tuple(size or other for size, other in zip(measured, otherwise, strict=True))
