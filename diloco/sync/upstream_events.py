"""What happens to a region, and to no other syncer; the rest of what it hears is what a site hears (``events.py``)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UpstreamStarted:
    """A process speaks for the region above from now on, as ``site`` there, by rules that may be others than before.

    An update goes up for every ``updates`` that are merged of a fragment; of what comes back a share ``alpha`` goes
    into the region's values; ``in_flight_max`` of its updates may be undecided above.  ``outbox`` has (fragment,
    sequence, digest) of those whose bytes are here.  With ``from_blend`` the ``updates`` count from the last version
    that was taken from above, and nothing more goes up until then.
    """

    site: str
    updates: int
    alpha: float
    in_flight_max: int
    outbox: tuple[tuple[int, int, str], ...]
    from_blend: bool = False


@dataclass(frozen=True, slots=True)
class UpstreamFetched:
    """The values of a version above are here, verified, and durable at ``payload``, as fp32 with that ``digest``.

    It was asked for in ``lineage``, and given by the syncer of ``epoch``.
    """

    fragment: int
    version: int
    payload: str
    digest: str
    lineage: int
    epoch: int
