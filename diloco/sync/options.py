"""The options of the two machines, the schedule by which fragments are due, and the settings that all must agree on.

Every field has its unit as the last word of its name.  An invalid value raises ``ValueError`` with the field and the
value, so that the launcher can show one line instead of a traceback.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_type_hints

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@lru_cache(maxsize=64)
def even_offsets(num_fragments: int, inner_steps: int) -> tuple[int, ...]:
    """Return the inner step, modulo ``inner_steps``, at which each fragment is due.

    Fragments are spread evenly over the period, so that the link carries a flat load instead of a burst (Streaming
    DiLoCo, arXiv 2501.18512, section 2.2).  The last fragment is due at 0, which with one fragment is DiLoCo's H.
    """
    assert 0 < num_fragments <= inner_steps, (num_fragments, inner_steps)
    return tuple(place * inner_steps // num_fragments % inner_steps for place in range(1, num_fragments + 1))


@lru_cache(maxsize=4096)
def due(offsets: tuple[int, ...], inner_steps: int, step: int, steps: int = 1) -> tuple[int, ...]:
    """Return the indices of ``offsets`` (one for each fragment) that are due right after inner step ``step`` (counted
    from 1), or after one of the ``steps`` that end with it."""
    steps = min(steps, step)
    return tuple([each for each, at in enumerate(offsets) if (step - at) % inner_steps < steps])


SECOND_NS = 1_000_000_000

WEIGHT_RULES = ("tokens2_per_step", "tokens", "uniform")
GRACE_KINDS = ("fixed", "adaptive")
ADOPT_KEEPS_UNSENT = ("rebase", "eager")
"""The rules that keep all trained progress that was not sent."""
ADMISSION_POLICIES = ("refuse", "hold", "admit")

UNITS_AHEAD_MAX = 4096
FATES_KEPT, FATES_KEPT_LIMIT = 64, 1024
"""Usual and largest ``fates_kept_max``: the fates that one message to a site may carry."""


def smoothed(previous_ns: int, sample_ns: int) -> int:
    """Return an exponential mean with factor one half, in integers so that a replay gives the same value."""
    return sample_ns if previous_ns == 0 else (previous_ns + sample_ns) // 2


def require(condition: bool, field: str, value: object, wanted: str) -> None:
    """Raise ``ValueError`` naming ``field``, its ``value`` and what was ``wanted``, unless ``condition`` holds."""
    if not condition:
        raise ValueError(f"{field} is {value!r}: {wanted}")


class Bound(NamedTuple):
    """In the annotation of a field: the condition ``holds`` on its value, and its text for error messages."""

    holds: Callable[[Any], bool]
    wanted: str


def one_of(names: Sequence[str]) -> Bound:
    """Require one of these names."""
    return Bound(lambda value: value in names, f"one of {', '.join(names)}")


def within(least: float, most: float) -> Bound:
    """Require a value from ``least`` to ``most``, both included."""
    return Bound(lambda value: least <= value <= most, f"from {least:g} to {most:g}")


def below(most: float) -> Bound:
    """Require a value from 0 to ``most``, ``most`` excluded."""
    return Bound(lambda value: 0 <= value < most, f"from 0 to below {most:g}")


ABOVE_0 = Bound(lambda value: 0 < value < inf, "positive and finite")
AT_LEAST_1 = Bound(lambda value: 1 <= value < inf, "at least 1")
ABOVE_1 = Bound(lambda value: 1 < value < inf, "above 1 and finite")
NOT_NEGATIVE = Bound(lambda value: 0 <= value < inf, "not negative, and finite")
Count = Annotated[int, AT_LEAST_1]
Natural = Annotated[int, NOT_NEGATIVE]
Positive = Annotated[int, ABOVE_0]


def check_bounds(options: object, before: str = "") -> None:
    """Raise ``ValueError`` for the first field of a dataclass whose value breaks the bound in the field's annotation.

    ``before`` is a prefix of the field's name in the error.
    """
    kind: type = type(options)
    for name, bound in _bounds(kind):
        require(bound.holds(getattr(options, name)), before + name, getattr(options, name), bound.wanted)


@lru_cache
def _bounds(kind: type) -> list[tuple[str, Bound]]:
    hints = get_type_hints(kind, include_extras=True)
    return [(name, bound) for name, hint in hints.items() for bound in getattr(hint, "__metadata__", ())]


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthOptions:
    """How to treat an update that differs from usual ones (``sync/admission.py``).

    The operator sets them for a process, not for the run: ``SyncerStarted`` journals them, so the next may have others.
    """

    policy: str = "refuse"
    """``refuse`` it as OUTLIER, ``hold`` it for an operator's decision, or ``admit`` it with a note."""
    policies: dict[str, str] = field(default_factory=dict)
    """Policies of single sites that differ from ``policy``."""
    norm_ratio_max: Annotated[float, ABOVE_1] = 10.0
    cosine_z_max: Annotated[float, ABOVE_0] = 6.0
    history: Annotated[int, within(2, 64)] = 16
    """Updates of one (site, fragment) in its window."""
    history_min: int = 4
    """Shortest usable window: with fewer updates the other window judges, or none."""
    hold_ns: Positive = 600 * SECOND_NS
    """A held update that no operator decides in this time is refused."""

    def __post_init__(self) -> None:
        words = f"one of {', '.join(ADMISSION_POLICIES)}"
        require(self.policy in ADMISSION_POLICIES, "admission.policy", self.policy, words)
        for site, policy in self.policies.items():
            require(policy in ADMISSION_POLICIES, f"admission of site {site}", policy, words)
        check_bounds(self)
        require(2 <= self.history_min <= self.history, "history_min", self.history_min, f"2 to history={self.history}")

    def policy_of(self, site: str) -> str:
        """Return the policy for an outlier of ``site``."""
        return self.policies.get(site, self.policy)


