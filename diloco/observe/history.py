"""Reduce a run's events to its history, which the live view, the summary and the report all read.

Pure: events in (``INTERFACE`` below), records out; no file and no clock.  Instants are seconds of the run: wall time
since its first event, without the pauses between two ``diloco up`` of the same run.

INTERFACE.  Each event is ``{"at", "who", "what", ...}`` as ``eventlog`` writes it; missing or null fields are skipped,
so that the events of a run that was killed at any point can be read.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from diloco.config.placing import BETWEEN, is_syncer
from diloco.observe.text import number, sentence, whole
from diloco.sync.events import DISCARDING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from diloco.observe.eventlog import Event


ROUNDS_MAX = 20_000
LINES_MAX = 400
FP32_BYTES = 4


class RunHistory:
    """The history of a run: pass every event to ``take``, in the order of the file; read the fields at any time."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        """``events`` are the first ones."""
        self.sites = defaultdict[str, SiteHistory](SiteHistory)
        """Each site, from its first mention."""
        self.layout: list[int] = []
        """Values in each fragment."""
        self.versions: list[int] = []
        self.lineage = 1
        self.epoch = 0
        self.syncer_spans: list[Span] = []
        self.syncer_up = False
        """Whether all syncers are up."""
        self.run_tokens = 0
        self._merged = defaultdict[str, Counter[str]](Counter)
        self.progress = 0.0
        self.rounds: deque[Round] = deque(maxlen=ROUNDS_MAX)
        self.num_rounds = 0
        self.faults: list[Fault] = []
        self.standstills: list[Standstill] = []
        self.unmoved_s = 0.0
        """The longest time during training without a new version of any fragment although updates waited."""
        self.trained_s = 0.0
        """The time from the first step to the newest version or last round."""
        self._moved_s: float | None = None
        self.evaluations: list[Evaluation] = []
        self.references: dict[str, float] = {}
        """Bits per byte of the validation text, by general-purpose compressor."""
        self.units: dict[str, int] = {}
        """The counts of the data's units by state, from the syncer's last event; empty where none are leased."""
        self.wire = Series()
        """(seconds, bytes on the links, bytes with fp32 instead, bytes of data parallel instead)."""
        self.bytes_fp32 = 0
        self.bytes_joins = 0
        self._downlinks: dict[int, int] = {}
        """By fragment, the encoded bytes of its newest version."""
        self.num_syncers = 1
        self.last_round = False
        """Whether every syncer has announced the last round."""
        self.ending: str | None = None
        self.run_status: str | None = None
        self.restored = False
        """Whether the run was restored after ``up``'s last event about it: a summary, if any, is older than that."""
        self.first_step_s: float | None = None
        self.stepping_s = 0.0
        """The time from the first step to the newest, without pauses."""
        self.seconds = 0.0
        self.lines: deque[tuple[float, str, str]] = deque(maxlen=LINES_MAX)
        """(seconds, who, sentence) of the events to show to a reader."""
        self.num_lines = 0
        self._origin: float | None = None
        self._step_s: float | None = None
        """The time of the newest step; None from a pause to the next step."""
        self._session = 0
        self._stands_still = False
        self._met: dict[int, float] = {}
        self._syncers_up: set[str] = set()
        self._last_rounds: set[str] = set()
        self._ended: dict[str, str] = {}
        """The run's ending at each syncer."""
        self._syncer_spoke = False
        self._syncers: dict[int, str] = {}
        """The address of each syncer by its number, as its sites and standbys know it."""
        for event in events:
            self.take(event)

    def take(self, event: Event) -> None:
        """Take the next event; an unknown one changes only the clock."""
        at, who, what = event.get("at"), str(event.get("who", "")), str(event.get("what", ""))
        if not isinstance(at, int | float):
            return
        begins = what == "run" and event.get("state") == "started"
        begins |= what == "syncer_started" and self.by_hand and self._stands_still
        now_s = self._clock(float(at), begins=begins, counts=who != "eval")
        getattr(self, f"_on_{what}", self._on_other)(who, event, now_s)
        line = sentence(event)
        # Lost connections to the syncer are normal once the run has ended.
        if line is not None and not (what == "disconnected" and (self.last_round or self.ending)):
            self.num_lines += 1
            self.lines.append((now_s, who, line))

    def staleness(self, site: SiteHistory) -> int:
        """Return how many versions the site's oldest base is behind."""
        known = enumerate(self.versions)
        return max((version - site.base_versions.get(index, version) for index, version in known), default=0)

    @property
    def num_fragments(self) -> int:
        """The number of fragments, from the layout (only ``up`` logs it) or syncers' versions; at least 1."""
        return len(self.layout) or len(self.versions) or 1

    def tokens_merged(self, site: str) -> int:
        """Return the tokens of ``site`` in published versions: the mean over all fragments, as in ``Status``."""
        return sum(of[site] for of in self._merged.values()) // self.num_fragments

    def bytes_data_parallel(self) -> int:
        """Return the bytes that data parallel would have sent for the steps made so far.

        A ring all-reduce of fp32 gradients moves 2(N-1)/N times their size out of each of the N sites for each of its
        steps.  Each byte counts once, at its sender, as the links count it.
        """
        count = len(self.sites)
        steps = sum(site.meter("inner_steps") for site in self.sites.values())
        return int(steps * 2 * (count - 1) / count * FP32_BYTES * sum(self.layout)) if count else 0

    @property
    def by_hand(self) -> bool:
        """Whether no ``diloco up`` recorded this run: syncer and sites were started one by one."""
        return not self._session

    @property
    def whole_at(self) -> str:
        """The syncer's address where these are only events of its sites or a standby; "" where they are the run's."""
        known = BETWEEN.join(address for _, address in sorted(self._syncers.items()))
        return known if self.by_hand and not self._syncer_spoke else ""

    def begin_again(self) -> None:
        """Forget the recorded end of the run, because the run continues after it."""
        self.ending = self.run_status = None
        self.last_round = False
        self._last_rounds.clear()
        self._ended.clear()

    # --- time --------------------------------------------------------------------------------------------------

    def _clock(self, at: float, *, begins: bool, counts: bool) -> float:
        """Return the run's time at ``at``; an evaluation, possibly days after the end, does not ``count``."""
        if self._origin is None:
            self._origin = at
        elif begins:
            # Another `diloco up` or syncer of the same run: leave out the pause between the two.
            self._origin, self._step_s = at - self.seconds, None
        self._stands_still &= not begins
        if counts and not self._stands_still:
            self.seconds = max(self.seconds, at - self._origin)
        return min(at - self._origin, self.seconds)

    def _steps(self, now_s: float) -> None:
        """Add the time since the previous step, unless there was a pause between them."""
        if self.first_step_s is None:
            self.first_step_s = now_s
        self.stepping_s += 0.0 if self._step_s is None else now_s - self._step_s
        self._step_s = now_s

    # --- events of `up` ----------------------------------------------------------------------------------------

    def _on_run(self, who: str, event: Event, now_s: float) -> None:
        state, self.restored = event.get("state"), False
        if state == "started":
            self._session += 1
            self.begin_again()
            self.num_syncers = whole(event, "syncers") or 1
            names = event.get("sites")
            for name in names if isinstance(names, list) else []:
                site = self.sites[str(name)]
                site.done, site.left = None, False
        if state == "ended":
            self.run_status = str(event.get("status"))
            self._stands_still = True
            for spans in [self.syncer_spans, *(site.spans for site in self.sites.values())]:
                _end_span(spans, now_s)

    def _on_process(self, who: str, event: Event, now_s: float) -> None:
        name, state = str(event.get("name")), str(event.get("state"))
        if is_syncer(name) and not event.get("site"):
            (self._syncers_up.add if state == "started" else self._syncers_up.discard)(name)
            self.syncer_up = len(self._syncers_up) >= self.num_syncers
            if name != "syncer":
                return
            spans = self.syncer_spans
        elif name in self.sites or event.get("site"):
            site = self.sites[name]
            spans = site.spans
            site.process = state
            if state == "started":
                site.restarts += bool(spans)
                site.losses.cut()
            site.joined = site.frozen = False
            site.out_of_reach.clear()
        else:
            return
        _end_span(spans, now_s)
        if state == "started":
            spans.append(Span(now_s))

    def _on_fault(self, who: str, event: Event, now_s: float) -> None:
        fault = Fault(str(event.get("fault")), str(event.get("target")), now_s, number(event, "seconds"))
        self.faults.append(fault)
        self._hits(fault)

    def _on_healed(self, who: str, event: Event, now_s: float) -> None:
        for fault in self.faults:
            if (fault.what, fault.target) == (event.get("fault"), event.get("target")) and fault.healed_s is None:
                fault.healed_s = now_s
                self._hits(fault)

    def _hits(self, fault: Fault) -> None:
        """Take a fault's begin or end at the sites that it cuts off, stops or ends: all when its target is a syncer."""
        begins = fault.healed_s is None
        for name, site in self.sites.items():
            if is_syncer(fault.target) or fault.target in (name, f"link:{name}"):
                site.merges_since_fault = 0
            if fault.target == f"link:{name}" and (fault.seconds is not None or not begins):
                site.cut = fault.what if begins else ""
            elif fault.target == name and (fault.what == "stop" or not begins):
                site.frozen = begins

    def _count_wire(self, now_s: float) -> None:
        """Add a point to the chart of bytes, once a second: a sum over all sites for each event would take too long."""
        if self.wire.last is not None and now_s < self.wire.last[0] + 1.0:
            return
        total = sum(other.bytes_up + other.bytes_down for other in self.sites.values())
        self.wire.add(now_s, total, self.bytes_fp32, self.bytes_data_parallel())

    # --- events of a restore -----------------------------------------------------------------------------------

    def _on_restored(self, who: str, event: Event, now_s: float) -> None:
        self.restored = True
        self.begin_again()
        for site in self.sites.values():
            site.left_with = None  # Some merged tokens may be lost by the restore.
        held = event.get("held")
        if isinstance(held, list):
            self._merged.clear()
            for name, _, tokens, _ in held:
                self._merged[who][str(name)] += int(tokens)
        self.run_tokens = whole(event, "run_tokens")
        self.lineage = whole(event, "lineage")
        self._take_versions(event)

    # --- events of the syncer ----------------------------------------------------------------------------------

    def _on_syncer_started(self, who: str, event: Event, now_s: float) -> None:
        self._syncer_spoke = True
        self.epoch = whole(event, "epoch")
        if self.by_hand and who == "syncer":
            _end_span(self.syncer_spans, now_s)
            self.syncer_spans.append(Span(now_s))
        self._take_versions(event)
        if "tokens_merged" in event:  # Earlier releases lack it: count on from the published versions.
            merged = mapping(event, "tokens_merged")
            self._merged.pop("restore", None)
            self._merged[who] = Counter({site: whole(merged, site) for site in merged})
        self.ending = None
        self._ended.pop(who, None)
        if event.get("ending") is not None:  # The run had ended before this start: no more events follow.
            self._on_last_round(who, event, now_s)
            self._on_final(who, event, now_s)

    def _take_versions(self, event: Event) -> None:
        """Set the event's versions: those of all fragments, or of one of several syncers."""
        versions = versions_in(event)
        self.versions += [0] * (max(versions, default=-1) + 1 - len(self.versions))
        for fragment, version in versions.items():
            self.versions[fragment] = version

    def _on_outer_step(self, who: str, event: Event, now_s: float) -> None:
        fragment, version = whole(event, "fragment"), whole(event, "version")
        done = Round(fragment, version, now_s, self._met.pop(fragment, None), lineage=self.lineage)
        done.weights = {name: float(weight) for name, weight in mapping(event, "sites").items()}
        done.staleness = {name: int(value) for name, value in mapping(event, "staleness").items()}
        done.norm, done.seconds = number(event, "norm"), number(event, "seconds")
        if self.round(fragment, version) is None:
            self.rounds.append(done)
            for name in done.weights:
                site = self.sites[name]
                site.merges += 1
                site.merges_since_fault += 1
                if not site.has_own_events:  # For each update the site takes a version, more or less.
                    self.bytes_fp32 += 2 * self._fragment_bytes(event)

    def _on_published(self, who: str, event: Event, now_s: float) -> None:
        fragment, version = whole(event, "fragment"), whole(event, "version")
        self._syncer_spoke = True
        self.versions += [0] * (fragment + 1 - len(self.versions))
        if version > self.versions[fragment]:
            self.num_rounds += version - self.versions[fragment]
            self._moves(who, fragment, now_s)
            self.versions[fragment] = version
            for name, counts in mapping(event, "merged").items():
                if isinstance(counts, list) and counts:
                    self._merged[who][name] += int(counts[0])
        self._downlinks[fragment] = whole(event, "bytes")
        self.run_tokens = max(self.run_tokens, whole(event, "run_tokens"))
        self.progress = max(self.progress, whole(event, "progress_ppm") / 1e6)
        round_ = self.round(fragment, version)
        if round_ is not None:
            round_.published_s = now_s

    def _moves(self, who: str, fragment: int | None, now_s: float) -> None:
        """End standstills: that of ``fragment`` (new version) or, for None (last round), all of the syncer ``who``."""
        still = [each for each in self.standstills if each.end_s is None]
        for each in still:
            if each.fragment == fragment or (fragment is None and each.syncer == who):
                each.end_s = now_s
        if self.first_step_s is None or self._last_rounds:
            return
        self.trained_s = now_s - self.first_step_s
        if still:
            self.unmoved_s = max(self.unmoved_s, now_s - (self._moved_s or self.first_step_s))
        self._moved_s = now_s

    def round(self, fragment: int, version: int) -> Round | None:
        """Return the round that made this version, if known; an outer step repeated by a restart is the same round."""
        recent = islice(reversed(self.rounds), 256)
        wanted = (self.lineage, fragment, version)
        return next((known for known in recent if (known.lineage, known.fragment, known.version) == wanted), None)

    def _on_reported(self, who: str, event: Event, now_s: float) -> None:
        """Take a heartbeat that the syncer recorded, of a site whose own events are, or are by now, kept elsewhere.

        Each of several syncers records them: the first for the site's progress, each for its own traffic.
        """
        site = self.sites[str(event.get("site"))]
        of_syncer, incarnation = whole(event, "of_syncer"), whole(event, "incarnation")
        if self.by_hand and not of_syncer and incarnation > site.own_incarnation:
            site.has_own_events = False
        if site.has_own_events:
            return
        traffic = {"bytes_up": whole(event, "bytes_up"), "bytes_down": whole(event, "bytes_down")}
        if of_syncer:
            site.elsewhere[of_syncer, incarnation] = traffic
            return
        train_s, step = number(event, "train_s") or 0.0, whole(event, "step")
        self._steps(now_s)
        if incarnation != site.incarnation:
            before = site.meters.get(site.incarnation)
            if before is not None and train_s >= before.get("train_s", math.inf) and step >= site.step:
                del site.meters[site.incarnation]  # The same process, which joined again after a restore of the run.
            else:
                site.restarts += before is not None
                site.step_before = min(site.step, step) if before is not None else 0
                site.losses.cut()
            site.incarnation = incarnation
        site.joined = True
        site.reported = {name: whole(event, name) for name in event if name.startswith("tokens_")}
        site.trained(now_s, event, whole(event, "tokens_processed"))
        site.base_versions |= versions_in(event)
        site.meters[incarnation] = {
            "inner_steps": max(step - site.step_before, 0),
            "train_s": train_s,
            "stall_s": number(event, "stall_s") or 0.0,
            **traffic,
            **dict.fromkeys(("step_s_p50", "step_s_p95", "step_s_max"), number(event, "step_s") or 0.0),
        }
        self._count_wire(now_s)

    def _on_last_round(self, who: str, event: Event, now_s: float) -> None:
        self._moves(who, None, now_s)
        self._last_rounds.add(who)
        self.last_round = len(self._last_rounds) >= self.num_syncers

    def _on_final(self, who: str, event: Event, now_s: float) -> None:
        self._ended[who] = str(event.get("ending"))
        if len(self._ended) < self.num_syncers:
            return
        # A drained syncer is not finished, so the run is not finished either.
        self.ending = next((each for each in self._ended.values() if each != "finished"), "finished")
        if self.ending == "finished":
            self.progress = 1.0
        self._stands_still |= self.by_hand

    # --- events of a site --------------------------------------------------------------------------------------

    def _on_step(self, who: str, event: Event, now_s: float) -> None:
        site = self.sites[who]
        site.has_own_events = True
        self._steps(now_s)
        # Steps repeated after a restart count again: these are tokens read, so the trainer's own total is not used.
        site.trained(now_s, event, site.tokens + whole(event, "tokens"))

    def _on_joined(self, who: str, event: Event, now_s: float) -> None:
        site = self.sites[who]
        site.joined = site.has_own_events = True
        site.out_of_reach.discard(whole(event, "of_syncer"))
        site.done, site.left_with, site.left = None, None, False
        site.incarnation = whole(event, "incarnation")
        if not event.get("of_syncer"):
            site.own_incarnation = site.incarnation
        self._syncers[whole(event, "of_syncer")] = str(event.get("syncer", "HOST:PORT"))
        if self.whole_at:
            self._take_versions(event)
        site.base_versions |= {place: version for place, version in versions_in(event).items() if version >= 0}

    def _on_meter(self, who: str, event: Event, now_s: float) -> None:
        site = self.sites[who]
        incarnation = whole(event, "incarnation") or site.incarnation
        values = {name: number(event, name) for name in event if name not in ("at", "who", "what", "incarnation")}
        site.meters[incarnation] = {name: value for name, value in values.items() if value is not None}
        if not site.links:  # Without emulated links the sites themselves count what they send.
            self._count_wire(now_s)

    def _on_fetched(self, who: str, event: Event, now_s: float) -> None:
        had, carried = number(event, "had"), whole(event, "bytes")
        # A version that its codec makes no smaller is sent whole, also to sites that follow.  Earlier releases lack
        # "had", and a site may fetch a version before the event that it is published.
        sent = self._downlinks.get(whole(event, "fragment"), 0 if had is None else carried)
        if event.get("whole") and ((had is not None and had < 0) or carried > sent):
            self.bytes_joins += carried
        else:
            self.bytes_fp32 += self._fragment_bytes(event)

    def _fragment_bytes(self, event: Event) -> int:
        fragment = whole(event, "fragment")
        return FP32_BYTES * self.layout[fragment] if fragment < len(self.layout) else 0

    # --- events that change a field or two ---------------------------------------------------------------------

    def _on_other(self, who: str, event: Event, now_s: float) -> None:
        site = str(event.get("site"))
        match event.get("what"):
            case "layout" if isinstance(values := event.get("fragments"), list):
                self.layout = [int(value) for value in values]
            case "reference" if isinstance(values := event.get("bits_per_byte"), dict):
                self.references = {str(name): float(value) for name, value in values.items()}
            case "units":
                self.units = {name: whole(event, name) for name in event if name not in ("at", "who", "what")}
            case "link":
                self.sites[site].links[self._session] = (whole(event, "bytes_up"), whole(event, "bytes_down"))
                self._count_wire(now_s)
            case "grace":
                self._met.setdefault(whole(event, "fragment"), now_s)
            case "eval" if (loss := number(event, "val_loss")) is not None:
                bits, versions = number(event, "val_bits_per_byte"), [*versions_in(event).values()]
                is_whole = event.get("whole") is True
                self.evaluations.append(Evaluation(now_s, whole(event, "tokens"), loss, bits, versions, is_whole))
            case "standstill":
                fragment, why = whole(event, "fragment"), str(event.get("why"))
                still = [each for each in self.standstills if each.end_s is None and each.fragment == fragment]
                if still:
                    still[0].why = why
                else:
                    self.standstills.append(Standstill(who, fragment, now_s - (number(event, "seconds") or 0.0), why))
            case "refused":
                self.sites[site].refused[str(event.get("reason"))] += 1
            case "site_joined":
                self.sites[site].left = False
                if self.by_hand:  # No ``up`` says when a process ends: at the latest when the next begins.
                    _end_span(self.sites[site].spans, now_s)
                    self.sites[site].spans.append(Span(now_s))
            case "site_left" | "site_evicted":
                self.sites[site].left = True
                if self.by_hand:
                    _end_span(self.sites[site].spans, now_s)
            case "number_format":
                self.sites[who].products = str(event.get("products"))
            case "connected" if "anew" in event:  # A standby.
                self._syncers[0] = str(event.get("syncer", "HOST:PORT"))
            case "connected":
                self.sites[who].out_of_reach.discard(whole(event, "of_syncer"))
            case "disconnected" if who in self.sites:
                self.sites[who].out_of_reach.add(whole(event, "of_syncer"))
            case "sealed":
                self.sites[who].sealed[whole(event, "fragment"), whole(event, "sequence")] = whole(event, "tokens")
            case "adopted":
                fragment, version = whole(event, "fragment"), whole(event, "version")
                self.sites[who].base_versions[fragment] = version
                if isinstance(sequences := event.get("merged"), list):
                    tokens = sum(self.sites[who].sealed.pop((fragment, each), 0) for each in sequences)
                    if self.whole_at:
                        self._take_versions({"fragments": [fragment], "versions": [version]})
                        self.sites[who].merges += len(sequences)
                        self._merged[who][who] += tokens
            case "pushed" if event.get("outcome") == "accepted":
                self.bytes_fp32 += self._fragment_bytes(event)
            case "pushed" | "fate" if event.get("reason") in DISCARDING:
                update = whole(event, "fragment"), whole(event, "sequence")
                self.sites[who].tokens_discarded += self.sites[who].sealed.pop(update, 0)
            case "site_done":
                # The ledger's keys are "processed", "merged", ...; the summary's are "tokens_processed", ...
                ledger = {name.removeprefix("tokens_"): value for name, value in mapping(event, "ledger").items()}
                done = {name: int(value) for name, value in ledger.items() if isinstance(value, int | float)}
                self.sites[who].done = self.sites[who].left_with = done


