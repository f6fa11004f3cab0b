"""A journal without some of its updates, against a plain loop over the arithmetic."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.codec.base import digest
from diloco.codec.registry import make_codec
from diloco.codec.site_pass import follow
from diloco.outer.merge import merge_mean
from diloco.outer.optimizer import NOTHING, outer_step
from diloco.sync.effects import AnswerPush, PublishVersion, StartOuterStep
from diloco.sync.events import JoinRequested, Outcome, UpdateArrived
from diloco.sync.options import OuterOptions
from diloco.sync.rounds import Selection
from diloco.sync.syncer import OuterSync
from diloco.syncer.replaying import ReplayerWithout
from diloco.syncer.restoring import Kept, KeptError
from diloco.syncer.snapshots import FragmentValues
from tests.sooner import sooner
from tests.syncer.building import stored, update, version_zero
from tests.syncer.desk import OPTIMIZER, OUTER, Desk
from tests.syncer.test_kept import Told
from tests.syncer.test_store import SITES

Round = list[UpdateArrived]
FUSED = "int4:32+zstd1"


def rounds_of(told: Told) -> dict[tuple[int, int], Round]:
    """What was merged into which version, read off the journal with nothing but the machine's answers."""
    machine = OuterSync.restore(OUTER, told.first.state)
    accepted: dict[tuple[str, int, int], UpdateArrived] = {}
    commands: dict[int, StartOuterStep] = {}
    merged: dict[tuple[int, int], Round] = {}
    for record in told.records:
        for effect in machine.handle(record.event, record.at_ns):
            if isinstance(effect, AnswerPush) and effect.outcome is Outcome.ACCEPTED:
                accepted[record.event.site, record.event.fragment, record.event.sequence] = record.event
            elif isinstance(effect, StartOuterStep):
                commands[effect.fragment] = effect
            elif isinstance(effect, PublishVersion):
                merged[effect.fragment, effect.version] = [
                    accepted[part.site, effect.fragment, one.sequence]
                    for part in commands.pop(effect.fragment).contributions
                    for one in part.updates
                ]
    return merged


def plain_loop(told: Told, chosen: Sequence[Selection]) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """(Θ, Θ̂, momentum) of each fragment: the formulas of the outer step, one after the other."""
    found = []
    merged = rounds_of(told)
    spool, codec = told.desk.store.spool, make_codec(told.desk.codec)
    for index, zero in enumerate(version_zero()):
        theta, published, state = zero, zero.clone(), NOTHING
        for version in sorted(version for fragment, version in merged if fragment == index):
            by_site: dict[str, Round] = {}
            for each in merged[index, version]:
                if not any(one.takes(each.site, index, each.sequence, version) for one in chosen):
                    by_site.setdefault(each.site, []).append(each)
            if not by_site:
                continue
            raw = {site: sum(u.tokens for u in us) ** 2 / sum(u.steps for u in us) for site, us in by_site.items()}
            contributions = [
                (
                    raw[site] / sum(raw.values()),
                    [make_codec(u.encoding).decode(stored(spool, u.payload, u.digest), zero.numel()) for u in updates],
                )
                for site, updates in by_site.items()
            ]
            theta, state = outer_step(theta, merge_mean(contributions), state, OPTIMIZER)
            payload = codec.encode(theta if codec.lossless else theta - published)
            published = follow(published, payload, codec)
        found.append((theta, published, state.momentum))
    return found


def assert_bits(mine: FragmentValues, theirs: tuple[Tensor, Tensor, Tensor | None], why: object) -> None:
    found = (mine.theta, mine.published, mine.optimizer.momentum)
    assert mine.digest == digest(mine.published), why
    for left, right in zip(found, theirs, strict=True):
        assert (left is None) == (right is None), why
        if left is not None and right is not None:
            assert torch.equal(left.view(torch.int32), right.view(torch.int32)), why


def replayer(told: Told, chosen: Sequence[Selection] = (), **how: Any) -> ReplayerWithout:
    machine, store = OuterSync.restore(told.desk.machine.options, told.first.state), told.desk.store
    return ReplayerWithout(machine, told.first.fragments, store, told.desk.rules, chosen, **how)


def without(told: Told, *chosen: Selection, **how: Any) -> ReplayerWithout:
    found = replayer(told, chosen, **how)
    told.replay(found)
    return found


def drawn(told: Told, dice: random.Random) -> list[Selection]:
    """Some updates of the run, meant by version or by number, in one fragment or in all."""
    chosen = []
    for _ in range(dice.randint(1, 3)):
        kind = dice.choice(("versions", "sequences"))
        first = dice.randint(1, 6)
        chosen.append(Selection(dice.choice(SITES), kind, first, first + dice.randrange(4), dice.choice((None, 0, 1))))
    return chosen


