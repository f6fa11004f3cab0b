"""Whether somebody means the run that is served here, in words that name the first thing in which they do not."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from diloco.outer.fragments import Layout
from diloco.sync.agreement import CORPUS, PROTOCOL, PROTOCOL_OLDEST, Agreement, disagreement
from diloco.wire.messages import TEXT_CHARS_MAX, Refusal, Status
from diloco.wire.probing import ProbeAnswer

if TYPE_CHECKING:
    from diloco.sync.syncer import OuterSync
    from diloco.syncer.options import RunPlan
    from diloco.wire.probing import ProbeAsk


def difference(plan: RunPlan, lineage: int, theirs: Agreement, layout_json: bytes) -> str | None:
    """The first difference of ``theirs`` to ``plan`` in its ``lineage``; None where there is none.

    Refuses with INVALID_ARGUMENT a ``layout_json`` that describes no layout.
    """
    ours = replace(plan.agreement, lineage=lineage)
    text = disagreement(ours, theirs)
    if text is None or theirs.layout_fingerprint == ours.layout_fingerprint or "layout" not in text or not layout_json:
        return text
    try:
        layout = Layout.from_json(layout_json.decode())
    except ValueError as error:
        raise Refusal(Status.INVALID_ARGUMENT, f"layout_json describes no layout: {error}") from error
    first = layout.first_difference(plan.layout)
    return f"{first} (here: at the site, there: at the syncer)" if first else text


def other_data(machine: OuterSync, corpus: str) -> str:
    """In words that ``corpus``, which a site draws from, is not the run's."""
    units = machine.state.units
    there = units.corpus if units is not None else ""
    return (
        f"{CORPUS} is {corpus[:12]} at the site and {there[:12]} at the syncer: the run leases units of one text "
        "(data.leased), and this site has prepared another"
    )


def probed(plan: RunPlan, ask: ProbeAsk) -> ProbeAnswer:
    """The answer to a probe, but for who asks and when; what the ask leaves empty is not compared."""
    text = None
    if ask.run_id:
        fingerprint = ask.layout_fingerprint or plan.agreement.layout_fingerprint
        theirs = Agreement(ask.protocol, ask.run_id, 0, fingerprint, ask.shared_config)
        text = difference(plan, 0, theirs, ask.layout_json)
    ours = plan.agreement
    told = (text or "")[:TEXT_CHARS_MAX]
    return ProbeAnswer(PROTOCOL, PROTOCOL_OLDEST, ours.run_id, difference=told, shared_config=ours.shared)
