"""A check that cannot fail is a defect: each checker alone against the mutation that it names."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from diloco.sim.outer_disk import Kept, OuterDisk, Recovered
from diloco.sim.outer_process import OuterProcess
from diloco.sim.site_checkers import CHECKERS
from diloco.sim.site_process import SiteProcess
from diloco.sim.storage import Storage
from diloco.sim.swarm import run_seed
from diloco.sync import arrivals, boundary, ending, following, joining, learner, rounds, sending, syncer
from diloco.sync.effects import Adopt, Leave, Seal, SkipData
from diloco.sync.events import JoinAnswered, Outcome, Reason
from diloco.sync.frames import encode_frame, encode_mark
from diloco.sync.journal import encode_records
from diloco.sync.learner import LearnerSync
from diloco.sync.state import FragmentState, Line
from diloco.sync.syncer import OuterSync

if TYPE_CHECKING:
    from collections.abc import Callable

SEEDS_MAX = 400
Patch = pytest.MonkeyPatch


def admit_again(patch: Patch) -> None:
    right = syncer.admit

    def admit(*header: Any) -> Any:
        verdict = right(*header)
        return dataclasses.replace(verdict, outcome=Outcome.ACCEPTED) if verdict.outcome == "duplicate" else verdict

    patch.setattr(syncer, "admit", admit)
    patch.setattr(arrivals, "admit", admit)


def recover_an_older_version(patch: Patch) -> None:
    def older(machine: OuterSync) -> None:
        for fragment in machine.state.fragments:
            fragment.version = max(0, fragment.version - 1)

    after_recovery(patch, older)


def after_recovery(patch: Patch, spoil: Callable[[OuterSync], None]) -> None:
    right = OuterDisk.recover

    def recover(self: OuterDisk, again: Any) -> Recovered:
        found = right(self, again)
        spoil(found.machine)
        return found

    patch.setattr(OuterDisk, "recover", recover)


def never_sync(patch: Patch, prefix: str) -> None:
    right = Storage.sync
    patch.setattr(Storage, "sync", lambda self, name: None if name.startswith(prefix) else right(self, name))


def answer_before_syncing(patch: Patch) -> None:
    """A record is synced when the next one is written, after its effects were carried out."""

    def write(self: OuterDisk, record: Any, reached: Any) -> None:
        name = self.storage.names("journal-")[-1]
        self.storage.sync(name)
        frame, self._chain = encode_frame(encode_records([record]), self._chain)
        reached("before the record")
        self.storage.append(name, frame + encode_mark(self._chain))

    patch.setattr(OuterDisk, "write", write)


def name_files_before_syncing_them(patch: Patch) -> None:
    never_sync(patch, "partial/")


def never_sync_names(patch: Patch) -> None:
    patch.setattr(Storage, "sync_names", lambda self: None)


def drop_a_payload_with_its_fate(patch: Patch) -> None:
    patch.setattr(OuterDisk, "release", OuterDisk.drop_payload)


def forget_what_was_merging(patch: Patch) -> None:
    def forget(machine: OuterSync) -> None:
        for index, fragment in enumerate(machine.state.fragments):
            machine.state.fragments[index] = FragmentState(fragment.version, fragment.digest)

    after_recovery(patch, forget)


def leave_weights_as_they_are(patch: Patch) -> None:
    patch.setattr(rounds, "normalised", tuple)


def judge_staleness_laxly(patch: Patch) -> None:
    init = OuterProcess.__init__

    def begin(self: OuterProcess, *given: Any) -> None:
        init(self, *given)
        lax = self.plan.options.staleness_max + 3
        self.machine.options = dataclasses.replace(self.machine.options, staleness_max=lax)

    patch.setattr(OuterProcess, "__init__", begin)


def double_the_grace(patch: Patch) -> None:
    patch.setattr(rounds, "grace_ns", lambda options, *times: 2 * options.grace_ns + 1)


def publish_unrounded(patch: Patch) -> None:
    right = OuterProcess.made

    def made(self: OuterProcess, before: Kept, contributions: Any) -> Kept:
        kept = right(self, before, contributions)
        return dataclasses.replace(kept, published=kept.theta)

    patch.setattr(OuterProcess, "made", made)


def merge_only_the_first_update_of_a_site(patch: Patch) -> None:
    right = OuterProcess.made

    def made(self: OuterProcess, before: Kept, contributions: Any) -> Kept:
        return right(self, before, [(weight, each[:1]) for weight, each in contributions])

    patch.setattr(OuterProcess, "made", made)


def seal_without_a_window(patch: Patch) -> None:
    right = boundary.may_seal

    def may_seal(turn: Any, part: Any) -> bool:
        orphans, in_flight = part.orphans, part.in_flight
        part.orphans, part.in_flight = [], [sent for sent in in_flight if sent.state != "accepted"]
        try:
            return right(turn, part)
        finally:
            part.orphans, part.in_flight = orphans, in_flight

    patch.setattr(boundary, "may_seal", may_seal)


def lose_refused_tokens(patch: Patch) -> None:
    patch.setattr(sending, "give_back", lambda options, part, sent: part.in_flight.remove(sent))


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
    right = SiteProcess._retake

    def retake(self: SiteProcess, effect: Any) -> None:
        own = self.theta[effect.fragment]
        right(self, effect)
        if own[2]:
            self.theta[effect.fragment] = own

    patch.setattr(SiteProcess, "_retake", retake)


def wait_for_fates(patch: Patch) -> None:
    def must_wait(self: LearnerSync) -> bool:
        return any(part.undecided() for part in self.state.fragments)

    patch.setattr(LearnerSync, "must_wait", must_wait)


def leave_in_the_middle_of_a_step(patch: Patch) -> None:
    def maybe_leave(turn: Any) -> None:
        if turn.state.stopping and not turn.state.left and turn.state.incarnation:
            turn.state.left = True
            turn.effects.append(Leave(turn.state.ending))

    patch.setattr(learner, "_maybe_leave", maybe_leave)


def skip_no_data(patch: Patch) -> None:
    change_effects(patch, lambda effect: None if isinstance(effect, SkipData) else effect)


def adopt_as_if_nothing_were_merged(patch: Patch) -> None:
    change_effects(
        patch, lambda effect: dataclasses.replace(effect, merged=()) if isinstance(effect, Adopt) else effect
    )


def take_stale_for_merged(patch: Patch) -> None:
    """Only the sum over all sites sees it: the site believes that its progress is in the version."""
    right = sending.fate_told

    def fate_told(turn: Any, told: Any) -> None:
        right(turn, dataclasses.replace(told, reason=None) if told.reason is Reason.STALE else told)

    for module in (learner, joining, following):
        patch.setattr(module, "fate_told", fate_told)


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
    patch.setattr(ending, "all_final", lambda turn, index: False)


MUTATIONS: tuple[tuple[str, Callable[[Patch], None]], ...] = (
    ("exactly_once", admit_again),
    ("versions", recover_an_older_version),
    ("acknowledged", answer_before_syncing),
    ("storage", name_files_before_syncing_them),
    ("storage", never_sync_names),
    ("storage", drop_a_payload_with_its_fate),
    ("recovery", forget_what_was_merging),
    ("weights", leave_weights_as_they_are),
    ("staleness", judge_staleness_laxly),
    ("grace", double_the_grace),
    ("same_versions", publish_unrounded),
    ("same_versions", merge_only_the_first_update_of_a_site),
    ("lineages", go_on_in_a_new_lineage),
    ("admission", merge_what_is_held),
    ("bounds", seal_without_a_window),
    ("ledger", lose_refused_tokens),
    ("carried", measure_what_is_in_flight_again),
    ("cold", keep_the_cold_start),
    ("independence", wait_for_fates),
    ("farewell", leave_in_the_middle_of_a_step),
    ("cursor", skip_no_data),
    ("conservation", adopt_as_if_nothing_were_merged),
    ("conservation", take_stale_for_merged),
    ("liveness", never_end),
)


def noticed(name: str) -> int | None:
    """The first seed at which the checker ``name``, alone, sees something."""
    only = [checker for checker in CHECKERS if checker.name == name]
    for seed in range(SEEDS_MAX):
        if run_seed(seed, only).checker == name:
            return seed
    return None


@pytest.mark.parametrize(("name", "mutate"), MUTATIONS, ids=lambda value: getattr(value, "__name__", value))
def test_each_checker_notices_its_mutation(
    name: str, mutate: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    assert noticed(name) is not None, f"{name} sees nothing in {SEEDS_MAX} seeds"


def test_every_checker_has_a_mutation() -> None:
    assert {checker.name for checker in CHECKERS} <= {name for name, _ in MUTATIONS}
    assert all(checker.mutation for checker in CHECKERS)