def versions_in(event: Mapping[str, object]) -> dict[int, int]:
    """Return each fragment's version: of the event's ``fragments`` (one of several syncers), or of all in order."""
    fragments, versions = event.get("fragments"), event.get("versions")
    if not isinstance(versions, list | tuple):
        return {}
    known = fragments if isinstance(fragments, list) else range(len(versions))
    return {int(fragment): int(version) for fragment, version in zip(known, versions, strict=False)}


def mapping(event: Mapping[str, object], name: str) -> dict[str, float]:
    """Return a field that is a mapping; an empty one where it is missing."""
    value = event.get(name)
    return value if isinstance(value, dict) else {}


# --- The records of a ``RunHistory`` ---------------------------------------------------------------------------------

SERIES_MAX = 4000


class Series:
    """Points over time, halved whenever there are ``SERIES_MAX``, with breaks between two processes."""

    def __init__(self) -> None:
        self.points: list[tuple[float, ...] | None] = []
        self.last: tuple[float, ...] | None = None
        self._stride = 1
        self._skipped = 0

    def add(self, *point: float) -> None:
        """Append a point."""
        self.last = point
        self._skipped += 1
        if self._skipped >= self._stride:
            self._skipped = 0
            self.points.append(point)
        if len(self.points) >= SERIES_MAX:
            self._stride *= 2
            # Breaks stay: a line must not be drawn across the time in which a process was gone.
            self.points = [kept for index, kept in enumerate(self.points) if index % 2 or kept is None]

    def cut(self) -> None:
        """Add a break: the next point does not continue the last one."""
        if self.points and self.points[-1] is not None:
            self.points.append(None)

    def whole(self) -> list[tuple[float, ...] | None]:
        """Return all points kept, and the last one in any case."""
        if self.last is None or self.points[-1:] == [self.last]:
            return self.points
        return [*self.points, self.last]