@dataclass(kw_only=True, slots=True)
class OuterOptions:
    """Rules of the outer machine: quorum, grace, weights and bounds.

    ``quorum`` is a number of distinct sites, or ``"all"``: the members when the round opened (DiLoCo, arXiv
    2311.08105).  ``quorum=1`` with an adaptive grace is Decoupled DiLoCo (arXiv 2604.21428).
    """

    num_fragments: Count = 1
    quorum: int | str = 1
    quorum_min: Count = 1
    round_updates: Natural = 0
    """A round is the first so many updates, of any site, without waiting for more: 1 is asynchronous local SGD (arXiv
    2401.09135), more are a buffer (FedBuff, arXiv 2106.06639); 0: all updates that came in time."""
    grace: Annotated[str, one_of(GRACE_KINDS)] = "adaptive"
    """``fixed``: always ``grace_ns``.  ``adaptive``: ``grace_share_percent`` of the slack, at most ``grace_ns``."""
    grace_ns: Natural = SECOND_NS
    grace_share_percent: Annotated[int, within(0, 99)] = 80
    grace_period_percent: Annotated[int, within(0, 100)] = 0
    """An adaptive grace is at least this share of the fastest live site's period: 90 brings equally fast sites into one
    round, whatever their phase, and no site stops training for it."""
    overlap_steps: Natural = 2
    weights: Annotated[str, one_of(WEIGHT_RULES)] = "tokens2_per_step"
    merge_by: Annotated[str, one_of(("site", "update"))] = "site"
    """What one contribution is: ``site``, the sum of a site's updates in the round; ``update``, each single update
    (FedBuff, arXiv 2106.06639)."""
    share_weighted: bool = False
    """Scale an outer step of only some of the live sites by their share of a full round (``rounds.share``)."""
    staleness_max: Natural = 8
    staleness_power: Annotated[float, NOT_NEGATIVE] = 0.0
    """The weight of a contribution is multiplied by (1 + staleness)^-power."""
    updates_in_flight_max: Count = 2
    site_timeout_ns: Positive = 15 * SECOND_NS
    final_wait_ns: Positive = 20 * SECOND_NS
    token_budget: Natural = 0
    """Tokens to merge before the last round; 0 for no bound."""
    run_ns: Natural = 0
    """Machine time from the first join to the last round; 0 for no bound."""
    fates_kept_max: int = FATES_KEPT
    """Fates kept for each site and fragment, for a site that missed one: at least those it can still ask for."""
    sites_max: Count = 256
    """Most sites in the run, without those that have left or were evicted.  ``SyncerStarted`` journals it, so that the
    next process may have another."""
    unit_sequences: Natural = 0
    """Sequences in a unit of the data; 0: no units are leased, because each site has its own share of the data."""
    lease_ns: Positive = 300 * SECOND_NS
    """Silence of a site after which its units in hand are given back and leased again."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if isinstance(self.quorum, str):
            require(self.quorum == "all", "quorum", self.quorum, 'a number of sites or "all"')
        else:
            require(self.quorum >= 1, "quorum", self.quorum, "at least 1")
            require(self.quorum >= self.quorum_min, "quorum", self.quorum, f"not below quorum_min={self.quorum_min}")
        alone = self.round_updates == 0 or (self.quorum == 1 and self.quorum_min == 1)
        require(alone, "round_updates", self.round_updates, f"only with quorum=1, not {self.quorum!r}")
        by_site = not self.share_weighted or self.merge_by == "site"
        require(by_site, "share_weighted", True, "only with merge_by=site, because a share is of sites, not of updates")
        least = self.updates_in_flight_max * (self.staleness_max + 2)
        wanted = f"from updates_in_flight_max x (staleness_max + 2) = {least} to {FATES_KEPT_LIMIT}"
        require(least <= self.fates_kept_max <= FATES_KEPT_LIMIT, "fates_kept_max", self.fates_kept_max, wanted)


@dataclass(kw_only=True, slots=True)
class LearnerOptions:
    """Rules of a site's machine: when a fragment is due, and how a version is adopted."""

    num_fragments: Count = 1
    inner_steps: int = 15
    """H of DiLoCo: inner steps between two updates of one fragment."""
    dynamic_steps: bool = False
    """H is that of the fastest site; a slower site makes proportionally fewer inner steps."""
    dynamic_rounding: Annotated[str, one_of(("down", "up"))] = "down"
    """How to round that number: ``down`` (arXiv 2401.09135), or ``up`` as in HALoS' code (arXiv 2506.04531)."""
    adopt: Annotated[str, one_of(("rebase", "overwrite", "blend", "eager"))] = "rebase"
    """``rebase`` keeps progress, ``overwrite`` is Decoupled DiLoCo, ``blend`` is Streaming DiLoCo with α, ``eager``
    keeps unsent progress and a share of the progress that is not merged."""
    updates_in_flight_max: Count = 2
    discards_max: Count = 5
    """Updates refused with *discard* in a row after which the site stops with an error."""
    answers_only: bool = False
    """Under overwrite and blend: while an update is in flight only a version that contains it is adopted (HALoS), and
    at most ``updates_in_flight_max`` updates, the last one apart, are sent before their versions are adopted."""
    from_adopt: bool = False
    """Steps to the next update count from the last adopted version, and none is due while one is in flight (HALoS)."""
    lock_step: bool = False
    """Wait after each update until its version is adopted: classic DiLoCo and deterministic runs only."""
    offsets: tuple[int, ...] = ()
    """``due_at`` as given; empty: spread evenly.  A machine with only part of the fragments is given their offsets
    among all of them."""
    due_at: tuple[int, ...] = field(init=False)
    """The inner step, modulo ``inner_steps``, at which each fragment is due: ``offsets``, or spread evenly."""
    unit_sequences: Natural = 0
    """Sequences in a unit of the data; 0: this machine leases no units."""
    sequence_tokens: int = 0
    """Tokens in one sequence, where units are leased."""
    units_ahead: int = 64
    """Units to lease ahead of the data cursor."""

    def __post_init__(self) -> None:
        check_bounds(self)
        wanted = f"at least one step for each of num_fragments={self.num_fragments}"
        require(self.inner_steps >= self.num_fragments, "inner_steps", self.inner_steps, wanted)
        told = len(self.offsets) in (0, self.num_fragments) and all(0 <= o < self.inner_steps for o in self.offsets)
        require(told, "offsets", self.offsets, f"one for each fragment, from 0 to {self.inner_steps - 1}, or none")
        self.due_at = self.offsets or even_offsets(self.num_fragments, self.inner_steps)
        if self.unit_sequences:
            require(self.sequence_tokens >= 1, "sequence_tokens", self.sequence_tokens, "at least 1")
            wanted = f"1 to {UNITS_AHEAD_MAX}"
            require(1 <= self.units_ahead <= UNITS_AHEAD_MAX, "units_ahead", self.units_ahead, wanted)


