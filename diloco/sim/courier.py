"""What a site does on the network, beside its training: join, report, send, fetch, say goodbye.

Every request has a deadline and is asked again after a back-off, capped and jittered, for ever; the answer to a request
that was given up is thrown away.  When reports go unanswered the connection is given up and the site joins again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.sim import values
from diloco.sim.messages import Feed, JoinReply, Pulled, Push, PushReply
from diloco.sim.network import MILLISECOND_NS, Direction
from diloco.sim.outer_process import OuterProcess
from diloco.sync.effects import AnswerUnits, DropSite, Fetch
from diloco.sync.events import (
    FateTold,
    FetchFailed,
    LearnerEvent,
    Outcome,
    PushAnswered,
    Reason,
    UnitsTold,
    VersionFetched,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from diloco.sim.site_process import Key, SiteProcess
    from diloco.sim.standby_process import StandbyProcess

CALL_DEADLINE_NS = 1500 * MILLISECOND_NS
BACKOFF_FIRST_NS = 100 * MILLISECOND_NS
BACKOFF_MAX_NS = 1600 * MILLISECOND_NS
REPORTS_MISSED_MAX = 2
GOODBYES_MAX = 4
EARLY_MAX = 64


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """An agreed connection to one life of the syncer."""

    outer: OuterProcess
    incarnation: int


@dataclass(slots=True)
class Call:
    """A request that waits for its answer, or for its deadline, whichever is first."""

    open: bool = True


class Courier:
    """The network work of one learner process."""

    def __init__(
        self, process: SiteProcess, syncers: Sequence[Callable[[], OuterProcess | StandbyProcess | None]]
    ) -> None:
        """``syncers``: whoever answers at each address that the site was given."""
        self.process = process
        self.session: Session | None = None
        self._syncers, self._at = syncers, 0
        self._tasks: dict[Key, Session] = {}
        self._early: list[tuple[OuterProcess | StandbyProcess, LearnerEvent | None]] = []
        """What a stream told before the answer to the join that opened it was here; None: it broke."""
        self._missed = 0

    def forget(self, key: Key) -> None:
        """Stop sending an update."""
        self._tasks.pop(key, None)

    def _ask(
        self,
        request: Callable[[Callable[[object], None]], None],
        answered: Callable[[object], None],
        missed: Callable[[], None],
        deadline_ns: int = CALL_DEADLINE_NS,
    ) -> None:
        """Have ``request`` done there; exactly one of ``answered`` and ``missed`` happens, unless this process dies."""
        call = Call()

        def settle(action: Callable[[], None]) -> None:
            if call.open:
                call.open = False
                action()

        def reply(answer: object) -> None:
            self.process.link.send(
                Direction.DOWN, lambda: self.process.deliver(lambda: settle(lambda: answered(answer)))
            )

        self.process.link.send(Direction.UP, lambda: request(reply))
        self.process.heap.after(deadline_ns, lambda: self.process.deliver(lambda: settle(missed)))

    def later(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Do ``action`` after about ``delay_ns``: half of it to all of it."""
        jittered = int(delay_ns * (0.5 + self.process.random.random() / 2))
        self.process.heap.after(jittered, lambda: self.process.deliver(action))

    def join(self, backoff_ns: int, ticket: int = 0) -> None:
        """Ask one address after the other to take this process in, until one does; ``ticket`` is what the last gave."""

        process = self.process

        address = self._syncers[self._at]

        def request(reply: Callable[[object], None]) -> None:
            outer = address()
            if outer is None:
                return

            def feed(incarnation: int) -> Feed:
                return Feed(
                    incarnation,
                    process.link,
                    lambda what: process.deliver(lambda: self._told(outer, what)),
                    lambda: process.deliver(lambda: self._told(outer, None)),
                )

            outer.ask(
                lambda: outer.join(process.site, process.name, ticket, feed, lambda answer: reply((outer, answer)))
            )

        def again() -> None:
            self._at = (self._at + 1) % len(self._syncers)
            self.later(backoff_ns, lambda: self.join(min(2 * backoff_ns, BACKOFF_MAX_NS)))

        self._ask(request, lambda answer: self._joined(answer, again), again)

    def _joined(self, answer: object, again: Callable[[], None]) -> None:
        assert isinstance(answer, tuple)
        outer, reply = answer
        assert isinstance(reply, JoinReply)
        if reply.answered is None:
            if reply.ticket:
                self.join(BACKOFF_FIRST_NS, reply.ticket)
            elif reply.reason in (None, Reason.FULL):
                again()
            else:
                self.process.exit(f"join refused: {reply.reason}")
            return
        known = self.process.machine.state
        if (reply.answered.lineage, reply.answered.epoch) < (known.lineage, known.epoch):
            again()  # One that came back after another had taken its place.
            return
        assert isinstance(outer, OuterProcess)
        self.session = Session(outer, reply.answered.incarnation)
        self._missed = 0
        self._tasks.clear()
        session = self.session
        self.process.handle(reply.answered)
        self._report(session)
        early, self._early = self._early, []
        for there, what in early:
            if there is outer and self.process.alive:
                self._told(outer, what)

    def break_off(self) -> None:
        """Give the connection up and join again."""
        if self.session is not None:
            self.session = None
            self._tasks.clear()
            self.later(BACKOFF_FIRST_NS, lambda: self.join(BACKOFF_FIRST_NS))

    def _told(self, outer: OuterProcess | StandbyProcess, what: LearnerEvent | DropSite | None) -> None:
        if isinstance(what, DropSite):
            self.process.exit(f"dropped: {what.reason.value}")
        elif self.session is None:
            if len(self._early) < EARLY_MAX:
                self._early.append((outer, what))
        elif self.session.outer is not outer:
            pass  # The stream of a connection that was given up.
        elif what is None:
            self.break_off()
        else:
            self.process.handle(what)

    def _report(self, session: Session) -> None:
        """A sign of life every now and then; what is not answered twice means that the connection is broken."""

        def answered(answer: object) -> None:
            self._missed = 0
            assert isinstance(answer, tuple)
            known, told = answer
            if isinstance(told, AnswerUnits) and told.reason is None and self.session is session:
                self.process.handle(UnitsTold(told.first, told.pieces))
            elif not known and self.session is session:
                self.break_off()

        def missed() -> None:
            self._missed += 1
            if self._missed >= REPORTS_MISSED_MAX and self.session is session:
                self.break_off()

        if self.session is session and self.process.alive:
            outer, ask = session.outer, self.process.units_wanted()
            self._ask(
                lambda reply: outer.ask(lambda: outer.report(self.process.site, session.incarnation, ask, reply)),
                answered,
                missed,
            )
            self.process.heap.after(
                self.process.plan.report_ns, lambda: self.process.deliver(lambda: self._report(session))
            )

    def send(self, key: Key) -> None:
        """Send an update until there is a definite answer; after a break the machine asks for it again."""
        if self.session is not None and key not in self._tasks:
            self._tasks[key] = self.session
            self._attempt(key, self.session, BACKOFF_FIRST_NS)

    def _attempt(self, key: Key, session: Session, backoff_ns: int) -> None:
        stored = self.process.disk.outbox.get(key)
        if self._tasks.get(key) is not session or stored is None:
            return
        seal = stored.seal
        push = Push(
            self.process.site,
            session.incarnation,
            *key,
            seal.base_version,
            seal.tokens,
            seal.steps,
            seal.step_ns,
            seal.cursor,
            stored.digest,
            seal.final,
            stored.finite,
            stored.value,
            self.process.plan.transfer_ns,
            stored.norm,
            stored.cosine,
            seal.spans,
        )

        def again() -> None:
            self.later(backoff_ns, lambda: self._attempt(key, session, min(2 * backoff_ns, BACKOFF_MAX_NS)))

        self._ask(
            lambda reply: session.outer.ask(lambda: session.outer.push(push, reply)),
            lambda answer: self._pushed(key, session, stored.digest, answer, again),
            again,
            CALL_DEADLINE_NS + self.process.plan.transfer_ns,
        )

    def _pushed(self, key: Key, session: Session, digest: str, answer: object, again: Callable[[], None]) -> None:
        assert isinstance(answer, PushReply)
        if self._tasks.get(key) is not session:
            return
        if answer.outcome is Outcome.RETRY:
            again()
            return
        del self._tasks[key]
        self.process.handle(PushAnswered(*key, answer.outcome, answer.reason, digest))
        if answer.fate is not None and self.process.alive:
            self.process.handle(FateTold(answer.fate))

    def fetch(self, effect: Fetch) -> None:
        """Ask once for a newer version."""
        index, lineage = effect.fragment, self.process.machine.state.lineage

        def current() -> bool:
            """Otherwise the machine has started over and asked again."""
            return self.process.machine.state.lineage == lineage

        def failed() -> None:
            self.later(BACKOFF_FIRST_NS, lambda: self.process.handle(FetchFailed(index)) if current() else None)

        def answered(answer: object) -> None:
            if isinstance(answer, Pulled) and current():
                self._fetched(index, answer)
            else:
                failed()

        session = self.session
        if session is None:
            failed()
        else:
            outer = session.outer
            self._ask(
                lambda reply: outer.ask(lambda: outer.pull(self.process.site, index, effect.have_version, reply)),
                answered,
                failed,
            )

    def _fetched(self, index: int, pulled: Pulled) -> None:
        """Follow the down-links from what is here, or take the whole values."""
        if pulled.whole:
            value = pulled.parts[0]
        else:
            _, value = self.process.arrived.get(index, self.process.base[index])
            for link in pulled.parts:
                value = values.plus(value, link)
        self.process.checkers.fetched(self.process, index, pulled.version, value)
        self.process.arrived[index] = (pulled.version, value)
        self.process.handle(VersionFetched(index, pulled.version, pulled.fates))

    def leave(self, tries: int) -> None:
        """Say goodbye and end; without a word after as many ``tries``."""
        session = self.session
        if tries == 0:
            self.process.exit("left without a word")
            return
        if session is None:
            self.later(BACKOFF_MAX_NS, lambda: self.leave(tries - 1))
            return
        self._ask(
            lambda reply: session.outer.ask(lambda: session.outer.leave(self.process.site, session.incarnation, reply)),
            lambda _: self.process.exit("left"),
            lambda: self.leave(tries - 1),
        )
