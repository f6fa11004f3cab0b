"""A standby on the network, and how it comes to lead: by itself as the heir of a lease that ran out, or by an operator.

Succession.  With a lease a thread looks at it all the time.  An heir has everything that any site was told, so it takes
the lease as soon as the holder has let it run out, without being asked.  Any other standby takes over by an operator's
word only (``lossy``), once no process holds the lease; what it lacks is given up, and so a new lineage begins with what
it has.

Without a lease the operator's word alone decides, and the standby says what it knows against it: that the syncer is
still there, or may have told what the standby lacks.  ``lossy`` is the answer to both, because a new lineage fences
either.  Nothing watches a standby whose thread has died, so any failure that is none of the lease's ends the standby,
in words.

Answers.  Before it is promoted a standby tells how it stands (``StandbyApi``), and sends every other caller elsewhere.

Process.  ``StandingBy`` follows, says how it stands, and makes room for a syncer when it is to take over.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from diloco.durable import is_full
from diloco.sync.leadership import may_take_over
from diloco.sync.members import next_lineage
from diloco.syncer.api import probed
from diloco.syncer.lease import LeaseError, claim_of, try_to_lead
from diloco.syncer.restoring import begin_lineage
from diloco.syncer.standby import StandbyError
from diloco.wire.messages import Refusal, Status
from diloco.wire.server import serve

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco.sync.leadership import Standing
    from diloco.syncer.lease import Lease, LeaseHolder
    from diloco.syncer.standby import Standby, Warm
    from diloco.wire.identity import Identity
    from diloco.wire.messages import ProbeAnswer, ProbeAsk
    from diloco.wire.options import SecurityOptions, ServerOptions
    from diloco.wire.server import RunningServer

LOOK_SHARE = 1 / 20
LOSSY = "an operator promoted {name}, which may have lacked what was acknowledged before"


class Succession:
    """Use: ``start`` when the standby has started; ``hand_over`` what it gives when it is promoted; ``stop`` always."""

    def __init__(self, standby: Standby, lease: Lease | None, on_taken: Callable[[], None]) -> None:
        """``on_taken`` is called in the thread that looks, when the lease is taken: the standby must take over now."""
        self._standby = standby
        self._lease = lease
        self._on_taken = on_taken
        self._leadership: LeaseHolder | None = None
        self._standing: Standing | None = None
        self._vacant = False
        self._trouble: str | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="succession", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        if self._lease is not None:
            self._thread.start()

    def stop(self) -> None:
        """Look no more.  A lease that was taken and not handed over is not given back: it runs out."""
        self._end()
        leadership, self._leadership = self._leadership, None
        if leadership is not None:
            leadership.stop(release=False)

    def _end(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def refusal(self, *, lossy: bool) -> str | None:
        """Why an operator's word to take over cannot be followed now; None when it can."""
        if self._lease is None:
            return None if lossy else self._unsafe()
        if self._trouble is not None or self._standing is None:
            return f"what the lease {self._lease.place} says is not known: {self._trouble or 'it was not read yet'}"
        standing, name = self._standing, self._standby.identity
        if not self._vacant:
            itself = ", and this standby takes over by itself then" if standing.heir == name else ""
            return (
                f"{standing.holder} holds the lease {self._lease.place}: stop it, or wait until it has run out{itself}"
            )
        if not lossy and name not in (standing.heir, standing.holder):
            return (
                f"{name} is not the heir of {standing.holder} and may lack what was acknowledged there: start that, "
                "or promote this one with --lossy, which begins a new lineage with what it has"
            )
        return None

    def _unsafe(self) -> str | None:
        """What speaks against going on in the same lineage on no more than a word."""
        lossy = "promote this one with --lossy, which begins a new lineage with what it has"
        if self._standby.still_hears():
            return (
                "the syncer that this standby follows is still heard: stop that first, so that never two lead; or "
                f"{lossy}, and what the other tells from then on is given up"
            )
        if (why := self._standby.may_lack()) is not None:
            return f"{why}, so that this standby may lack what was told: start that one again; or {lossy}"
        return None

    def hand_over(self, warm: Warm, *, lossy: bool) -> Warm:
        """What a syncer starts with: ``warm`` with the lease that was taken, or in a new lineage."""
        self._end()
        leadership, self._leadership = self._leadership, None
        if leadership is not None:
            return replace(warm, leadership=leadership)
        return begun_anew(warm, LOSSY.format(name=self._standby.identity), int(time.time())) if lossy else warm

    def status(self) -> dict[str, object] | None:
        """For ``diloco status``."""
        if self._lease is None:
            return None
        standing = self._standing
        return {
            "place": self._lease.place,
            "epoch": standing.epoch if standing is not None else 0,
            "holder": standing.holder if standing is not None else "",
            "is_heir": standing is not None and standing.heir == self._standby.identity,
            "vacant": self._vacant,
            "trouble": self._trouble,
        }

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        lease = self._lease
        assert lease is not None
        try:
            while not self._stopping.wait(lease.ttl_s * LOOK_SHARE):
                if self._look(lease):
                    self._on_taken()
                    return
        except Exception as error:
            text = f"nobody looks at the lease {lease.place} any more: {type(error).__name__}: {error}"
            self._standby.fail(StandbyError(text))

    def _look(self, lease: Lease) -> bool:
        """Whether the lease was there to be taken, and is taken."""
        try:
            self._standing = lease.read()
            self._vacant = lease.vacant()
            taken = self._taken(lease)
            self._trouble = None
            return taken
        except LeaseError as error:
            self._troubled(str(error))
        except OSError as error:
            if not is_full(error):
                raise
            self._troubled(f"disk full: {error.strerror}")  # Whether it was taken or not, it may be tried again.
        return False

    def _troubled(self, why: str) -> None:
        if self._trouble is None:
            self._standby.emit("note", {"note": "lease", "why": why})
        self._trouble = why

    def _taken(self, lease: Lease) -> bool:
        standby = self._standby
        state = standby.state()
        if state is None or not may_take_over(self._standing, standby.identity):
            return False  # Which is how most standbys begin.
        claim = claim_of(lease, standby.folder, standby.disk, state, by_itself=True)
        self._leadership = try_to_lead(lease, standby.folder, standby.disk, claim, standby.emit)
        return self._leadership is not None


