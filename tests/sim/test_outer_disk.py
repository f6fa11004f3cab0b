"""The simulated syncer's folder, by itself."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from diloco.sim import world
from diloco.sim.outer_disk import VERSIONS_KEPT, ZERO, Kept, OuterDisk, Replayer, journal_name, restored
from diloco.sim.outer_process import OuterProcess
from diloco.sim.plan import draw_plan
from diloco.sim.site_checkers import CHECKERS
from diloco.sim.site_process import SiteProcess
from diloco.sim.standby_process import StandbyProcess
from diloco.sim.swarm import run_seed
from diloco.sim.world import Damaged, OuterPlan, OuterRule, Storage, sealed
from diloco.sync import (
    admission,
    fates,
    learner,
    rounds,
    syncer,
    updates,
)
from diloco.sync.data_units import Holder, whole_units
from diloco.sync.effects import Adopt, Contribution, Leave, Seal, SkipData, StartOuterStep, UpdateRef
from diloco.sync.events import JoinAnswered, Outcome, Reason, SyncerStarted, UpdateArrived
from diloco.sync.journal import JournalError, Record, canonical, encode_mark
from diloco.sync.leadership import Leadership, Place, Replication
from diloco.sync.learner import LearnerSync
from diloco.sync.options import OuterOptions
from diloco.sync.state import FragmentState, Line, OuterState
from diloco.sync.syncer import OuterSync
from tests.sim.small import Small

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def a_disk() -> tuple[OuterDisk, OuterProcess]:
    """A folder with two snapshots and some journal behind the second one, and its process."""
    small = Small()
    assert small.syncers.disk.storage.names("") == ["journal-000001", "snapshot-000001"], "it begins at version 0"
    small.run(3)
    small.outer.snapshot()
    small.run(1)
    return small.syncers.disk, small.outer


def test_where_no_snapshot_is_whole_a_journal_is_not_begun_anew() -> None:
    disk, _ = a_disk()
    for name in disk.storage.names("snapshot-"):
        disk.storage.remove(name)
    with pytest.raises(Damaged, match="no snapshot is whole"):
        disk.recover()


def test_a_damaged_snapshot_is_named_and_the_one_before_it_is_used() -> None:
    disk, outer = a_disk()
    older, newer = disk.storage.names("snapshot-")
    disk.storage.cut(newer, 40)
    found = disk.recover()
    assert disk.notes == [f"{newer} is damaged"]
    assert found.machine.state == outer.machine.state
    assert disk.storage.names("snapshot-") == [older]


def test_a_missing_segment_is_named() -> None:
    disk, _ = a_disk()
    disk.storage.cut(disk.storage.names("snapshot-")[-1], 40)
    first = disk.storage.names("journal-")[0]
    disk.storage.remove(first)
    with pytest.raises(Damaged, match=f"{first} is missing"):
        disk.recover()


def test_a_power_cut_between_two_events_costs_nothing() -> None:
    disk, outer = a_disk()
    for seed in range(8):
        disk.storage.power_cut(Random(seed))
        assert disk.recover().machine.state == outer.machine.state


# --- A check that cannot fail is a defect ----------------------------------------------------------------------------

SEEDS_MAX = 400
Patch = pytest.MonkeyPatch


def admit_again(patch: Patch) -> None:
    right = syncer.admit

    def admit(*header: Any) -> Any:
        verdict = right(*header)
        return dataclasses.replace(verdict, outcome=Outcome.ACCEPTED) if verdict.outcome == "duplicate" else verdict

    patch.setattr(syncer, "admit", admit)
    patch.setattr(rounds, "admit", admit)


def recover_an_older_version(patch: Patch) -> None:
    def older(machine: OuterSync) -> None:
        for fragment in machine.state.fragments:
            fragment.version = max(0, fragment.version - 1)

    after_recovery(patch, older)


def after_recovery(patch: Patch, spoil: Callable[[OuterSync], None]) -> None:
    right = OuterDisk.recover

    def recover(self: OuterDisk) -> Replayer:
        found = right(self)
        spoil(found.machine)
        return found

    patch.setattr(OuterDisk, "recover", recover)


def never_sync(patch: Patch, prefix: str) -> None:
    right = Storage.sync
    patch.setattr(Storage, "sync", lambda self, name: None if name.startswith(prefix) else right(self, name))


def answer_before_syncing(patch: Patch) -> None:
    """A record is synced when the next one is written, after its effects were carried out."""

    def write(self: OuterDisk, frame: bytes, chain: bytes) -> Place:
        name = journal_name(self.segment)
        self.storage.sync(name)
        self.reached("before the record")
        self.storage.append(name, frame + encode_mark(chain))
        self.chain = chain
        return self.segment, len(self.storage.read(name)) - len(encode_mark(chain))

    patch.setattr(OuterDisk, "write", write)


def never_sync_names(patch: Patch) -> None:
    patch.setattr(Storage, "sync_names", lambda self: None)


def drop_a_payload_with_its_fate(patch: Patch) -> None:
    patch.setattr(OuterDisk, "release", lambda self, payload: self.storage.remove(f"spool/{payload}"))


def forget_what_was_merging(patch: Patch) -> None:
    def forget(machine: OuterSync) -> None:
        for index, fragment in enumerate(machine.state.fragments):
            machine.state.fragments[index] = FragmentState(fragment.version, fragment.digest)

    after_recovery(patch, forget)


def leave_weights_as_they_are(patch: Patch) -> None:
    patch.setattr(rounds, "normalised", tuple)


def count_dead_sites_in_the_share(patch: Patch) -> None:
    right = rounds._full_round
    patch.setattr(rounds, "_full_round", lambda turn, index, merged: right(turn, index, {*merged, *turn.state.sites}))


def believe_what_is_usual_alone(patch: Patch) -> None:
    """A site that could not send goes on training."""

    def believed(state: OuterState, options: OuterOptions, event: UpdateArrived) -> int:
        del options
        return min(event.steps, state.sites[event.site].lines[event.fragment].usual_steps or event.steps)

    patch.setattr(admission, "believed_steps", believed)
    patch.setattr(admission, "STEPS_RATIO_MAX", 2)


def judge_staleness_laxly(patch: Patch) -> None:
    init = OuterProcess.__init__

    def begin(self: OuterProcess, *given: Any, **named: Any) -> None:
        init(self, *given, **named)
        lax = self.plan.options.staleness_max + 3
        self.machine.options = dataclasses.replace(self.machine.options, staleness_max=lax)

    patch.setattr(OuterProcess, "__init__", begin)


def add_up_the_updates_of_a_site(patch: Patch) -> None:
    init = OuterProcess.__init__

    def begin(self: OuterProcess, *given: Any, **named: Any) -> None:
        init(self, *given, **named)
        self.machine.options = dataclasses.replace(self.machine.options, merge_by="site")

    patch.setattr(OuterProcess, "__init__", begin)


def double_the_grace(patch: Patch) -> None:
    patch.setattr(rounds, "grace_ns", lambda options, *times: 2 * options.grace_ns + 1)


def publish_unrounded(patch: Patch) -> None:
    right = Replayer.made

    def made(self: Replayer, before: Kept, contributions: Any, share: float = 1) -> Kept:
        kept = right(self, before, contributions, share)
        return dataclasses.replace(kept, published=kept.theta)

    patch.setattr(Replayer, "made", made)


def merge_only_the_first_update_of_a_site(patch: Patch) -> None:
    right = Replayer.made

    def made(self: Replayer, before: Kept, contributions: Any, share: float = 1) -> Kept:
        return right(self, before, [(weight, each[:1]) for weight, each in contributions], share)

    patch.setattr(Replayer, "made", made)


def seal_without_a_window(patch: Patch) -> None:
    right = updates.may_seal

    def may_seal(turn: Any, part: Any) -> bool:
        orphans, in_flight = part.orphans, part.in_flight
        part.orphans, part.in_flight = [], [sent for sent in in_flight if sent.state != "accepted"]
        try:
            return right(turn, part)
        finally:
            part.orphans, part.in_flight = orphans, in_flight

    patch.setattr(updates, "may_seal", may_seal)


def lose_refused_tokens(patch: Patch) -> None:
    patch.setattr(updates, "give_back", lambda options, part, sent: part.in_flight.remove(sent))


def change_effects(patch: Patch, change: Callable[[Any], Any]) -> None:
    right = LearnerSync.handle

    def handle(self: LearnerSync, event: Any, now_ns: int) -> list[Any]:
        changed = [change(effect) for effect in right(self, event, now_ns)]
        return [effect for effect in changed if effect is not None]

    patch.setattr(LearnerSync, "handle", handle)


def measure_what_is_in_flight_again(patch: Patch) -> None:
    change_effects(
        patch, lambda effect: dataclasses.replace(effect, in_flight=()) if isinstance(effect, Seal) else effect
    )


def keep_the_cold_start(patch: Patch) -> None:
    right = SiteProcess.retake

    def retake(self: SiteProcess, effect: Any) -> None:
        own = self.theta[effect.fragment]
        right(self, effect)
        if own[2]:
            self.theta[effect.fragment] = own

    patch.setattr(SiteProcess, "retake", retake)


def wait_for_fates(patch: Patch) -> None:
    def must_wait(self: LearnerSync) -> bool:
        return any(part.undecided() for part in self.state.fragments)

    patch.setattr(LearnerSync, "must_wait", must_wait)


def leave_in_the_middle_of_a_step(patch: Patch) -> None:
    right = LearnerSync.handle

    def handle(self: LearnerSync, event: Any, now_ns: int) -> list[Any]:
        effects, state = right(self, event, now_ns), self.state
        if state.at_rest and not state.left and state.incarnation:
            state.left = True
            effects.append(Leave(state.ending))
        return effects

    patch.setattr(LearnerSync, "handle", handle)


def keep_what_the_codec_rounded_off(patch: Patch) -> None:
    right = SiteProcess.retake

    def retake(self: SiteProcess, effect: Any) -> None:
        index, own = effect.fragment, self.theta[effect.fragment]
        rest = world.minus(own, self.base[index][1])
        right(self, effect)
        if self.machine.is_final():
            self.theta[index] = world.plus(self.theta[index], rest)

    patch.setattr(SiteProcess, "retake", retake)


def skip_no_data(patch: Patch) -> None:
    change_effects(patch, lambda effect: None if isinstance(effect, SkipData) else effect)


def adopt_as_if_nothing_were_merged(patch: Patch) -> None:
    change_effects(
        patch, lambda effect: dataclasses.replace(effect, merged=()) if isinstance(effect, Adopt) else effect
    )


def take_stale_for_merged(patch: Patch) -> None:
    """Only the sum over all sites sees it: the site believes that its progress is in the version."""
    right = updates.fate_told

    def fate_told(turn: Any, told: Any) -> None:
        right(turn, dataclasses.replace(told, reason=None) if told.reason is Reason.STALE else told)

    patch.setattr(learner, "fate_told", fate_told)


def go_on_in_a_new_lineage(patch: Patch) -> None:
    right = LearnerSync.handle

    def handle(self: LearnerSync, event: Any, now_ns: int) -> list[Any]:
        if isinstance(event, JoinAnswered):
            self.state.lineage, self.state.epoch = event.lineage, event.epoch
        return right(self, event, now_ns)

    patch.setattr(LearnerSync, "handle", handle)


def merge_what_is_held(patch: Patch) -> None:
    patch.setattr(Line, "waiting", Line.unmerged)


def never_end(patch: Patch) -> None:
    patch.setattr(fates, "all_final", lambda turn, index: False)


def tell_without_asking_for_the_lease(patch: Patch) -> None:
    patch.setattr(Leadership, "valid", lambda self, now_ns: self.lost is None)


def wait_for_no_standby(patch: Patch) -> None:
    right = Replication.may_tell

    def may_tell(self: Replication, end: Any, now_ns: int) -> Any:
        right(self, end, now_ns)
        return None, self.standby

    patch.setattr(Replication, "may_tell", may_tell)


def acknowledge_at_the_standby_before_syncing(patch: Patch) -> None:
    right = StandbyProcess._unit

    def unit(self: StandbyProcess, *given: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            never_sync(inner, "journal-")
            right(self, *given)

    patch.setattr(StandbyProcess, "_unit", unit)


def leave_the_heir_where_it_is(patch: Patch) -> None:
    patch.setattr(Leadership, "heir_is", lambda self, name: None)


def never_attach_again(patch: Patch) -> None:
    patch.setattr(OuterProcess, "attach", lambda self, standby: None)


def count_a_unit_for_one_fragment(patch: Patch) -> None:
    patch.setattr(Holder, "whole", lambda self, unit: whole_units(self.merged[0], unit))


def lease_what_may_still_be_merged(patch: Patch) -> None:
    patch.setattr(fates, "_pending", lambda state, name: [])


def leave_free_what_is_taken_up_again(patch: Patch) -> None:
    def returned(turn: Any, name: str) -> None:
        holder = turn.state.units.holders.get(name) if turn.state.units is not None else None
        if holder is not None:
            holder.gone, holder.silent_ns = False, None

    patch.setattr(fates, "returned", returned)


MUTATIONS: tuple[tuple[str, Callable[[Patch], None], int], ...] = (
    ("exactly_once", admit_again, 3),
    ("versions", recover_an_older_version, 0),
    ("acknowledged", answer_before_syncing, 8),
    ("storage", never_sync_names, 5),
    ("storage", drop_a_payload_with_its_fate, 0),
    ("recovery", forget_what_was_merging, 0),
    ("weights", leave_weights_as_they_are, 0),
    ("weights", add_up_the_updates_of_a_site, 1),
    ("weights", count_dead_sites_in_the_share, 0),
    ("staleness", judge_staleness_laxly, 17),
    ("grace", double_the_grace, 3),
    ("same_versions", publish_unrounded, 0),
    ("same_versions", merge_only_the_first_update_of_a_site, 16),
    ("lineages", go_on_in_a_new_lineage, 0),
    ("admission", merge_what_is_held, 6),
    ("admission", believe_what_is_usual_alone, 7),
    ("bounds", seal_without_a_window, 2),
    ("ledger", lose_refused_tokens, 0),
    ("carried", measure_what_is_in_flight_again, 0),
    ("cold", keep_the_cold_start, 0),
    ("independence", wait_for_fates, 0),
    ("farewell", leave_in_the_middle_of_a_step, 0),
    ("final", keep_what_the_codec_rounded_off, 26),
    ("cursor", skip_no_data, 0),
    ("conservation", adopt_as_if_nothing_were_merged, 0),
    ("conservation", take_stale_for_merged, 10),
    ("liveness", never_end, 0),
    ("counted_once", count_a_unit_for_one_fragment, 0),
    ("counted_once", lease_what_may_still_be_merged, 2),
    ("balanced", leave_free_what_is_taken_up_again, 2),
)
"""Each with the seed that showed it when this was written: tried first, and the others where it shows it no more."""
OF_A_PAIR: tuple[tuple[str, str, Callable[[Patch], None], int], ...] = (
    ("one_leader", "primary_frozen", tell_without_asking_for_the_lease, 6),
    ("replicated", "", wait_for_no_standby, 3),
    ("replicated", "", acknowledge_at_the_standby_before_syncing, 3),
    ("recovery", "deserted", leave_the_heir_where_it_is, 339),
    ("replicated", "", leave_the_heir_where_it_is, 44),
    ("liveness", "primary_gone", never_attach_again, 3),
)
"""Of runs with a standby, and with the fault that shows it."""


def noticed(name: str, seeds: Iterable[int]) -> int | None:
    """The first seed at which the checker ``name``, alone, sees something."""
    only = [checker for checker in CHECKERS if checker.name == name]
    return next((seed for seed in seeds if run_seed(seed, only).checker == name), None)


@pytest.mark.parametrize(("name", "mutate", "first"), MUTATIONS, ids=lambda value: getattr(value, "__name__", value))
def test_each_checker_notices_its_mutation(
    name: str, mutate: Callable[[Patch], None], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    assert noticed(name, (first, *range(SEEDS_MAX))) is not None, f"{name} sees nothing in {SEEDS_MAX} seeds"


@pytest.mark.parametrize(
    ("name", "fault", "mutate", "first"), OF_A_PAIR, ids=lambda value: getattr(value, "__name__", value)
)
def test_each_checker_notices_its_mutation_where_there_is_a_standby(
    name: str, fault: str, mutate: Callable[[Patch], None], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = (draw_plan(seed) for seed in (first, *range(3 * SEEDS_MAX)))
    pairs = (plan.seed for plan in plans if plan.outer.replication is not None and (not fault or fault in plan.faults))
    mutate(monkeypatch)
    assert noticed(name, pairs) is not None, f"{name} sees nothing in {3 * SEEDS_MAX} seeds"


def test_every_checker_has_a_mutation_and_a_name_of_its_own() -> None:
    assert len({checker.name for checker in CHECKERS}) == len(CHECKERS)
    assert {checker.name for checker in CHECKERS} <= {name for name, *_ in (*MUTATIONS, *OF_A_PAIR)}
    assert all(checker.mutation for checker in CHECKERS)


STEP = StartOuterStep(0, 1, (Contribution("a", 1.0, 0, (UpdateRef(1, "p", "exact", "d"),)),))


def a_replayer(rule: OuterRule | None = None) -> Replayer:
    disk = OuterDisk(OuterPlan(OuterOptions(num_fragments=1), rule or OuterRule()))
    disk.keep_payload("p", sealed(canonical((-30, -7, 0))))
    return Replayer(OuterSync(disk.plan.options), [{0: ZERO}], disk)


def test_a_version_is_the_one_before_and_what_was_merged() -> None:
    made = a_replayer().made_again(STEP)
    assert made == Kept((30, 7, 0), (-30, -7, 0), (30, 7, 0), (30, 7, 0))
    coarse = a_replayer(OuterRule(10, 0, 64)).made_again(STEP)
    assert (coarse.theta, coarse.published) == ((30, 7, 0), (0, 7, 0)), "what is published is rounded"


def test_what_the_machine_said_otherwise_is_damage_and_only_the_newest_versions_are_kept() -> None:
    replayer = a_replayer()
    for version in range(1, 10):
        replayer.store(0, version, ZERO)
    assert sorted(replayer.versions[0]) == list(range(10 - VERSIONS_KEPT, 10))
    with pytest.raises(JournalError, match="record 0"):
        replayer.apply(Record(5, SyncerStarted(1), "another"))


def test_a_restored_version_has_no_momentum_and_no_link() -> None:
    kept = Kept((1, 1, 0), (2, 2, 0), (3, 3, 0), (4, 4, 0))
    assert restored([{6: ZERO, 7: kept}]) == [{8: Kept((1, 1, 0), (0, 0, 0), (3, 3, 0), (0, 0, 0))}]