@dataclass(slots=True)
class Span:
    """A stretch of time; ``end_s`` is None while it lasts."""

    start_s: float
    end_s: float | None = None


def _end_span(spans: list[Span], now_s: float) -> None:
    if spans and spans[-1].end_s is None:
        spans[-1].end_s = now_s


@dataclass(slots=True)
class Standstill:
    """A stretch of time in which a syncer made no version of a fragment although updates waited for it."""

    syncer: str
    fragment: int
    start_s: float
    why: str
    end_s: float | None = None


@dataclass(slots=True)
class Fault:
    """One fault of the scenario.  ``healed_s`` is None for a fault that was not healed, or cannot be."""

    what: str
    target: str
    at_s: float
    seconds: float | None = None
    healed_s: float | None = None


@dataclass(slots=True)
class Round:
    """One outer step: its fragment and version, the sites in it, when quorum was met, when it was published."""

    fragment: int
    version: int
    at_s: float
    met_s: float | None = None
    published_s: float | None = None
    weights: dict[str, float] = field(default_factory=dict)
    staleness: dict[str, int] = field(default_factory=dict)
    norm: float | None = None
    seconds: float | None = None
    lineage: int = 1
    """A restore begins a lineage, which numbers its versions again."""


@dataclass(slots=True)
class Evaluation:
    """The score of the published values on the validation set."""

    at_s: float
    tokens: int
    val_loss: float
    val_bits_per_byte: float | None
    versions: list[int]
    whole: bool = False
    """Whether it is of the whole validation text, as for the final version."""