# --- The settings on which a site and the syncer must agree before they exchange a byte of a tensor ------------------

PROTOCOL = 3
PROTOCOL_OLDEST = 2
"""A syncer also serves the previous protocol, so that a live run can be upgraded: first the syncer, then the sites."""
CORPUS = "data.corpus"
"""The key under which a site shares the text that it draws from, where units of it are leased.  The syncer's settings
do not have it: the first site sets the run's corpus, and the outer machine compares the others with it."""

MAY_CHANGE = frozenset({"outer.sites_max"})
"""The shared settings that a syncer may change when it restarts on a run: how many sites it has room for.

The journal records them at every start, and sites do not use them.  No other shared setting is like that: either sites
train, encode, send or stop by their own value of it (``outer.discards_max``, ``outer.updates_in_flight_max``,
``outer.site_timeout_s``, which they are told), or the machine decides by it and the journal does not record it, so that
a replay would decide otherwise (``outer.quorum``, ``outer.final_wait_s``, ``run.tokens``).
"""
OF_THE_SYNCER = MAY_CHANGE | {"outer.share_weighted", "outer.grace_period_percent"}
"""Settings that only the syncer uses: a site whose release or preset has other values may join."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """The run's identity.  ``shared`` maps dotted names of the shared configuration to their values as text."""

    protocol: int
    run_id: str
    lineage: int
    layout_fingerprint: str
    shared: Mapping[str, str]


