"""What can be set on the two machines, checked where it is written down; and the schedule by which fragments are due.

Every field carries its unit as the last word of its name.  A value that cannot work raises ``ValueError`` with the
field and the value, so that the launcher can show one line instead of a traceback.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import inf


@lru_cache(maxsize=64)
def even_offsets(num_fragments: int, inner_steps: int) -> tuple[int, ...]:
    """The inner step, modulo ``inner_steps``, at which each fragment is due.

    Fragments are spread evenly over the period, so that the link carries a flat load instead of a burst (Streaming
    DiLoCo, arXiv 2501.18512, section 2.2).  The last fragment is due at 0, which with one fragment is DiLoCo's H.
    """
    assert 0 < num_fragments <= inner_steps, (num_fragments, inner_steps)
    return tuple(place * inner_steps // num_fragments % inner_steps for place in range(1, num_fragments + 1))


def local_steps(inner_steps: int, fastest_ns: int, own_ns: int, rounding: str = "down") -> int:
    """The inner steps that a site makes while the fastest makes ``inner_steps``: dynamic local updates, with which all
    come at about the same time, whatever their speed (arXiv 2401.09135, section 4.2).

    ``fastest_ns`` and ``own_ns`` are what an inner step takes; 0: not known yet, and then the site is as fast as any.
    ``rounding`` is ``down``, as there, or ``up``, as in HALoS' code (arXiv 2506.04531); at least one step either way.
    """
    if not (fastest_ns and own_ns):
        return inner_steps
    steps, rest = divmod(inner_steps * fastest_ns, own_ns)
    return min(inner_steps, max(1, steps + (rounding == "up" and rest > 0)))


def due(offsets: tuple[int, ...], inner_steps: int, step: int, steps: int = 1) -> tuple[int, ...]:
    """The fragments, of which these are the offsets, that are due right after inner step number ``step`` (counted from
    1), or after one of the ``steps`` that end with it."""
    return _due(offsets, inner_steps, step % inner_steps, min(steps, step))


def steps_to_due(offsets: tuple[int, ...], inner_steps: int, step: int) -> int:
    """The inner steps from ``step`` to the next after which any fragment is due; at least 1."""
    return _steps_to_due(offsets, inner_steps, step % inner_steps)


@lru_cache(maxsize=4096)
def _steps_to_due(offsets: tuple[int, ...], inner_steps: int, place: int) -> int:
    return min(inner_steps - (place - at) % inner_steps for at in offsets)


@lru_cache(maxsize=4096)
def _due(offsets: tuple[int, ...], inner_steps: int, place: int, steps: int) -> tuple[int, ...]:
    return tuple(each for each, at in enumerate(offsets) if (place - at) % inner_steps < steps)


SECOND_NS = 1_000_000_000

WEIGHT_RULES = ("tokens2_per_step", "tokens", "uniform")
MERGE_BY = ("site", "update")
GRACE_KINDS = ("fixed", "adaptive")
ADOPT_RULES = ("rebase", "overwrite", "blend", "eager")
ADOPT_KEEPS_UNSENT = ("rebase", "eager")
"""The rules under which nothing is given up of what was trained and not sent."""
ROUNDINGS = ("down", "up")
ADMISSION_POLICIES = ("refuse", "hold", "admit")

UNITS_AHEAD_MAX = 4096
FATES_KEPT_LIMIT = 1024
"""Of ``fates_kept_max``: what one message to a site may carry."""


def smoothed(previous_ns: int, sample_ns: int) -> int:
    """An exponential mean with factor one half, in integers so that a replay gives the same value."""
    return sample_ns if previous_ns == 0 else (previous_ns + sample_ns) // 2


def require(condition: bool, field: str, value: object, wanted: str) -> None:
    """Raise ``ValueError`` naming ``field``, the ``value`` it has and what was ``wanted``."""
    if not condition:
        raise ValueError(f"{field} is {value!r}: {wanted}")


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthOptions:
    """What becomes of an update that looks like no other (``sync/admission.py``).

    They are an operator's, not the run's: ``SyncerStarted`` journals them, so that the next process may have others.
    """

    policy: str = "refuse"
    """``refuse`` it as OUTLIER, ``hold`` it for an operator's word, or ``admit`` it with a note."""
    policies: dict[str, str] = field(default_factory=dict)
    """By site, where that differs."""
    norm_ratio_max: float = 10.0
    cosine_z_max: float = 6.0
    history: int = 16
    """Updates of one (site, fragment) that are remembered."""
    history_min: int = 4
    """Fewer of them say nothing: until then an update is judged by the other window, or not at all."""
    hold_ns: int = 600 * SECOND_NS
    """A held update that nobody decides in this time is refused."""

    def __post_init__(self) -> None:
        words = f"one of {', '.join(ADMISSION_POLICIES)}"
        require(self.policy in ADMISSION_POLICIES, "admission.policy", self.policy, words)
        for site, policy in self.policies.items():
            require(policy in ADMISSION_POLICIES, f"admission of site {site}", policy, words)
        require(1 < self.norm_ratio_max < inf, "norm_ratio_max", self.norm_ratio_max, "above 1 and finite")
        require(0 < self.cosine_z_max < inf, "cosine_z_max", self.cosine_z_max, "positive and finite")
        require(2 <= self.history_min <= self.history, "history_min", self.history_min, f"2 to history={self.history}")
        require(self.history <= 64, "history", self.history, "at most 64")
        require(self.hold_ns > 0, "hold_ns", self.hold_ns, "positive")

    def policy_of(self, site: str) -> str:
        """What becomes of an outlier of ``site``."""
        return self.policies.get(site, self.policy)


