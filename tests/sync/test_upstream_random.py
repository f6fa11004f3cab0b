"""Two regions and the syncer above them, as dice have it."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from diloco.sync import events as ev
from diloco.sync.journal import replay
from diloco.sync.options import OuterOptions
from diloco.sync.syncer import OuterSync
from tests.sooner import sooner
from tests.sync.test_upstream import based
from tests.sync.two_levels import Level, Region


@pytest.mark.parametrize("seed", sooner(range(12), *range(4)))
def test_at_any_instant_a_crash_costs_nothing_and_a_replay_decides_the_same(seed: int) -> None:
    """Sites push, levels step, processes of both die, a region is drained and goes on, words get lost and come twice,
    updates are refused.  What goes up says as much as its tokens do, all that was merged in a region is merged above or
    in its ledger, each of its updates was merged once, and a replay decides it all again."""
    dice = random.Random(seed)
    above, region = based(updates=dice.choice((1, 2, 3)))
    regions = {"region-a": region, "region-b": Region(above, "region-b", dice.choice((1, 2)))}
    regions["region-b"].handle(ev.JoinRequested(1, "s", "p"))
    regions["region-b"].join()
    sequences: Counter[str] = Counter()
    for _ in range(240):
        name = dice.choice(sorted(regions))
        _something_happens(dice, above, regions[name], name, sequences)
        regions[name].ledger()
    for each in regions.values():
        each.join()
    for _ in range(3):
        for each in regions.values():
            each.settle()
    for name, each in regions.items():
        merged = each.syncer.machine.state.sites["s"].lines[0].tokens_merged
        ledger, line = each.ledger(), above.syncer.machine.state.sites[name].lines[0]
        assert ledger["processed"] == merged
        assert ledger["lost"] == ledger["in_flight"] == 0
        assert ledger["merged"] == line.tokens_merged
        assert line.watermark == line.updates_merged, "each was merged once"
        assert len(each.spool) <= 2
        assert len(each.outbox) <= 2
        again = OuterSync(OuterOptions(**_options(each.syncer.options)))
        list(replay(again, each.syncer.records))
        assert again.snapshot() == each.syncer.machine.snapshot()


def _something_happens(dice: random.Random, above: Level, region: Region, name: str, sequences: Counter[str]) -> None:
    choices = [*["s"] * 4, "x", "hear", *["crash", "deaf", "crash above", "drain"] * (dice.random() < 0.1)]
    choices += ["below"] * (2 * bool(region.commands)) + ["above"] * bool(above.commands)
    choices += ["seal"] * bool(region.sealing) + ["do", "do", "do twice"] * bool(region.orders)
    choices += ["refuse"] * (bool(region.outbox) and dice.random() < 0.2)
    match dice.choice(choices):
        case "s" if not region.commands:
            sequences[name] += 1
            tokens, incarnation = dice.randrange(1, 50), region.syncer.machine.state.sites["s"].incarnation
            region.push("s", sequences[name], float(tokens), tokens=tokens, incarnation=incarnation)
        case "x" if not above.commands:
            sequences["x"] += 1
            above.push("x", sequences["x"], float(dice.randrange(-64, 64)))
        case "hear":
            region.hear()
        case "deaf":
            region.mail.clear()
        case "crash":
            region.restart()
        case "crash above":
            above.restart()
        case "below":
            region.step()
        case "above":
            above.step()
        case "seal":
            (seal, value) = region.sealing[0]
            assert value.item() == pytest.approx(seal.tokens), "something goes up twice, or never"
            region.seal()
        case "refuse":
            sequence = max(region.outbox)
            reason = dice.choice((ev.Reason.OVERLOAD, ev.Reason.OUTLIER))
            region.handle(ev.PushAnswered(0, sequence, ev.Outcome.REFUSED, reason, region.outbox[sequence][0]))
        case "drain":
            region.handle(ev.DrainRequested(1))
            region.handle(ev.SiteLeft(1, "s", region.syncer.machine.state.sites["s"].incarnation))
            while region.commands:
                region.step()
            if dice.random() < 0.5:
                region.settle()
            region.restart()
            region.handle(ev.JoinRequested(1, "s", f"process {region.syncer.machine.state.epoch}"))
        case "do":
            region.do()
        case "do twice":
            region.orders.append(region.orders[0])
            region.do()


def _options(options: OuterOptions) -> dict[str, object]:
    return {name: getattr(options, name) for name in options.__slots__}
