"""The simulated syncer's folder, by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from diloco.sim import outer_process, world
from diloco.sim.outer_disk import VERSIONS_KEPT, ZERO, Kept, OuterDisk, Replayer, journal_name, restored
from diloco.sim.outer_process import OuterProcess
from diloco.sim.plan import draw_plan
from diloco.sim.site_checkers import CHECKERS
from diloco.sim.site_process import SiteProcess
from diloco.sim.standby_process import StandbyProcess
from diloco.sim.world import Damaged, OuterPlan, OuterRule, Storage
from diloco.sync import admission, fates, rounds, updates
from diloco.sync.data_units import Holder, whole_units
from diloco.sync.effects import Adopt, Leave, Seal, SkipData, StartOuterStep
from diloco.sync.events import FateTold, JoinAnswered, Outcome, Reason, SyncerStarted, UpdateArrived
from diloco.sync.journal import JournalError, Record, encode_mark
from diloco.sync.leadership import Leadership, Place, Replication
from diloco.sync.learner import LearnerSync
from diloco.sync.options import OuterOptions
from diloco.sync.state import FragmentState, Line
from diloco.sync.syncer import OuterSync
from tests.hunts.swarm import run_seed
from tests.sim.small import Small


def a_disk() -> tuple[OuterDisk, OuterProcess]:
    """A folder with two snapshots and some journal behind the second one, and its process."""
    small = Small()
    assert small.syncers.disk.storage.names("") == ["journal-000001", "snapshot-000001"], "it begins at version 0"
    small.run(3)
    small.outer.snapshot()
    small.run(1)
    return small.syncers.disk, small.outer


def test_the_one_before_a_damaged_snapshot_is_used_while_there_is_one_with_all_that_follows() -> None:
    disk, outer = a_disk()
    older, newer = disk.storage.names("snapshot-")
    disk.storage.cut(newer, 40)
    found = disk.recover()
    assert found.machine.state == outer.machine.state
    assert disk.storage.names("snapshot-") == [older]
    first = disk.storage.names("journal-")[0]
    disk.storage.remove(first)
    with pytest.raises(Damaged, match=f"{first} is missing"):
        disk.recover()
    disk.storage.remove(older)
    with pytest.raises(Damaged, match="no snapshot is whole"):
        disk.recover()


def test_a_power_cut_between_two_events_costs_nothing() -> None:
    disk, outer = a_disk()
    for seed in range(8):
        disk.storage.power_cut(Random(seed))
        assert disk.recover().machine.state == outer.machine.state


# --- A check that cannot fail is a defect ----------------------------------------------------------------------------

SEEDS_MAX = 400
Patch = pytest.MonkeyPatch
MUTANTS: list[tuple[str, int, str | None, Callable[[Patch], None]]] = []


def given_first(right: Callable[..., Any], wrong: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given, **named: wrong(right, *given, **named)


def instead_of(*places: tuple[Any, str]) -> Callable[..., Callable[[Patch], None]]:
    """Make a mutant of a function that is called at ``places`` with the right one and what that would be given."""

    def mutant_of(wrong: Callable[..., Any]) -> Callable[[Patch], None]:
        def mutate(patch: Patch) -> None:
            for owner, name in places:
                patch.setattr(owner, name, given_first(getattr(owner, name), wrong))

        mutate.__name__ = wrong.__name__
        return mutate

    return mutant_of


def noticed_by(
    checker: str, seed: int, *places: tuple[Any, str], fault: str | None = None
) -> Callable[..., Callable[[Patch], None]]:
    """As ``instead_of``, of a mutant that this checker alone must notice; ``seed`` showed it when this was written.

    It is tried first.  With a ``fault``, or "", in runs with a standby, in which there is that fault.  Without a place
    it is a mutant already.
    """

    def keep(wrong: Callable[..., Any]) -> Callable[[Patch], None]:
        mutate = instead_of(*places)(wrong) if places else wrong
        MUTANTS.append((checker, seed, fault, mutate))
        return mutate

    return keep


@noticed_by("ExactlyOnce", 3, (outer_process, "admit"), (admission, "admit"))
def admit_again(right: Any, *header: Any) -> Any:
    verdict = right(*header)
    return replace(verdict, outcome=Outcome.ACCEPTED) if verdict.outcome == "duplicate" else verdict


@noticed_by("Versions", 0, (OuterDisk, "recover"))
def recover_an_older_version(right: Any, disk: OuterDisk) -> Replayer:
    found = right(disk)
    for fragment in found.machine.state.fragments:
        fragment.version = max(0, fragment.version - 1)
    return found


@noticed_by("Recovery", 0, (OuterDisk, "recover"))
def forget_what_was_merging(right: Any, disk: OuterDisk) -> Replayer:
    found = right(disk)
    state = found.machine.state
    state.fragments = [FragmentState(fragment.version, fragment.digest) for fragment in state.fragments]
    return found


@noticed_by("Acknowledged", 8, (OuterDisk, "write"))
def answer_before_syncing(right: Any, disk: OuterDisk, frame: bytes, chain: bytes) -> Place:
    """A record is synced when the next one is written, after its effects were carried out."""
    name = journal_name(disk.segment)
    disk.storage.sync(name)
    disk.reached("before the record")
    disk.storage.append(name, frame + encode_mark(chain))
    disk.chain = chain
    return disk.segment, len(disk.storage.read(name)) - len(encode_mark(chain))


@noticed_by("storage", 5, (Storage, "sync_names"))
def never_sync_names(right: Any, storage: Storage) -> None:
    pass


@noticed_by("storage", 0, (OuterDisk, "release"))
def drop_a_payload_with_its_fate(right: Any, disk: OuterDisk, payload: str) -> None:
    disk.storage.remove(f"spool/{payload}")


@noticed_by("Weights", 0, (rounds, "normalised"))
def leave_weights_as_they_are(right: Any, weights: Any) -> Any:
    return tuple(weights)


@noticed_by("Weights", 0, (rounds, "_full_round"))
def count_dead_sites_in_the_share(right: Any, turn: Any, index: int, merged: Any) -> Any:
    return right(turn, index, {*merged, *turn.state.sites})


@noticed_by("Weights", 1, (OuterProcess, "__init__"))
def add_up_the_updates_of_a_site(right: Any, process: OuterProcess, *given: Any, **named: Any) -> None:
    right(process, *given, **named)
    process.machine.options = replace(process.machine.options, merge_by="site")


@noticed_by("Staleness", 17, (OuterProcess, "__init__"))
def judge_staleness_laxly(right: Any, process: OuterProcess, *given: Any, **named: Any) -> None:
    right(process, *given, **named)
    lax = process.plan.options.staleness_max + 3
    process.machine.options = replace(process.machine.options, staleness_max=lax)


@noticed_by("Grace", 3, (rounds, "grace_ns"))
def double_the_grace(right: Any, options: OuterOptions, *times: int) -> int:
    return 2 * options.grace_ns + 1


@noticed_by("Merging", 0, (Replayer, "made_again"))
def publish_unrounded(right: Any, *given: Any) -> Kept:
    kept = right(*given)
    return replace(kept, published=kept.theta)


@noticed_by("Merging", 16, (Replayer, "made_again"))
def merge_only_the_first_update_of_a_site(right: Any, replayer: Replayer, command: StartOuterStep) -> Kept:
    firsts = tuple(replace(part, updates=part.updates[:1]) for part in command.contributions)
    return right(replayer, replace(command, contributions=firsts))


@noticed_by("Lineages", 0, (LearnerSync, "handle"))
def go_on_in_a_new_lineage(right: Any, machine: LearnerSync, event: Any, now_ns: int) -> list[Any]:
    if isinstance(event, JoinAnswered):
        machine.state.lineage, machine.state.epoch = event.lineage, event.epoch
    return right(machine, event, now_ns)


@noticed_by("Admission", 6, (Line, "waiting"))
def merge_what_is_held(right: Any, line: Line) -> Any:
    return line.unmerged()


@noticed_by("Admission", 7)
def believe_what_is_usual_alone(patch: Patch) -> None:
    """A site that could not send goes on training."""

    def believed(machine: OuterSync, event: UpdateArrived) -> int:
        return min(event.steps, machine.state.sites[event.site].lines[event.fragment].usual_steps or event.steps)

    patch.setattr(admission, "believed_steps", believed)
    patch.setattr(admission, "STEPS_RATIO_MAX", 2)


@noticed_by("Bounds", 2, (updates, "may_follow"))
def seal_without_a_window(right: Any, options: Any, part: Any) -> bool:
    in_flight = [sent for sent in part.in_flight if sent.state != "accepted"]
    return right(options, replace(part, orphans=[], in_flight=in_flight))


@noticed_by("Ledger", 0, (updates, "unsend"))
def lose_refused_tokens(right: Any, options: Any, part: Any, sent: Any) -> None:
    before = part.unsent_tokens, part.unsent_steps
    right(options, part, sent)
    part.unsent_tokens, part.unsent_steps = before


@noticed_by("Carried", 0, (LearnerSync, "handle"))
def measure_what_is_in_flight_again(right: Any, *given: Any) -> list[Any]:
    return [replace(effect, in_flight=()) if isinstance(effect, Seal) else effect for effect in right(*given)]


@noticed_by("Cursor", 0, (LearnerSync, "handle"))
def skip_no_data(right: Any, *given: Any) -> list[Any]:
    return [effect for effect in right(*given) if not isinstance(effect, SkipData)]


@noticed_by("Conservation", 0, (LearnerSync, "handle"))
def adopt_as_if_nothing_were_merged(right: Any, *given: Any) -> list[Any]:
    return [replace(effect, merged=()) if isinstance(effect, Adopt) else effect for effect in right(*given)]


@noticed_by("Conservation", 366, (updates, "fate_told"))
def take_stale_for_merged(right: Any, turn: Any, event: Any) -> None:
    """Only the sum over all sites sees it: the site believes that its progress is in the version."""
    fate = event.fate
    right(turn, FateTold(replace(fate, reason=None)) if fate.reason is Reason.STALE else event)


@noticed_by("Cold", 0, (SiteProcess, "retake"))
def keep_the_cold_start(right: Any, site: SiteProcess, effect: Any) -> None:
    own = site.theta[effect.fragment]
    right(site, effect)
    if own[2]:
        site.theta[effect.fragment] = own


@noticed_by("Independence", 0, (LearnerSync, "must_wait"))
def wait_for_fates(right: Any, machine: LearnerSync) -> bool:
    return any(part.undecided() for part in machine.state.fragments)


@noticed_by("Farewell", 0, (LearnerSync, "handle"))
def leave_in_the_middle_of_a_step(right: Any, machine: LearnerSync, *given: Any) -> list[Any]:
    effects, state = right(machine, *given), machine.state
    if state.at_rest and not state.left and state.incarnation:
        state.left = True
        effects.append(Leave(state.ending))
    return effects


@noticed_by("Final", 26, (SiteProcess, "retake"))
def keep_what_the_codec_rounded_off(right: Any, site: SiteProcess, effect: Any) -> None:
    index, own = effect.fragment, site.theta[effect.fragment]
    rest = world.minus(own, site.base[index][1])
    right(site, effect)
    if site.machine.is_final():
        site.theta[index] = world.plus(site.theta[index], rest)


@noticed_by("liveness", 0, (fates, "all_final"))
def never_end(right: Any, *given: Any) -> bool:
    return False


@noticed_by("CountedOnce", 0, (Holder, "whole"))
def count_a_unit_for_one_fragment(right: Any, holder: Holder, unit: int) -> Any:
    return whole_units(holder.merged[0], unit)


@noticed_by("CountedOnce", 2, (fates, "_pending"))
def lease_what_may_still_be_merged(right: Any, *given: Any) -> list[Any]:
    return []


@noticed_by("Balanced", 2, (fates, "returned"))
def leave_free_what_is_taken_up_again(right: Any, turn: Any, name: str) -> None:
    holder = turn.state.units.holders.get(name) if turn.state.units is not None else None
    if holder is not None:
        holder.gone, holder.silent_ns = False, None


@noticed_by("OneLeader", 6, (Leadership, "valid"), fault="primary_frozen")
def tell_without_asking_for_the_lease(right: Any, leadership: Leadership, now_ns: int) -> bool:
    return leadership.lost is None


@noticed_by("Replicated", 3, (Replication, "may_tell"), fault="")
def wait_for_no_standby(right: Any, replication: Replication, *given: Any) -> Any:
    right(replication, *given)
    return None, replication.standby


@noticed_by("Replicated", 3, (StandbyProcess, "_unit"), fault="")
def acknowledge_at_the_standby_before_syncing(right: Any, *given: Any) -> None:
    synced = Storage.sync
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Storage, "sync", lambda self, name: None if name.startswith("journal-") else synced(self, name))
        right(*given)


@noticed_by("Recovery", 339, fault="deserted")
@noticed_by("Replicated", 44, (Leadership, "heir_is"), fault="")
def leave_the_heir_where_it_is(right: Any, *given: Any) -> None:
    pass


@noticed_by("liveness", 3, (OuterProcess, "attach"), fault="primary_gone")
def never_attach_again(right: Any, *given: Any) -> None:
    pass


def named(value: object) -> object:
    return getattr(value, "__name__", value)


@pytest.mark.parametrize(("checker", "seed", "fault", "mutate"), MUTANTS, ids=named)
def test_each_checker_notices_its_mutation(
    checker: str, seed: int, fault: str | None, mutate: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    seeds: Iterable[int] = (seed, *range(SEEDS_MAX))
    if fault is not None:
        plans = (draw_plan(each) for each in (seed, *range(3 * SEEDS_MAX)))
        pairs = (plan for plan in plans if plan.outer.replication is not None)
        seeds = (plan.seed for plan in pairs if not fault or fault in plan.faults)
    only = [each for each in CHECKERS if each.__name__ == checker]
    mutate(monkeypatch)
    assert any(run_seed(each, only).checker == checker for each in seeds), f"{checker} sees nothing in any seed"


def test_every_checker_has_a_mutation() -> None:
    assert {checker.__name__ for checker in CHECKERS} <= {name for name, *_ in MUTANTS}
    assert all(checker.mutation for checker in CHECKERS)


def test_what_the_machine_said_otherwise_is_damage_and_only_the_newest_versions_are_kept() -> None:
    disk = OuterDisk(OuterPlan(OuterOptions(num_fragments=1), OuterRule()))
    replayer = Replayer(OuterSync(disk.plan.options), [{0: ZERO}], disk)
    for version in range(1, 10):
        replayer.store(0, version, ZERO)
    assert sorted(replayer.versions[0]) == list(range(10 - VERSIONS_KEPT, 10))
    with pytest.raises(JournalError, match="record 0"):
        replayer.apply(Record(5, SyncerStarted(1), "another"))


def test_a_restored_version_has_no_momentum_and_no_link() -> None:
    kept = Kept((1, 1, 0), (2, 2, 0), (3, 3, 0), (4, 4, 0))
    assert restored([{6: ZERO, 7: kept}]) == [{8: Kept((1, 1, 0), (0, 0, 0), (3, 3, 0), (0, 0, 0))}]