@dataclass(kw_only=True, slots=True)
class OuterOptions:
    """Rules of the outer machine: who must arrive, how long to wait, what counts how much.

    ``quorum`` is a number of distinct sites, or ``"all"``: the members when the round opened (DiLoCo, arXiv
    2311.08105).  ``quorum=1`` with an adaptive grace is Decoupled DiLoCo (arXiv 2604.21428).
    """

    num_fragments: int = 1
    quorum: int | str = 1
    quorum_min: int = 1
    round_updates: int = 0
    """So many updates, the first that came, whoever sent them, are a round, and nobody is waited for: 1 is asynchronous
    local SGD (arXiv 2401.09135), more are a buffer (FedBuff, arXiv 2106.06639); 0: all that came in time."""
    grace: str = "adaptive"
    """``fixed``: always ``grace_ns``.  ``adaptive``: ``grace_share_percent`` of the slack, at most ``grace_ns``."""
    grace_ns: int = SECOND_NS
    grace_share_percent: int = 80
    grace_period_percent: int = 0
    """An adaptive grace is no less than this share of the fastest live site's period: 90 brings equal sites into one
    round, whatever their phase, and nobody waits for it."""
    overlap_steps: int = 2
    weights: str = "tokens2_per_step"
    merge_by: str = "site"
    """What one contribution is: ``site``, all that a site has in the round, added up; ``update``, each of its updates
    (FedBuff, arXiv 2106.06639)."""
    share_weighted: bool = False
    """An outer step of some of the live sites is that share of a step, and not a whole one (``rounds.share``)."""
    staleness_max: int = 8
    staleness_power: float = 0.0
    """How much less an old contribution counts beside a new one: (1 + staleness)^-power."""
    updates_in_flight_max: int = 2
    site_timeout_ns: int = 15 * SECOND_NS
    final_wait_ns: int = 20 * SECOND_NS
    token_budget: int = 0
    """Tokens to merge before the last round; 0 for no bound."""
    run_ns: int = 0
    """Machine time from the first join to the last round; 0 for no bound."""
    fates_kept_max: int = 64
    """Of each site and fragment, for who missed one: at least those of the updates that can still be asked for."""
    sites_max: int = 256
    """Sites that are in the run; not those that have left, or that an operator has put out.  ``SyncerStarted``
    journals it, so that the next process may have another."""
    unit_sequences: int = 0
    """Sequences in a unit of the data; 0: none are leased, because each site has a share of its own."""
    lease_ns: int = 300 * SECOND_NS
    """Silence of a site after which the units that it has in hand are leased again."""

    def __post_init__(self) -> None:
        require(self.num_fragments >= 1, "num_fragments", self.num_fragments, "at least 1")
        if isinstance(self.quorum, str):
            require(self.quorum == "all", "quorum", self.quorum, 'a number of sites or "all"')
        else:
            require(self.quorum >= 1, "quorum", self.quorum, "at least 1")
            require(self.quorum >= self.quorum_min, "quorum", self.quorum, f"not below quorum_min={self.quorum_min}")
        require(self.quorum_min >= 1, "quorum_min", self.quorum_min, "at least 1")
        require(self.round_updates >= 0, "round_updates", self.round_updates, "0 (all that came in time) or more")
        alone = self.round_updates == 0 or (self.quorum == 1 and self.quorum_min == 1)
        require(alone, "round_updates", self.round_updates, f"only with quorum=1, and it is {self.quorum!r}")
        require(self.merge_by in MERGE_BY, "merge_by", self.merge_by, f"one of {', '.join(MERGE_BY)}")
        by_site = not self.share_weighted or self.merge_by == "site"
        require(by_site, "share_weighted", True, "a share is one of sites, and with merge_by=update updates are merged")
        require(self.grace in GRACE_KINDS, "grace", self.grace, f"one of {', '.join(GRACE_KINDS)}")
        require(self.grace_ns >= 0, "grace_ns", self.grace_ns, "not negative")
        require(0 <= self.grace_share_percent < 100, "grace_share_percent", self.grace_share_percent, "0 to 99")
        percent = self.grace_period_percent
        require(0 <= percent <= 100, "grace_period_percent", percent, "0 to 100")
        require(self.overlap_steps >= 0, "overlap_steps", self.overlap_steps, "not negative")
        require(self.weights in WEIGHT_RULES, "weights", self.weights, f"one of {', '.join(WEIGHT_RULES)}")
        require(0 <= self.staleness_power < inf, "staleness_power", self.staleness_power, "not negative, and finite")
        require(self.staleness_max >= 0, "staleness_max", self.staleness_max, "not negative")
        require(self.updates_in_flight_max >= 1, "updates_in_flight_max", self.updates_in_flight_max, "at least 1")
        require(self.site_timeout_ns > 0, "site_timeout_ns", self.site_timeout_ns, "positive")
        require(self.final_wait_ns > 0, "final_wait_ns", self.final_wait_ns, "positive")
        require(self.token_budget >= 0, "token_budget", self.token_budget, "not negative")
        require(self.run_ns >= 0, "run_ns", self.run_ns, "not negative")
        least = self.updates_in_flight_max * (self.staleness_max + 2)
        require(
            least <= self.fates_kept_max <= FATES_KEPT_LIMIT,
            "fates_kept_max",
            self.fates_kept_max,
            f"from updates_in_flight_max x (staleness_max + 2) = {least} to {FATES_KEPT_LIMIT}",
        )
        require(self.sites_max >= 1, "sites_max", self.sites_max, "at least 1")
        require(self.unit_sequences >= 0, "unit_sequences", self.unit_sequences, "0 (none) or more")
        require(self.lease_ns > 0, "lease_ns", self.lease_ns, "positive")


