"""What a region remembers of the syncer above it: a part of the outer machine's memory, and so of its journal."""

from __future__ import annotations

from dataclasses import dataclass, field

from diloco.sync.progress import FragmentProgress, LearnerState


@dataclass(slots=True)
class VersionAbove:
    """A version of the syncer above, and where its values lie."""

    version: int
    payload: str
    digest: str


@dataclass(slots=True)
class Part:
    """One fragment.  Towards the one above it is a site with that fragment alone, whose inner step is an update merged
    here.

    ``base`` is the version that its values were last blended with, ``arrived`` one that waits for that, ``taking`` the
    one that is being blended now, of which ``share`` is taken.
    """

    learner: LearnerState = field(default_factory=lambda: LearnerState([FragmentProgress()]))
    base: VersionAbove | None = None
    arrived: VersionAbove | None = None
    taking: VersionAbove | None = None
    share: float = 0.0

    @property
    def progress(self) -> FragmentProgress:
        """Its place in the fragment."""
        return self.learner.fragments[0]

    def needs(self, payload: str) -> bool:
        """Whether these are the values of a version that is not done with."""
        return any(each is not None and each.payload == payload for each in (self.base, self.arrived, self.taking))


@dataclass(slots=True)
class Upstream:
    """All of it; but for the parts as ``UpstreamStarted`` has it."""

    parts: list[Part]
    site: str = ""
    updates: int = 1
    alpha: float = 0.0
    in_flight_max: int = 1
    from_blend: bool = False