@dataclass(slots=True)
class SiteHistory:
    """The history of one site."""

    process: str = ""
    """The state of its process, from ``up``: started, ended, killed; empty without ``up``."""
    frozen: bool = False
    joined: bool = False
    out_of_reach: set[int] = field(default_factory=set)
    """The numbers of the syncers that it has lost."""
    cut: str = ""
    """The fault on its link now; "" without one."""
    products: str = ""
    """The number format of its matrix products."""
    step: int = 0
    tokens: int = 0
    tokens_per_s: float = 0.0
    loss: float | None = None
    losses: Series = field(default_factory=Series)
    """(seconds, tokens, nats per token)."""
    base_versions: dict[int, int] = field(default_factory=dict)
    incarnation: int = 0
    meters: dict[int, dict[str, float]] = field(default_factory=dict)
    """The last meter of each incarnation."""
    restarts: int = 0
    merges: int = 0
    merges_since_fault: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    tokens_discarded: int = 0
    sealed: dict[tuple[int, int], int] = field(default_factory=dict)
    """The tokens of each update without a fate, by fragment and sequence."""
    links: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Bytes (up, down) counted at its link in each session."""
    spans: list[Span] = field(default_factory=list)
    """When its process lived."""
    has_own_events: bool = False
    """Whether its own events are in this log, as those of sites on this machine are."""
    own_incarnation: int = 0
    """The latest that its own events tell, of the first syncer."""
    reported: dict[str, int] = field(default_factory=dict)
    """Without own events: its counts of tokens from its last heartbeat."""
    elsewhere: dict[tuple[int, int], dict[str, int]] = field(default_factory=dict)
    """Without own events: the bytes to and from each syncer but the first, by its number and the incarnation there."""
    step_before: int = 0
    """Without own events: its step when this incarnation was first heard of."""
    done: dict[str, int] | None = None
    left_with: dict[str, int] | None = None
    """The ledger of its last process that reported one.

    It holds until another process trains, which has joined first, or until the run is restored."""
    left: bool = False

    def trained(self, now_s: float, event: Event, tokens: int) -> None:
        """Take the step, speed and loss of an event by which the site has read ``tokens`` in all."""
        self.step, self.tokens = whole(event, "step"), tokens
        self.tokens_per_s, self.loss = number(event, "tokens_per_s") or 0.0, number(event, "loss")
        if self.loss is not None:
            self.losses.add(now_s, tokens, self.loss)

    def meter(self, name: str) -> float:
        """Return the sum of a meter's field over all incarnations."""
        return sum(meter.get(name, 0.0) for meter in self.meters.values())

    def meter_max(self, name: str) -> float:
        """Return the largest value of a meter's field over all incarnations."""
        return max((meter.get(name, 0.0) for meter in self.meters.values()), default=0.0)

    def meter_by_steps(self, name: str) -> float:
        """Return the mean of a meter's field over the incarnations, weighted by their steps."""
        steps = self.meter("inner_steps")
        total = sum(meter.get(name, 0.0) * meter.get("inner_steps", 0.0) for meter in self.meters.values())
        return total / steps if steps else 0.0

    @property
    def bytes_up(self) -> int:
        """Bytes that its link carried to the syncer; without an emulated link, the site's own count."""
        return sum(up for up, _ in self.links.values()) if self.links else self._carried("bytes_up")

    @property
    def bytes_down(self) -> int:
        """The same from the syncer."""
        return sum(down for _, down in self.links.values()) if self.links else self._carried("bytes_down")

    def _carried(self, name: str) -> int:
        return int(self.meter(name)) + sum(each[name] for each in self.elsewhere.values())

    def state(self) -> str:
        """Return the site's state in one word, for a table."""
        if self.done is not None:
            return "done"
        if self.left:
            return "left"
        if self.process in ("ended", "killed"):
            return self.process
        if self.frozen:
            return "frozen"
        if not self.joined:
            return "starting" if self.process else "waiting"
        return "alone" if self.out_of_reach else "training"
