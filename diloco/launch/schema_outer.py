"""The settings of how sites and the syncer come together: who is waited for, how it is merged, the outer step."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class OuterSection:
    """How sites and the syncer come together."""

    kind: str = "sgd"
    """sgd, heavy_ball, nesterov (torch's form), nesterov_ema, delayed_nesterov, adamw, schedule_free or gpa; a learning
    rate of one is wrong in another by up to 1 / (1 - momentum)."""
    lr: float = 0.7
    momentum: float = 0.0
    """0 for sgd; above 0 for all others but adamw."""
    window: int = 1
    """Of delayed_nesterov: updates for one step of the momentum; as many as there are sites, usually."""
    share_ahead: float = 0.0
    """Of delayed_nesterov: share of the momentum, up to 1 / window, that each update takes along."""
    momentum_squares: float = 0.95
    """β2 of adamw."""
    epsilon: float = 0.1
    """Of adamw."""
    weight_decay: float = 0.0
    """Of adamw, schedule_free and gpa."""
    momentum_ahead: float = 0.8
    """Of gpa: where sites train, between the fast parameters (0) and their average (1)."""
    inner_steps: int = 30
    """H: inner steps between two updates of one fragment."""
    dynamic_steps: bool = False
    """inner_steps are the fastest site's, and a slower one makes as many fewer as it is slower."""
    dynamic_rounding: str = "down"
    """down or up, where that is no whole number of steps; at least one either way."""
    num_fragments: int = 1
    """Parts of the parameters that are exchanged on their own."""
    quorum: str = "1"
    """Distinct sites that a round needs, or all."""
    quorum_min: int = 1
    """How far a time-out may shrink quorum=all; and fewer sites than that never close a round."""
    round_updates: int = 0
    """So many updates, the first that came, are a round, and nobody is waited for: 1 (asynchronous) or more (a buffer);
    0: all that came in time."""
    grace: str = "adaptive"
    """fixed or adaptive: how long a round waits for more after its quorum."""
    grace_s: float = 1.0
    """The longest grace."""
    grace_share_percent: int = 80
    """Share of the slack that an adaptive grace takes."""
    grace_period_percent: int = 0
    """Share of the fastest site's period that an adaptive grace is at least, over grace_s too: at 90 equal sites settle
    into common rounds whatever their phase, while all train on.  Nothing where sites wait or give up what they train
    meanwhile: under lock_step, overwrite and blend."""
    overlap_steps: int = 2
    """τ: inner steps between two publications that adaptive grace leaves for the network."""
    weights: str = "tokens2_per_step"
    """tokens2_per_step, tokens or uniform."""
    merge_by: str = "site"
    """What is weighed and merged: site, the sum of the updates that a site has in the round; update, each of them, as a
    buffer of updates has it."""
    share_weighted: bool = False
    """A step of some of the live sites is that share of an outer step, so that the result does not depend on which of
    them arrive together; without it each step is a whole one, as papers have it.  delayed_nesterov has its window."""
    merge: str = "mean"
    """mean, rda, clip, normalise, clamp, geometric_median or trimmed_mean.  rda makes longer steps than the mean, by up
    to the square root of the sites: it wants a smaller lr or momentum."""
    merge_plain: list[str] = field(default_factory=lambda: ["*embed*", "*head*"])
    """Under rda: patterns of parameters' names that are merged by the mean, as vectors are."""
    norm_ratio_max: float = 1.0
    """Under clip: times the median length."""
    trim_share: float = 0.2
    """Under trimmed_mean: of the sites, at either end."""
    staleness_max: int = 8
    """Versions that an update may be old at its merge."""
    staleness_power: float = 0.0
    """How much less an old contribution counts beside a new one: (1 + staleness)^-power; 0.5 is usual where they do."""
    gate_alpha: float = 0.0
    """How fast a contribution gets smaller, and not only less beside others, with each version that it is older."""
    gate_cutoff: int = 0
    """Versions after which nothing would be left of it (CGAD), above staleness_max; 0: none."""
    gate_power: float = 0.0
    """It gets smaller by (1 + staleness)^-power (FedBuff); 0.5 is usual."""
    correction: str = "none"
    """none, or heloco: each tensor of a contribution is compared with the outer momentum of that tensor before it is
    merged (arXiv 2606.00271), and kept, turned towards it, or what goes against it is taken out.  Wants a kind with
    momentum; the paper steps by nesterov_ema.  Its values of the five below are not verified: they are our own."""
    correction_cosine: float = 0.2
    """With the momentum, from which on a tensor is kept as it is; 0: only what goes against it is corrected (c_ok)."""
    correction_project: float = 1.0
    """How much of what goes against the momentum is taken out (k_s), times the cosine and how long the tensor is."""
    correction_project_max: float = 1.0
    """No larger share of it than that (b_max)."""
    correction_rotate: float = 0.25
    """How far a tensor that is kept neither nor against it is turned towards the momentum (k_d)."""
    correction_doubt: float = 1.0
    """How much less a tensor is corrected that is short beside its momentum (kappa)."""
    adopt: str = "rebase"
    """rebase keeps progress; overwrite (Decoupled DiLoCo) and blend (Streaming DiLoCo) do not; eager keeps what is not
    sent, and a share of what is not merged."""
    adopt_alpha: float | None = 0.5
    """Under blend: the share of the site's own values that stays.  Under eager: the share of an own update that a site
    has ahead of a version that lacks it; null: what the outer step will make of it."""
    measure_from: str = "adopted"
    """Under blend: what the next update is measured from.  published: the version, as in the paper and in others' code;
    adopted: the blended values."""
    lock_step: bool = False
    """Wait for each version, as classic DiLoCo does."""
    updates_in_flight_max: int = 2
    discards_max: int = 5
    """Updates thrown away in a row after which a site stops in words."""
    site_timeout_s: float = 15.0
    """Silence after which a site no longer counts."""
    final_wait_s: float = 20.0
    """How long the last round waits."""
    sites_max: int = 16
    """Sites that are in the run at once; one that has left, or was put out, leaves its place to another.  It
    may change when the syncer starts again."""
    num_syncers: int = 1
    """Processes over which the fragments are placed, by their bytes and syncer_mbps; each is a whole syncer."""
    syncer_mbps: list[float] = field(default_factory=list)
    """What the link of each of them has in 10^6 bits a second; empty: all the same."""