@dataclass(kw_only=True, slots=True)
class LearnerOptions:
    """Rules of a site's machine: when a fragment is due, and what adopting a version means."""

    num_fragments: int = 1
    inner_steps: int = 15
    """H of DiLoCo: inner steps between two updates of one fragment."""
    dynamic_steps: bool = False
    """H is for the fastest site, and a slower one makes as many fewer as it is slower."""
    dynamic_rounding: str = "down"
    """Where that is no whole number of steps (:func:`local_steps`)."""
    adopt: str = "rebase"
    """``rebase`` keeps progress, ``overwrite`` is Decoupled DiLoCo, ``blend`` is Streaming DiLoCo with α, ``eager``
    keeps what is not sent and a share of what is not merged."""
    updates_in_flight_max: int = 2
    discards_max: int = 5
    """Updates refused with *discard* in a row after which the site stops in words."""
    answers_only: bool = False
    """Under overwrite and blend: while an update is in flight no version is adopted without it (HALoS), and of those
    whose versions are not adopted yet there are no more than ``updates_in_flight_max``, but for the last."""
    from_adopt: bool = False
    """Steps to the next update count from the last adopted version, and none is due while one is in flight (HALoS)."""
    lock_step: bool = False
    """Wait after each update until its version was adopted: classic DiLoCo and deterministic runs only."""
    offsets: tuple[int, ...] = ()
    """The inner step, modulo ``inner_steps``, at which each fragment is due; empty: spread evenly.  A machine that has
    part of the fragments is told where they stand among all of them."""
    unit_sequences: int = 0
    """Sequences in a unit of the data; 0: this machine has nothing to do with units."""
    sequence_tokens: int = 0
    """Tokens in one sequence, where units are leased."""
    units_ahead: int = 64
    """Units that are asked for before they are drawn."""

    def __post_init__(self) -> None:
        require(self.num_fragments >= 1, "num_fragments", self.num_fragments, "at least 1")
        require(
            self.inner_steps >= self.num_fragments,
            "inner_steps",
            self.inner_steps,
            f"at least one step for each of num_fragments={self.num_fragments}",
        )
        words = f"one of {', '.join(ROUNDINGS)}"
        require(self.dynamic_rounding in ROUNDINGS, "dynamic_rounding", self.dynamic_rounding, words)
        require(self.adopt in ADOPT_RULES, "adopt", self.adopt, f"one of {', '.join(ADOPT_RULES)}")
        require(self.updates_in_flight_max >= 1, "updates_in_flight_max", self.updates_in_flight_max, "at least 1")
        require(self.discards_max >= 1, "discards_max", self.discards_max, "at least 1")
        told = len(self.offsets) in (0, self.num_fragments) and all(0 <= o < self.inner_steps for o in self.offsets)
        require(self.unit_sequences >= 0, "unit_sequences", self.unit_sequences, "0 (none) or more")
        if self.unit_sequences:
            require(self.sequence_tokens >= 1, "sequence_tokens", self.sequence_tokens, "at least 1")
            wanted = f"1 to {UNITS_AHEAD_MAX}"
            require(1 <= self.units_ahead <= UNITS_AHEAD_MAX, "units_ahead", self.units_ahead, wanted)
        require(told, "offsets", self.offsets, f"one for each fragment, from 0 to {self.inner_steps - 1}, or none")

    @property
    def due_at(self) -> tuple[int, ...]:
        """The inner step, modulo ``inner_steps``, at which each fragment is due."""
        return self.offsets or even_offsets(self.num_fragments, self.inner_steps)
