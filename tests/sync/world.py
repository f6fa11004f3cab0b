"""One site and the syncer, both machines real, with whole numbers for tensors and a network that loses and delays.

Progress is counted in tokens, so that under ``rebase`` with outer learning rate 1 every pseudo-gradient must be exactly
the tokens that its update claims: the machine's bookkeeping is judged by arithmetic that it knows nothing of.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.events import Outcome
from diloco.sync.learner import LearnerSync
from diloco.sync.progress import ledger_of, site_ledger
from diloco.sync.syncer import OuterSync
from tests.sync.driving import Syncer, of, only, through_json

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from diloco.sync.options import LearnerOptions

TOKENS = 10


class World:
    """A syncer that never dies for good, and a site whose processes do."""

    def __init__(self, draw: random.Random, options: LearnerOptions, **outer: Any) -> None:
        self.draw, self.options = draw, options
        self.ranks = draw.random() < 0.5  # Several agree before the end of a step on whether anything is done after it.
        self.syncer = Syncer(num_fragments=options.num_fragments, **outer)
        count = options.num_fragments
        self.published: list[list[int]] = [[0] for _ in range(count)]  # by fragment and version
        self.payloads: dict[str, int] = {}  # by digest
        self.outbox: dict[tuple[int, int], tuple[str, fx.Seal]] = {}
        self.odometer = 0
        self.processes = 0
        self.failed = self.calm = False
        self.seen: set[str] = set()
        self.checkpoint: tuple[object, list[int], list[int], dict[tuple[int, int], int]] | None = None
        self.syncer.join("b")  # A live site that never sends: rounds wait for it as long as their grace.
        self.restart()

    def chance(self, share: float) -> bool:
        return not self.calm and self.draw.random() < share

    # --- a process of the site ---------------------------------------------------------------------------------

    def restart(self) -> None:
        """A new process at the site, from the last checkpoint if there is one; the mail of the old one is lost."""
        count = self.options.num_fragments
        self.mail: list[Callable[[], None]] = []
        self.couriers: set[tuple[int, int]] = set()  # One for each update, so that no answer comes twice.
        self.joining = self.join_again = False
        self.processes += 1
        self.step = 0
        self.theta, self.base = [0] * count, [0] * count
        self.sent: dict[tuple[int, int], int] = {}
        self.values: dict[tuple[int, int], int] = {}
        self.joined = self.stopped = False
        if self.checkpoint is None:
            self.machine = LearnerSync(self.options)
        else:
            plain, theta, base, sent = copy.deepcopy(self.checkpoint)
            outbox = {key: stored for key, (stored, _) in self.outbox.items()}
            self.machine = LearnerSync.restore(self.options, through_json(plain), outbox, self.odometer)
            self.theta, self.base, self.sent = theta, base, sent
            self.step = self.machine.state.step
        self.check()
        self.join()

    def deliver(self) -> None:
        """Anything that is on its way, in any order."""
        if self.mail:
            self.mail.pop(self.draw.randrange(len(self.mail)))()

    def pass_time(self) -> None:
        wanted = self.syncer.machine.next_deadline_ns()
        if wanted is not None:
            self.syncer.now_ns = wanted
            self.serve(ev.DeadlinePassed())

    def save(self) -> None:
        self.checkpoint = copy.deepcopy((self.machine.snapshot(), self.theta, self.base, self.sent))

    def tell(self, event: ev.LearnerEvent) -> list[fx.LearnerEffect]:
        effects = self.machine.handle(event, 0)
        for effect in effects:
            self.seen.add(type(effect).__name__ + (f":{effect.what}" if isinstance(effect, fx.Note) else ""))
            self.carry_out(effect)
        self.check()
        return effects

    def check(self) -> None:
        """Invariant 10 and the bounds, after every event."""
        state = self.machine.state
        for index, part in enumerate(state.fragments):
            assert ledger_of(state, index).balanced(), ledger_of(state, index)
            assert part.tokens_lost >= 0, part
            assert len(part.undecided()) <= self.options.updates_in_flight_max
            assert sum(sent.state != "accepted" for sent in part.in_flight) <= 1, "two updates await an answer"
            sequences = [sent.sequence for sent in part.in_flight]
            assert sequences == sorted(set(sequences)), sequences
            assert all(sequence < part.next_sequence for sequence in sequences)
        assert site_ledger(state).balanced()

    def train(self) -> None:
        """One inner step, if the site may train."""
        if self.stopped or not self.machine.ready():
            self.tell(ev.BoundaryReached())
            return
        assert self.options.lock_step or not self.machine.must_wait(), "invariant 14: a learner was asked to wait"
        if self.machine.must_wait():
            self.tell(ev.BoundaryReached())
            return
        self.step += 1
        self.odometer += TOKENS
        self.theta = [value - TOKENS for value in self.theta]
        acts, late = self.machine.may_act(), self.chance(0.3)
        if late:
            self.deliver()  # After the ranks of the site have agreed.
        passes = self.ranks and not acts
        done = self.tell(ev.StepDone(self.step, TOKENS, 1000, self.machine.state.cursor + 1, passes=passes))
        changes = [effect for effect in done if isinstance(effect, fx.Seal | fx.Adopt | fx.Retake)]
        assert not changes or acts or (late and not passes), f"nothing was to be done after this step: {changes}"
        self.seen |= {"passed"} if passes else set()

    def carry_out(self, effect: fx.LearnerEffect) -> None:
        match effect:
            case fx.Seal():
                self.seal(effect)
            case fx.Send() if (effect.fragment, effect.sequence) not in self.couriers:
                self.couriers.add((effect.fragment, effect.sequence))
                self.mail.append(lambda: self.push(effect.fragment, effect.sequence))
            case fx.Forget():
                self.outbox.pop((effect.fragment, effect.sequence), None)
            case fx.Release():
                self.sent.pop((effect.fragment, effect.sequence), None)
            case fx.Fetch():
                self.mail.append(lambda: self.fetch(effect.fragment))
            case fx.Adopt():
                key = (effect.fragment, effect.version)
                kept = self.theta[effect.fragment] - self.base[effect.fragment]
                kept += sum(self.sent.pop((effect.fragment, sequence)) for sequence in effect.merged)
                assert self.options.adopt == "rebase" or not self.machine.state.fragments[effect.fragment].unsent_tokens
                self.base[effect.fragment] = self.values[key]
                self.theta[effect.fragment] = self.values[key] + (kept if self.options.adopt == "rebase" else 0)
            case fx.Retake():
                self.base[effect.fragment] = self.values.get(
                    (effect.fragment, effect.version), self.base[effect.fragment]
                )
                self.sent = {k: d for k, d in self.sent.items() if k[0] != effect.fragment or k[1] in effect.keep}
                own = sum(d for k, d in self.sent.items() if k[0] == effect.fragment)
                self.theta[effect.fragment] = self.base[effect.fragment] - own
                if self.options.adopt != "rebase":
                    self.base[effect.fragment] = self.theta[effect.fragment]  # The next update begins right here.
            case fx.StopTraining():
                self.stopped, self.failed = True, self.failed or effect.failed
            case fx.Join():
                self.join()
            case _:
                pass

    def seal(self, seal: fx.Seal) -> None:
        assert self.joined, "an update was sealed before the syncer answered"
        assert seal.base_version >= 0, "invariant 16: a cold site has sealed"
        index = seal.fragment
        d = self.base[index] - self.theta[index] - sum(self.sent[index, sequence] for sequence in seal.in_flight)
        assert d == seal.tokens, f"invariant 17: {d} of progress goes out as {seal.tokens} tokens: {seal}"
        key, text = (index, seal.sequence), f"{self.processes}.{self.step}.{index}.{seal.sequence}"

        def sealed() -> None:
            if self.chance(0.05):
                self.tell(ev.SealFailed(index, seal.sequence))
                return
            self.sent[key] = d
            self.outbox[key] = (text, seal)
            self.tell(ev.Sealed(index, seal.sequence, text))

        self.mail.append(sealed)

    # --- the syncer --------------------------------------------------------------------------------------------

    def serve(self, event: ev.OuterEvent) -> list[fx.OuterEffect]:
        """Hand ``event`` to the syncer; its outer steps are done at once, what it tells goes on its way."""
        effects = self.syncer.handle(event)
        for effect in list(effects):
            if isinstance(effect, fx.StartOuterStep):
                self.outer_step(effect)
            elif isinstance(effect, fx.TellFate):
                self.post(ev.FateTold(effect.fate))
            elif isinstance(effect, fx.PublishVersion):
                self.post(ev.VersionPublished(self.syncer.machine.state.epoch, effect.fragment, effect.version, 0, 0))
            elif isinstance(effect, fx.AnnounceFinal):
                self.post(ev.FinalAnnounced(effect.ending))
        return effects

    def outer_step(self, step: fx.StartOuterStep) -> None:
        if self.chance(0.05):
            self.serve(ev.OuterStepFailed(step.fragment, step.version))
            return
        (part,) = step.contributions
        assert part.weight == 1
        merged = sum(self.payloads[update.digest] for update in part.updates)
        self.published[step.fragment].append(self.published[step.fragment][-1] - merged)
        self.serve(ev.OuterStepDone(step.fragment, step.version, f"v{step.version}", ""))

    def restart_syncer(self) -> None:
        machine = self.syncer.machine
        self.syncer.machine = OuterSync.restore(self.syncer.options, through_json(machine.snapshot()))
        self.serve(ev.SyncerStarted(machine.state.epoch + 1))
        self.join()

    def join(self) -> None:
        """Ask to join, one time after the other; the answer is written now and arrives some time."""
        self.join_again = self.joining
        if self.joining:
            return
        self.joining = True
        state = self.syncer.machine.state
        answer = only(fx.AnswerJoin, self.serve(ev.JoinRequested(1, "a", f"p{self.processes}")))
        assert answer.reason is None, answer
        event = ev.JoinAnswered(state.epoch, answer.incarnation, answer.standings, 0, 0, answer.ending)

        def arrive() -> None:
            self.joined, self.joining = True, False
            self.tell(event)
            if self.join_again:
                self.join()

        self.mail.append(arrive)

    def post(self, event: ev.LearnerEvent) -> None:
        """Over Watch: whatever the site may miss, it learns with the next fetch or join."""
        if not self.chance(0.2):
            self.mail.append(lambda: self.tell(event))

    def push(self, index: int, sequence: int) -> None:
        found = [sent for sent in self.machine.state.fragments[index].in_flight if sent.sequence == sequence]
        if not found or found[0].state != "sealed":
            self.couriers.discard((index, sequence))  # The courier asked whether the update is still wanted.
            return
        text, seal = self.outbox[index, sequence]
        d = self.sent[index, sequence]
        again = lambda: self.push(index, sequence)  # noqa: E731
        update = self.syncer.update(
            "a",
            sequence,
            fragment=index,
            incarnation=self.machine.state.incarnation,
            base_version=seal.base_version,
            tokens=seal.tokens,
            steps=seal.steps,
            cursor=seal.cursor,
            digest=text,
            final=seal.final,
            finite=not self.chance(0.05),
        )
        self.payloads[text] = d
        answer = of(fx.AnswerPush, self.serve(update))[0]
        if answer.outcome is Outcome.RETRY or self.chance(0.2):
            self.mail.append(again)  # Or the answer was lost, and the update is sent again.
        else:
            self.mail.append(lambda: self.answered(ev.PushAnswered(index, sequence, answer.outcome, answer.reason)))

    def answered(self, event: ev.PushAnswered) -> None:
        self.couriers.discard((event.fragment, event.sequence))
        self.tell(event)

    def fetch(self, index: int) -> None:
        """Values and fates are read at one instant; the answer arrives some time."""
        version = len(self.published[index]) - 1
        fates = tuple(self.syncer.machine.state.sites["a"].lines[index].fates)
        value = self.published[index][version]

        def arrive() -> None:
            self.values[index, version] = value
            self.tell(ev.VersionFetched(index, version, fates))

        failed = self.chance(0.1)
        self.mail.append((lambda: self.tell(ev.FetchFailed(index))) if failed else arrive)
