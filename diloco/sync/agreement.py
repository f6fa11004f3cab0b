"""The settings on which a site and the syncer must agree before they exchange a byte of a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    """Return advice on a syncer whose state is older than what a site, which knows ``lineage``, has seen of it."""
    return (
        "stop the syncer, move its data folder away and take the run up from what is newer: "
        f"diloco restore RUN_DIR --from-site SITE_DIR --above {lineage}, or --from BACKUP"
    )
