"""What a site and the syncer must agree on before a byte of a tensor is exchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PROTOCOL = 3
PROTOCOL_OLDEST = 2
"""A syncer serves the protocol before its own as well, so that a run can be upgraded while it goes on: it first."""
CORPUS = "data.corpus"
"""In what a site shares: the text that it draws from where units of it are leased.  No configuration knows that; the
run's is that of the first site, so the machine compares it."""

MAY_CHANGE = frozenset({"outer.sites_max"})
"""The shared settings that a syncer may have otherwise when it starts again on a run: how many it has room for.

The journal says each of them anew at every start, and sites do not go by them.  No other shared setting is like that.
Sites train, encode, send or stop by their own value of it (``outer.discards_max``, ``outer.updates_in_flight_max``,
``outer.site_timeout_s``, which they are told), or the machine decides by it and the journal does not say it, so that a
replay would decide otherwise (``outer.quorum``, ``outer.final_wait_s``, ``run.tokens``).
"""
OF_THE_SYNCER = MAY_CHANGE | {"outer.share_weighted", "outer.grace_period_percent"}
"""What the syncer alone goes by: a site whose release or preset has these otherwise takes part."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """The run's identity.  ``shared`` maps dotted names of the shared configuration to their values as text."""

    protocol: int
    run_id: str
    lineage: int
    layout_fingerprint: str
    shared: Mapping[str, str]


def disagreement(ours: Agreement, theirs: Agreement) -> str | None:
    """The first difference in words that name the field and both values, or None when all is equal.

    ``ours`` is the syncer's.  A site that does not yet know the run's lineage says 0; one that knows an older lineage
    is taken in and told the present one; one that knows a newer lineage has met a syncer that came back from the past.
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
    """What to do about a syncer of which a site, which knows ``lineage``, has heard more than it has."""
    return (
        "stop the syncer, move its data folder away and take the run up from what is newer: "
        f"diloco restore RUN_DIR --from-site SITE_DIR --above {lineage}, or --from BACKUP"
    )
