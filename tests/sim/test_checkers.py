"""The checkers, shown by hand what they must not accept; ``test_outer_disk`` shows them against broken machines."""

from __future__ import annotations

import pytest

from diloco.sim.checkers import Checker, Checkers, Violation
from diloco.sim.site_checkers import Admission, OneLeader, Replicated
from diloco.sim.world import OuterPlan, OuterRule, Storage, Unit
from diloco.sync import effects as fx
from diloco.sync.events import Outcome, Reason, StandbyAttached, StandbyDetached, SyncerStarted
from diloco.sync.journal import CHAIN_START, encode_frame
from diloco.sync.options import HealthOptions, OuterOptions
from diloco.sync.syncer import OuterSync
from tests.sim.small import a_pair
from tests.sync.driving import Syncer

OPTIONS = OuterOptions(num_fragments=1)
PLAN = OuterPlan(OPTIONS, OuterRule(), replication=a_pair())
HOOKS = [name for name in vars(Checker) if not name.startswith("_") and name not in ("of_the_disk", "require")]


class Noting(Checker):
    def __init__(self, plan: OuterPlan) -> None:
        super().__init__(plan)
        self.seen: list[object] = []

    def recovered(self, machine: OuterSync) -> None:
        self.seen.append(machine)


def test_every_hook_reaches_the_checkers_that_have_it() -> None:
    for hook in HOOKS:
        seen: list[tuple[object, ...]] = []
        having = type("Having", (Checker,), {hook: lambda self, *what, seen=seen: seen.append(what)})
        getattr(Checkers(PLAN, [Checker, having]), hook)("this", 1)
        assert seen == [("this", 1)], f"no checker would ever hear of {hook}"


def test_a_restore_sets_the_books_of_the_disk_back() -> None:
    checkers = Checkers(PLAN, [type("OfTheDisk", (Noting,), {"of_the_disk": ("seen",)}), Noting])
    one, other = (each for each in checkers.all if isinstance(each, Noting))
    checkers.recovered(OuterSync(OPTIONS))
    checkers.back_up()
    one.seen.append("later")
    other.seen.append("later")
    checkers.set_back()
    assert [len(each.seen) for each in (one, other)] == [1, 2]


REFUSED = {"outcome": Outcome.REFUSED, "reason": Reason.OUTLIER}


@pytest.mark.parametrize(
    ("policy", "norm", "answer", "words"),
    [
        ("refuse", 1e6, {}, "is an outlier under refuse"),
        ("admit", 1e6, {}, "UpdateArrived"),
        ("refuse", 1e6, REFUSED, "is refused silently"),
        ("refuse", 1.1, {**REFUSED, "note": "outlier_refused"}, "is like the others"),
        ("admit", 1e6, {"note": "outlier_admitted"}, None),
        ("refuse", 1e6, {**REFUSED, "note": "outlier_refused"}, None),
    ],
)
def test_an_outlier_is_refused_or_enters_as_the_policy_says_and_never_silently(
    policy: str, norm: float, answer: dict[str, object], words: str | None
) -> None:
    """After four updates that are alike."""
    syncer = Syncer(grace="fixed", grace_ns=0)
    checker = Admission(OuterPlan(OuterOptions(), OuterRule(), health=HealthOptions(policy=policy)))

    def arrives(sequence: int, norm: float = 1.0, note: str = "", **answer: object) -> None:
        event = syncer.update("a", sequence, norm=norm, cosine=0.5)
        said = fx.AnswerPush(1, version=0, **{"outcome": Outcome.ACCEPTED, **answer})  # type: ignore[arg-type]
        checker.outer(0, event, [*([fx.Note(note, "")] if note else []), said], syncer.machine)

    for sequence in range(1, 5):
        arrives(sequence)
    if words is None:
        arrives(5, norm, **answer)  # type: ignore[arg-type]
    else:
        with pytest.raises(Violation, match=words):
            arrives(5, norm, **answer)  # type: ignore[arg-type]


def of_epoch(epoch: int) -> OuterSync:
    machine = OuterSync(OPTIONS)
    machine.state.epoch = epoch
    return machine


def test_one_leader_speaks_at_a_time_and_a_version_has_one_digest() -> None:
    checker = OneLeader(PLAN)
    checker.told(of_epoch(1), b"", [fx.PublishVersion(0, 1, "x")])
    checker.told(of_epoch(2), b"", [fx.PublishVersion(0, 1, "x")])
    with pytest.raises(Violation, match="tells something after"):
        checker.told(of_epoch(1), None, [])
    with pytest.raises(Violation, match="published as x and now as y"):
        checker.told(of_epoch(2), b"", [fx.PublishVersion(0, 1, "y")])
    checker.outer(0, SyncerStarted(2), [], of_epoch(2))
    with pytest.raises(Violation, match="came after"):
        checker.outer(0, SyncerStarted(2), [], of_epoch(2))


def test_what_is_told_is_durable_at_the_standby() -> None:
    checker, storage = Replicated(PLAN), Storage()
    raw, chain = encode_frame(b"x\n", CHAIN_START)
    unit = Unit(chain, raw, (1, len(raw)), ())
    storage.append("journal-000001", raw)
    with pytest.raises(Violation, match="not durable"):
        checker.replicated(storage, "journal-000001", unit)
    with pytest.raises(Violation, match="without the standby"):
        checker.told(of_epoch(1), chain, [])
    storage.sync("journal-000001")
    storage.sync_names()
    checker.replicated(storage, "journal-000001", unit)
    checker.resumed(storage, "journal-000001", chain)
    checker.told(of_epoch(1), chain, [])


def test_a_detached_standby_is_not_asked_for_from_the_word_on_until_it_is_attached() -> None:
    checker, machine = Replicated(PLAN), of_epoch(1)
    checker.stands_alone()
    checker.told(machine, b"1", [])
    checker.outer(0, StandbyDetached(1), [], machine)
    checker.outer(0, StandbyAttached("q"), [], machine)
    checker.told(machine, b"2", [])
    with pytest.raises(Violation, match="without the standby"):
        checker.told(machine, b"3", [])
    checker.stands_alone()
    checker.recovered(machine)
    with pytest.raises(Violation, match="without the standby"):
        checker.told(machine, b"4", [])