def begun_anew(warm: Warm, why: str, clock_s: int) -> Warm:
    """``warm`` in a new lineage, which begins with its values as every fragment's next version."""
    machine, values = warm.machine, warm.holdings.values
    begin_lineage(warm.store, machine, values, None, why, next_lineage(machine.state.lineage, clock_s))
    fragments = machine.state.fragments
    published = [replace(each, version=now.version) for each, now in zip(values, fragments, strict=True)]
    warm.holdings.begin_again(published)
    return warm


class StandbyApi:
    """Satisfies ``wire.service.SyncerApi``.  ``promoted`` is set when an operator wants the standby to take over."""

    def __init__(self, standby: Standby, primary: str, succession: Succession) -> None:
        self._standby = standby
        self._succession = succession
        self._primary = primary
        self.promoted = threading.Event()
        self.lossy = False
        self.complaints: Callable[[], list[str]] = list
        """Which files of identities cannot be used, as whoever serves this knows it."""

    def elsewhere(self, *asked: object, **named: object) -> NoReturn:
        """Not here: only the syncer knows what it has told, and what it has told may not have come yet."""
        del asked, named
        raise Refusal(Status.UNAVAILABLE, f"this is the standby of {self._primary}: ask there")

    join = open_push = watch = pull = has_newer = report = leave = elsewhere
    drain = evict = readmit = admit = refuse = snapshot = detach = elsewhere

    def probe(self, ask: ProbeAsk, identity: Identity) -> ProbeAnswer:
        """A way that will count when this standby takes over."""
        del identity
        return replace(probed(self._standby.plan, ask), standby_of=self._primary)

    def status(self) -> dict[str, object]:
        """How the standby stands."""
        return {
            **self._standby.status(),
            "primary": self._primary,
            "lease": self._succession.status(),
            "identity_complaints": self.complaints(),
        }

    def promote(self, *, lossy: bool) -> None:
        """Take over, as soon as what has come is carried out."""
        if not self._standby.ready:
            raise Refusal(Status.FAILED_PRECONDITION, "this standby has no state to go on from yet")
        if (why := self._succession.refusal(lossy=lossy)) is not None:
            raise Refusal(Status.FAILED_PRECONDITION, why)
        self.lossy = lossy
        self.promoted.set()


ANSWER_S = 0.5
"""Who asked for the promotion is answered within that, before the address is given up."""


class StandingBy:
    """Use: ``start``, then ``wait`` until it gives what a syncer on the same address goes on with; ``stop`` always.

    The address is served from the start, so that a setting that cannot work shows before it is needed, and sites that
    come too early are told where to ask.
    """

    def __init__(
        self,
        standby: Standby,
        primary: str,
        network: ServerOptions,
        security: SecurityOptions,
        note: Callable[[str, str], None] = lambda what, why: None,
        lease: Lease | None = None,
    ) -> None:
        """``note`` is told what the server says of who may come in (``wire.server.serve``)."""
        self.standby = standby
        self._succession = Succession(standby, lease, lambda: self.api.promoted.set())
        self.api = StandbyApi(standby, primary, self._succession)
        self._network, self._security, self._note = network, security, note
        self._server: RunningServer | None = None

    def start(self) -> str:
        """Begin to follow, and to answer; the address."""
        self.standby.start()
        try:
            self._server = serve(self.api, self._network, self._security, self._note, ready=False)
        except BaseException:
            self.standby.close()
            raise
        self.api.complaints = self._server.complaints
        self._succession.start()
        return self._server.address

    def wait(self, timeout_s: float) -> Warm | None:
        """What the standby hands over once it is promoted: the address is free then.  None: not yet.

        Raises what ended the following early, if anything did.
        """
        promoted = self.api.promoted.wait(timeout_s)
        if self.standby.failed is not None:
            raise self.standby.failed
        if not promoted:
            return None
        self._end_answering()
        return self._succession.hand_over(self.standby.promote(), lossy=self.api.lossy)

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to stand by for: the run is over, and the syncer has stopped in order."""
        return self.standby.ended and not self.api.promoted.is_set()

    def stop(self) -> None:
        """Stop answering and following; what was handed over stays open."""
        self._end_answering()
        self._succession.stop()
        if not self.api.promoted.is_set():
            self.standby.close()

    def _end_answering(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.stop(ANSWER_S)
