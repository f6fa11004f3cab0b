"""What a simulated fleet is, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from diloco.sync.options import LearnerOptions, OuterOptions

if TYPE_CHECKING:
    from diloco.sync import effects as fx

YEAR_S = 365.25 * 24 * 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetSite:
    """One site.  ``mbps`` 0 is a link without bound; ``interruptions_per_s`` are of the whole site (its chips'
    together), each of which stops it for ``away_s``.

    Interruptions that come while it is stopped are part of the same one: what starts again starts without those too.
    """

    step_s: float
    tokens_per_step: int = 1
    steps_s: tuple[float, ...] = ()
    """What its first steps took one by one, where that is known; the others take ``step_s``."""
    step_jitter: float = 0.0
    """By so large a share the steps between two boundaries may be longer or shorter."""
    seal_s: float = 0.0
    """From the boundary at which an update is measured until it can be sent; training goes on meanwhile."""
    up_mbps: float = 0.0
    down_mbps: float = 0.0
    rtt_s: float = 0.0
    interruptions_per_s: float = 0.0
    away_s: float = 0.0
    lost_share: float = 0.0
    """Of its updates that never arrive; the site is told so at once, and sends what it keeps with the next."""
    starts_s: float = 0.0
    """When its first process asks to join; before that it is neither there nor away.  Infinite: a fault starts it."""
    planned: tuple[tuple[float, float], ...] = ()
    """(begin, end) of maintenance, in seconds from the start."""
    region: RegionPlan | None = None
    """Not one site but a syncer with sites of its own, which does not fail: of the other fields its link counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionPlan:
    """What is below a region's syncer, and how that speaks to the one above (``sync.region``).  Its run ends
    with the one above, so that ``plan`` has no end of its own; its seed follows from that of the fleet above."""

    plan: FleetPlan
    updates: int
    alpha: float
    from_blend: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetFault:
    """What happens to a site at ``at_s`` seconds from the first step of any, or when ``at_share`` of the run is done.

    ``kind``: "away": it stops; "cut": nothing crosses its link; "start": it comes only now; "leave": it goes for good;
    of no site, "pause": the syncer does nothing; "down": it is not there, and its time stands still.  ``lasts_s`` None:
    for good.
    """

    kind: str
    site: int | None
    at_s: float | None = None
    at_share: float | None = None
    lasts_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """Sites that fail together, each for ``away_s``: those of one grid, or of one operator."""

    sites: tuple[int, ...]
    interruptions_per_s: float
    away_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetPlan:
    """``update_bytes`` and ``version_bytes`` are those of each fragment; ``whole_bytes`` of one for who has none."""

    sites: tuple[FleetSite, ...]
    outer: OuterOptions
    learner: LearnerOptions
    update_bytes: tuple[int, ...]
    version_bytes: tuple[int, ...]
    whole_bytes: tuple[int, ...]
    is_joined: bool = False
    """Whether all sites have version 0 already, which then crosses no link."""
    merge_s: float = 0.0
    faults: tuple[FleetFault, ...] = ()
    regions: tuple[Region, ...] = ()
    seconds: float | None = 3600.0
    """None: until the run ends by itself, which it may do earlier as well."""
    seed: int = 0
    tokens_trained: int = 0
    """By all sites together, after which the run is drained; 0: no such bound.  The run's own bound counts what is
    merged, so that a rule under which progress is thrown away trains more."""


class Cargo(Protocol):
    """The tensors of a fleet, if it has any.  Each call is made at the virtual instant at which it takes effect; sites
    are named by their place in the plan."""

    def trained(self, site: int, steps: int, progress_ppm: int) -> None:
        """The site has made ``steps`` inner steps, up to this progress of the run."""

    def sealed(self, site: int, seal: fx.Seal) -> None:
        """Measure and encode the site's update."""

    def adopted(self, site: int, effect: fx.Adopt) -> None:
        """The site takes the version that it fetched last."""

    def retaken(self, site: int, effect: fx.Retake) -> None:
        """The same, and what it had not sent is gone."""

    def released(self, site: int, effect: fx.Release) -> None:
        """An update of the site is not going to be merged."""

    def published(self, fragment: int) -> object:
        """The newest version: its values, and what a site is told with them."""

    def fetched(self, site: int, fragment: int, version: int, values: object) -> None:
        """A version is at the site; ``values`` are what ``published`` gave when it was asked for."""

    def merged(self, command: fx.StartOuterStep, now_s: float, progress_ppm: int) -> None:
        """Make a version."""


@dataclass(slots=True)
class SiteAccount:
    """Where a site's time has gone, in seconds, and what crossed its link; ``rounds`` are its updates merged."""

    trained_s: float = 0.0
    away_s: float = 0.0
    waited_s: float = 0.0
    idle_s: float = 0.0
    """Of ``waited_s`` what lies between its first step and the end of its training, which lasts ``training_s``."""
    training_s: float = 0.0
    steps: int = 0
    rounds: int = 0
    tokens_merged: int = 0
    interruptions: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    region: FleetResult | None = None
    """Of a region: what became of its sites, beside what was merged above and crossed the link to there."""


@dataclass(frozen=True, slots=True)
class FleetResult:
    """``goodput`` is the share of all sites' time that was spent on inner steps, of ``seconds`` that passed."""

    sites: tuple[SiteAccount, ...]
    versions: tuple[int, ...]
    seconds: float
    sites_per_version: float

    @property
    def goodput(self) -> float:
        """Of all sites together."""
        trained_s = [site.trained_s for site in self.training()]
        return sum(trained_s) / (self.seconds * len(trained_s))

    @property
    def site_rounds(self) -> int:
        """Updates merged, over all sites, regions and fragments."""
        below = (site.region.site_rounds for site in self.sites if site.region is not None)
        return sum(site.rounds for site in self.sites) + sum(below)

    def training(self) -> list[SiteAccount]:
        """The sites that train, those of regions among them."""
        found: list[SiteAccount] = []
        for site in self.sites:
            found += [site] if site.region is None else site.region.training()
        return found