@pytest.mark.parametrize("codec", sooner(["fp32", FUSED], FUSED))
def test_without_some_updates_it_is_the_plain_loop_over_the_others(tmp_path: Path, codec: str) -> None:
    taken = skipped = 0
    for seed in range(4):
        dice = random.Random(seed)
        told = Told(tmp_path / f"{seed}", seed, codec, length=60)
        chosen = drawn(told, dice)
        rebuilt = without(told, *chosen)
        taken, skipped = taken + len(rebuilt.left_out), skipped + len(rebuilt.skipped)
        for mine, formula in zip(rebuilt.values, plain_loop(told, chosen), strict=True):
            assert_bits(mine, formula, (seed, [str(one) for one in chosen]))
        for (site, index), (tokens, updates) in rebuilt.held.items():
            line = told.desk.machine.state.sites[site].lines[index]
            gone = [out.tokens for out in rebuilt.left_out if (out.site, out.fragment) == (site, index)]
            assert (tokens + sum(gone), updates + len(gone)) == (line.tokens_merged, line.updates_merged)
        versions = [fragment.version for fragment in told.desk.machine.state.fragments]
        assert [mine.version for mine in rebuilt.values] == versions, "a skipped step keeps its number"
    assert taken > 6, "the dice left nothing out"
    assert skipped > 0, "no step was left empty"


def test_what_was_left_out_is_told_and_what_was_trained_on_it_is_told_or_left_out_as_well(tmp_path: Path) -> None:
    told = Told(tmp_path, 7, length=80)
    merged = [(each, version) for (index, version), us in rounds_of(told).items() for each in us if index == 0]
    chosen = Selection("b", "versions", 2, 4, 0)
    rebuilt = without(told, chosen)
    wanted = {
        (each.site, each.sequence, version, each.tokens)
        for each, version in merged
        if each.site == "b" and 2 <= version <= 4
    }
    assert {(out.site, out.sequence, out.version, out.tokens) for out in rebuilt.left_out} == wanted
    assert wanted, "site b had no part in these versions: the dice prove nothing"
    first = min(version for _, _, version, _ in wanted)
    named = {(site, sequence) for site, sequence, _, _ in wanted}
    later = [(u.site, u.sequence) for u, _ in merged if u.base_version >= first and (u.site, u.sequence) not in named]
    assert sum(rebuilt.on_old_base.values()) == len(later) > 0
    assert rebuilt.on_old_base["a"] == [site for site, _ in later].count("a")
    both = without(told, chosen, and_later=True)
    assert {(out.site, out.sequence) for out in both.left_out if not out.chosen} == set(later)
    assert not both.on_old_base
    gone = sorted({(out.site, out.sequence) for out in both.left_out})
    assert gone == sorted(named | set(later))
    each_by_name = [Selection(site, "sequences", sequence, sequence, 0) for site, sequence in gone]
    for mine, formula in zip(both.values, plain_loop(told, each_by_name), strict=True):
        assert_bits(mine, formula, gone)
    bases = [each.base_version for site in told.desk.machine.state.sites.values() for each in site.lines[1].undecided]
    assert min(bases) < 7 in bases, "the dice prove nothing"
    assert without(told, Selection("b", "versions", 7, 7, 1)).old_base_waiting == sum(base >= 7 for base in bases)


def test_it_ends_at_the_last_version_asked_for(tmp_path: Path) -> None:
    told = Told(tmp_path, 9, length=80)
    half, stepwise = without(told, last=2), replayer(told)
    for record in told.records:
        stepwise.apply(record)
        for index, values in enumerate(stepwise.values):
            if values.version == 2:
                assert values.digest == half.values[index].digest
    assert all(values.version > 2 for values in half.values), "the run was too short to be cut"


def test_what_has_no_finite_result_is_an_error(tmp_path: Path) -> None:
    """A huge update next to one that halves it: without that one, the step is beyond fp32."""
    desk = Desk(tmp_path, "fp32", OuterOptions(num_fragments=2, grace="fixed", grace_ns=10**9, quorum=2))
    desk.begin()
    for site in "ab":
        desk.handle(JoinRequested(1, site, "0123abcd"))
    for site, value in (("a", 3e38), ("b", 0.0)):
        desk.push(*update(site, 1, 0, torch.full((desk.values[0].theta.numel(),), value)))
    desk.finish(0)
    desk.close()
    with pytest.raises(KeptError, match="version 1 of fragment 0 has no finite result"):
        Kept(tmp_path).replay(desk.rules, [Selection("b", "versions", 1, 1)])
