"""Short words for driving a learner's machine in tests; the mirror of ``driving``."""

from __future__ import annotations

from typing import Any

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.effects import LearnerEffect as Effect
from diloco.sync.events import Outcome, Reason
from diloco.sync.learner import LearnerSync
from diloco.sync.options import LearnerOptions
from diloco.sync.progress import ledger_of, site_ledger
from tests.sync.driving import MS, only, through_json

ACCEPTED = Outcome.ACCEPTED


class Site:
    """A learner's machine that checks its ledger after every event."""

    def __init__(self, *, cold: bool = False, **options: Any) -> None:
        self.options = LearnerOptions(**options)
        self.machine = LearnerSync(self.options)
        self.step = 0
        self.checkpoint: object = None
        if not cold:
            self.join()
            for index in range(self.options.num_fragments):
                self.handle(ev.VersionFetched(index, 0, ()))
            self.boundary()

    def handle(self, event: ev.LearnerEvent) -> list[Effect]:
        effects = self.machine.handle(event, 0)
        self.check()
        return effects

    def check(self) -> None:
        state = self.machine.state
        for index in range(len(state.fragments)):
            assert ledger_of(state, index).balanced(), ledger_of(state, index)
        assert site_ledger(state).balanced(), site_ledger(state)

    def join(self, *standings: ev.FragmentStanding, **given: Any) -> list[Effect]:
        """A join's answer; fragments without a standing are as the syncer first knows them."""
        told = {standing.fragment: standing for standing in standings}
        every = tuple(told.get(index, known(index)) for index in range(self.options.num_fragments))
        fields: dict[str, Any] = {"epoch": 1, "incarnation": 1, "run_tokens": 0, "progress_ppm": 0, "ending": None}
        return self.handle(ev.JoinAnswered(standings=every, **(fields | given)))

    def train(self, steps: int = 1, tokens: int = 10) -> list[Effect]:
        effects: list[Effect] = []
        for _ in range(steps):
            self.step += 1
            effects += self.handle(ev.StepDone(self.step, tokens, 100 * MS, self.step))
        return effects

    def boundary(self) -> list[Effect]:
        return self.handle(ev.BoundaryReached())

    def fetched(self, version: int, *fates: ev.Fate) -> list[Effect]:
        """The version is here; what comes of it at the next boundary."""
        self.handle(ev.VersionFetched(0, version, fates))
        return self.boundary()

    def seal(self, sequence: int, fragment: int = 0) -> list[Effect]:
        return self.handle(ev.Sealed(fragment, sequence, f"u{sequence}"))

    def answer(self, sequence: int, outcome: Outcome = ACCEPTED, reason: Reason | None = None) -> list[Effect]:
        return self.handle(ev.PushAnswered(0, sequence, outcome, reason))

    def send(self, sequence: int, steps: int = 15) -> None:
        """Train until the fragment is due, and get its update accepted."""
        assert only(fx.Seal, self.train(steps)).sequence == sequence
        self.seal(sequence)
        self.answer(sequence)

    def fate(self, sequence: int, version: int, reason: Reason | None = None, tokens: int = 150) -> list[Effect]:
        return self.handle(ev.FateTold(ev.Fate(0, sequence, version, tokens, f"u{sequence}", reason)))

    def restart(self, plain: object, outbox: dict[tuple[int, int], str] | None = None, processed: int = 0) -> None:
        """Another process takes over from the checkpoint ``plain``."""
        self.machine = LearnerSync.restore(self.options, through_json(plain), outbox or {}, processed)
        self.step = self.machine.state.step
        self.check()


def known(fragment: int = 0, **given: Any) -> ev.FragmentStanding:
    """What the syncer knows of one (site, fragment): nothing, but for what is given."""
    counts = dict.fromkeys(("version", "watermark", "cursor", "tokens_merged", "tokens_discarded"), 0)
    return ev.FragmentStanding(fragment, **({"digest": "", "undecided": (), "fates": ()} | counts | given))