def disagreement(ours: Agreement, theirs: Agreement) -> str | None:
    """Return the first difference as text that names the field and both values, or None when all is equal.

    ``ours`` is the syncer's.  A site that does not know the run's lineage sends 0.  A site with an older lineage is
    admitted and told the present one.  A site with a newer lineage is refused: this syncer has outdated state.
    """
    if not PROTOCOL_OLDEST <= theirs.protocol <= ours.protocol:
        oldest = f", which serves {PROTOCOL_OLDEST} as well" if ours.protocol > PROTOCOL_OLDEST else ""
        return f"protocol is {theirs.protocol} at the site and {ours.protocol} at the syncer{oldest}"
    if theirs.run_id != ours.run_id:
        return f"run_id is {theirs.run_id!r} at the site and {ours.run_id!r} at the syncer"
    if theirs.lineage > ours.lineage:
        return (
            f"lineage is {theirs.lineage} at the site and {ours.lineage} at the syncer: the run was restored, "
            f"and this syncer is from before that; {how_to_restore(theirs.lineage)}"
        )
    for name in sorted((set(ours.shared) | set(theirs.shared)) - {CORPUS, *OF_THE_SYNCER}):
        here, there = theirs.shared.get(name), ours.shared.get(name)
        if here != there:
            return f"{name} is {here or 'not set'} at the site and {there or 'not set'} at the syncer"
    if theirs.layout_fingerprint != ours.layout_fingerprint:
        return (
            f"layout fingerprint is {theirs.layout_fingerprint[:12]} at the site "
            f"and {ours.layout_fingerprint[:12]} at the syncer"
        )
    return None


def how_to_restore(lineage: int) -> str:
    """Return advice for a syncer whose state is older than what a site has seen of it; the site knows ``lineage``."""
    return (
        "stop the syncer; unless another leads the run now, move its data folder away and take the run up from what is "
        f"newer: diloco restore RUN_DIR --from-site SITE_DIR --above {lineage}, or --from BACKUP"
    )
