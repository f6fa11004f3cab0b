"""The plan of a simulated fleet, the interface to its tensors, and its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from diloco.sync.options import LearnerOptions, OuterOptions

if TYPE_CHECKING:
    from diloco.sync import effects as fx

YEAR_S = 365.25 * 24 * 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetSite:
    """One site.  ``mbps`` 0 is an unlimited link; ``interruptions_per_s`` is the rate of the whole site (all its chips
    together), and each interruption stops it for ``away_s``.

    An interruption while the site is stopped is part of the same one: it restarts without the chips lost in both.
    """

    step_s: float
    tokens_per_step: int = 1
    steps_s: tuple[float, ...] = ()
    """The measured durations of its first steps, where known; the others take ``step_s``."""
    step_jitter: float = 0.0
    """The largest share by which the steps between two boundaries are longer or shorter."""
    seal_s: float = 0.0
    """The time from the boundary at which an update is measured until it can be sent; training continues meanwhile."""
    up_mbps: float = 0.0
    down_mbps: float = 0.0
    rtt_s: float = 0.0
    interruptions_per_s: float = 0.0
    away_s: float = 0.0
    lost_share: float = 0.0
    """The share of its updates that never arrive; each is refused, and its progress goes with the next update."""
    starts_s: float = 0.0
    """When its first process asks to join; no absence counts before that.  Infinite: a fault starts it."""
    planned: tuple[tuple[float, float], ...] = ()
    """(begin, end) of maintenance, in seconds from the start."""
    region: RegionPlan | None = None
    """Makes this a region, a syncer with sites that itself does not fail; of the other fields only the link's count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionPlan:
    """The fleet below a region's syncer, and its exchange with the syncer above (``sync.region``).  Its run ends with
    the one above, so ``plan`` has no end of its own; its seed follows from that of the fleet above."""

    plan: FleetPlan
    updates: int
    alpha: float
    from_blend: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetFault:
    """A fault at ``at_s`` seconds after the fleet's first step, or when ``at_share`` of the run is done.

    ``kind`` of a site: "away": it stops; "cut": nothing crosses its link; "start": it appears only now; "leave": it
    leaves for good.  Of the syncer (``site`` None): "pause": it does nothing; "down": its time stands still as well.
    ``lasts_s`` None: for good.
    """

    kind: str
    site: int | None
    at_s: float | None = None
    at_share: float | None = None
    lasts_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """Sites that fail together, each for ``away_s``: those of one power grid, or of one operator."""

    sites: tuple[int, ...]
    interruptions_per_s: float
    away_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetPlan:
    """A fleet.  By fragment: ``update_bytes``, ``version_bytes``, and ``whole_bytes`` for a site without a version."""

    sites: tuple[FleetSite, ...]
    outer: OuterOptions
    learner: LearnerOptions
    update_bytes: tuple[int, ...]
    version_bytes: tuple[int, ...]
    whole_bytes: tuple[int, ...]
    is_joined: bool = False
    """Whether all sites have version 0 already; it then crosses no link."""
    merge_s: float = 0.0
    faults: tuple[FleetFault, ...] = ()
    regions: tuple[Region, ...] = ()
    seconds: float | None = 3600.0
    """The time to simulate; None: until the run ends.  The run may also end earlier."""
    seed: int = 0
    tokens_trained: int = 0
    """Tokens trained by all sites together after which the run is drained; 0: no such bound.  The run's own bound
    counts merged tokens, so that a rule that discards progress trains more."""


class Cargo(Protocol):
    """The tensors of a fleet, if it has any.  Each call is made at the virtual instant at which it takes effect; a site
    is given by its index in the plan."""

    def trained(self, site: int, steps: int, progress_ppm: int) -> None:
        """Make ``steps`` inner steps at the site; the run's progress is ``progress_ppm`` after them."""

    def carry_out(self, site: int, effect: fx.LearnerEffect) -> None:
        """Carry out an effect of the site's machine, where it concerns tensors.

        ``Seal``: measure and encode an update.  ``Adopt``: adopt the version that the site fetched last.  ``Retake``:
        adopt it, and discard what the site had not sent.  ``Release``: drop an update that will not be merged.
        """

    def published(self, fragment: int) -> object:
        """Return the newest version: its values, and what a site gets with them."""

    def fetched(self, site: int, fragment: int, version: int, values: object) -> None:
        """Store a version that arrived at the site; ``values`` is what ``published`` returned for the request."""

    def merged(self, command: fx.StartOuterStep, now_s: float, progress_ppm: int) -> None:
        """Compute a version."""


@dataclass(slots=True)
class SiteAccount:
    """How a site spent its time, in seconds, and what crossed its link; ``rounds`` counts its merged updates."""

    trained_s: float = 0.0
    away_s: float = 0.0
    waited_s: float = 0.0
    idle_s: float = 0.0
    """The part of ``waited_s`` between its first step and the end of its training, which lasts ``training_s``."""
    training_s: float = 0.0
    steps: int = 0
    rounds: int = 0
    tokens_merged: int = 0
    interruptions: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    region: FleetResult | None = None
    """Of a region: the result of its sites; the other fields are about its updates and its link to the syncer above."""


@dataclass(frozen=True, slots=True)
class FleetResult:
    """The result of ``seconds`` of simulated time."""

    sites: tuple[SiteAccount, ...]
    versions: tuple[int, ...]
    seconds: float
    sites_per_version: float

    @property
    def goodput(self) -> float:
        """The share of all sites' time that was spent on inner steps."""
        trained_s = [site.trained_s for site in self.training()]
        return sum(trained_s) / (self.seconds * len(trained_s))

    @property
    def site_rounds(self) -> int:
        """The number of merged updates, over all sites, regions and fragments."""
        below = (site.region.site_rounds for site in self.sites if site.region is not None)
        return sum(site.rounds for site in self.sites) + sum(below)

    def training(self) -> list[SiteAccount]:
        """Return the sites that train, including those of regions."""
        found: list[SiteAccount] = []
        for site in self.sites:
            found += [site] if site.region is None else site.region.training()
        return found
