"""The threads of a site that move bytes, beside training: ``Sender`` sends, ``Fetcher`` fetches, ``Listener`` listens.

Each is a loop that takes work, makes one attempt at a time, waits with capped jittered back-off in between, and ends
when ``stopping`` is set.  None of them ever gives up on a syncer that is away (DESIGN section 5, "Waiting").

Link.  ``LinkMeter`` measures how fast a site's link is by the calls that the site makes anyway.  ``LinkUse`` chooses
what the site sends by (codec, connections, overlap); measurement and choice are in one place, and are reported from
there.

Prefetch.  ``Ahead`` asks for a version before it is there, so that it sets out for the site at the moment at which it
is made.  Otherwise a round costs one round trip more: the syncer tells that there is a version, and is then asked for
it.  A failure here costs nothing, for the site asks once more when it is told of the version.

Decoding.  ``Incoming`` takes versions of one fragment on their way in: the bytes, and the values that are made of them
while they come.

Joining.  ``Joiner`` joins the run: the first time with a bound, and again whenever the syncer was away.
"""

from __future__ import annotations

import contextlib
import queue
import random
import secrets
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Protocol

from diloco.codec import native
from diloco.codec.base import DecodeError
from diloco.codec.registry import make_codec
from diloco.codec.site_pass import Arriving, follow_into
from diloco.learner.options import JoinFailed
from diloco.learner.seal import Participant
from diloco.sync.events import (
    FateTold,
    FinalAnnounced,
    JoinAnswered,
    Outcome,
    OverlapChosen,
    PushAnswered,
    Reason,
    VersionFetched,
    VersionPublished,
)
from diloco.sync.link import Adapter, LinkEstimator, RoundTimes
from diloco.wire.channel import Backoff
from diloco.wire.messages import Dropped, JoinAsk, LinkInfo, Published, PullAsk, Refused, Status, Unreachable
from diloco.wire.pulling import Patience, PullSink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from diloco.codec.base import Codec
    from diloco.codec.buffers import Buffers
    from diloco.learner.outbox import Outbox
    from diloco.learner.seal import Encoder
    from diloco.outer.fragments import Layout
    from diloco.sync.agreement import Agreement
    from diloco.sync.events import LearnerEvent
    from diloco.sync.link import AdaptOptions, LinkEstimate
    from diloco.wire.client import SyncClient, WatchStream
    from diloco.wire.messages import JoinReply, PullHeader, PushHeader, PushResult, WatchEvent
    from diloco.wire.pulling import PulledVersion


class LinkMeter:
    """Stands beside a client and takes the time of its calls.  Any thread may ask; each direction has one thread.

    A call that raises measures nothing: it says how long one waited, and not how fast the link is.
    """

    def __init__(self, client: SyncClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._estimator = LinkEstimator()

    def read(self) -> LinkEstimate:
        """What is known of the link by now."""
        with self._lock:
            return self._estimator.estimate()

    @contextmanager
    def control(self) -> Iterator[None]:
        """Around a small call."""
        began_ns = time.monotonic_ns()
        yield
        with self._lock:
            self._estimator.answered(time.monotonic_ns() - began_ns)

    @contextmanager
    def up(self) -> Iterator[None]:
        """Around one attempt to push."""
        began_ns, before = time.monotonic_ns(), self._client.bytes_up
        yield
        with self._lock:
            self._estimator.carried_up(self._client.bytes_up - before, time.monotonic_ns() - began_ns)

    @contextmanager
    def down(self) -> Iterator[None]:
        """Around one attempt to pull."""
        began_ns, before = time.monotonic_ns(), self._client.bytes_down
        yield
        with self._lock:
            self._estimator.carried_down(self._client.bytes_down - before, time.monotonic_ns() - began_ns)

    def came(self, count: int, seconds: float) -> None:
        """So many bytes were waited for at the syncer, and came in ``seconds`` once they were there."""
        with self._lock:
            self._estimator.carried_down(count, int(seconds * 1e9), round_trips=0)


class LinkUse:
    """``codec`` is asked by whoever seals, one at a time; ``info`` by anybody."""

    def __init__(
        self,
        client: SyncClient,
        options: AdaptOptions,
        emit: Callable[[str, dict[str, object]], None],
        tell: Callable[[LearnerEvent], None],
    ) -> None:
        """``tell`` takes what the machine is to know of a choice."""
        self.link = LinkMeter(client)
        self._rounds = RoundTimes()
        self._tell = tell
        self._client = client
        self.codecs = tuple(way.codec for way in options.ways)
        """All that may be chosen, the configured one first."""
        self._emit = emit
        self._adapter = Adapter(options)

    def begin(self) -> None:
        """The machine is there to be told what one begins with."""
        self._tell(OverlapChosen(self._adapter.choice.overlap_steps))

    def heard(self, event: LearnerEvent) -> None:
        """One of the site's events; they come one at a time."""
        self._rounds.heard(event, time.monotonic_ns())

    def codec(self, step_ns: int) -> str:
        """Of an update that is sealed now, where an inner step takes ``step_ns``; a change is told once.

        A change of connections counts from the next transfer on, one of the overlap from the next seal on; what is
        under way goes on as it began.
        """
        before = self._adapter.choice
        choice = self._adapter.choose(self.link.read(), step_ns, self._rounds.usual_ns())
        if choice != before:
            self._client.use_channels(choice.channels)
            self._tell(OverlapChosen(choice.overlap_steps))
            self._emit("adapted", asdict(choice))
        return choice.codec

    def info(self, step_ns: int) -> LinkInfo:
        """For a heartbeat."""
        found, choice = self.link.read(), self._adapter.choice
        return LinkInfo(
            found.rtt_ns,
            found.up_bytes_per_s,
            found.down_bytes_per_s,
            choice.codec,
            choice.channels,
            self._adapter.exchange_steps(found, step_ns, self._rounds.usual_ns()),
            choice.why,
            self._rounds.usual_ns(),
            choice.overlap_steps,
        )


WAIT_S = 60.0
"""A round that takes longer is not much longer by a round trip."""
END_S = 5.0


class Ahead:
    """One pull that waits, in a thread of its own from ``begin`` to ``take``; both are for any thread."""

    def __init__(self, client: SyncClient, ask: PullAsk, sink: PullSink) -> None:
        self.ask = ask
        self._client = client
        self._sink = sink
        self._patience = Patience(WAIT_S)
        self._pulled: PulledVersion | None = None
        self.carried_s = 0.0
        """How long the version took to come, once it was there."""
        self._thread = threading.Thread(target=self._run, name="pull-ahead", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._pulled = self._client.pull(self.ask, self._sink, self._patience)
        except (Refused, Unreachable):
            return
        self.carried_s = self._patience.carried_s

    @property
    def is_alive(self) -> bool:
        """Whether its thread has not ended."""
        return self._thread.is_alive()

    @property
    def over(self) -> bool:
        """Whether it waits no more and brings nothing."""
        return not self.is_alive and (self._pulled is None or not self._pulled.parts)

    def take(self) -> PulledVersion | None:
        """The version, which is known to be there by now; None when it has to be asked for."""
        self._patience.due()
        self._thread.join()
        return self._pulled if self._pulled is not None and self._pulled.parts else None

    def end(self) -> None:
        """Wait until the thread has ended, as it does once the client is closed."""
        self._thread.join(END_S)


class Versions(Protocol):
    """The latest version of each fragment that is here, flat fp32 on the host, and memory for the next."""

    layout: Layout
    buffers: Buffers
    latest: list[tuple[int, Tensor] | None]


class Incoming:
    """What comes into ``sink``, and nowhere else, by one pull at a time."""

    def __init__(self, fragment: int, tensors: Versions) -> None:
        self.sink = PullSink(begun=self._begun, broken=self._broken)
        self._fragment = fragment
        self._tensors = tensors
        self._arriving: Arriving | None = None
        self._working = threading.Lock()

    def _begun(self, header: PullHeader, payload: memoryview) -> Callable[[int], None] | None:
        """A payload begins: made into values as it comes where it is one, and of what is known."""
        self._arriving, held = None, self._held(header)
        if held is None or len(header.part_bytes) != 1:
            return None
        try:
            codec = _codec(header)
        except ValueError:
            return None  # Said in its place.
        values = self._tensors.buffers.values(header.numel)
        arriving = self._arriving = Arriving(held, payload, codec, values, header.digest)

        def come(count: int) -> None:
            if self._working.acquire(blocking=False):  # Else another stream's thread is at it, and this one goes on.
                try:
                    arriving.come(count)
                finally:
                    self._working.release()

        return come

    def _broken(self) -> None:
        """Until the pull is resumed only what came is kept, and no values: those are then made at its end."""
        self._arriving = None

    def values(self, pulled: PulledVersion) -> Tensor | None:
        """The values that were pulled; None when these bytes do not give the ones whose digest was told."""
        arriving, self._arriving = self._arriving, None
        header, held = pulled.header, self._held(pulled.header)
        try:
            if arriving is not None and arriving.held is held:
                with self._working:
                    values, found = arriving.out, arriving.finish()
            elif header.numel == self._numel and (held is not None or header.whole):
                values = self._tensors.buffers.values(header.numel)
                before = held if held is not None else values
                found = follow_into(before, pulled.parts, _codec(header), values, header.digest)
            else:
                return None
        except DecodeError:
            return None
        return values if found == header.digest else None

    @property
    def _numel(self) -> int:
        return self._tensors.layout.fragments[self._fragment].numel

    def _held(self, header: PullHeader) -> Tensor | None:
        """The values that the payload of ``header`` is the difference to, if they are here."""
        latest = self._tensors.latest[self._fragment]
        fits = latest is not None and not header.whole and latest[0] == header.from_version
        return latest[1] if latest is not None and fits and header.numel == self._numel else None


def _codec(header: PullHeader) -> Codec:
    return make_codec("fp32" if header.whole else header.encoding)


LOOK_S = 0.1
MALFORMED_MAX = 3
"""Times that the syncer may find one update unreadable (bytes may change on the way) before the site stops in words."""


CAP_S = 3.0
CHOICE_CAP_S = 0.5
"""Where a standby may take over at any moment, all addresses are asked so often: it is what a failover costs a site."""


class Pause:
    """Back-off that ends early when the agent stops, and when another syncer than before has taken the site in."""

    def __init__(self, participant: Participant, cap_s: float = CAP_S) -> None:
        self._participant = participant
        self._backoff = Backoff(base_s=0.2, cap_s=cap_s)

    def wait(self, at_least_s: float | None = None) -> None:
        """Wait after one more failure."""
        own, left_s = self._participant, self._backoff.next_s(random.random(), at_least_s or 0.0)
        epoch, until = own.epoch, time.monotonic() + left_s
        while left_s > 0 and own.epoch == epoch and not own.stopping.wait(min(left_s, LOOK_S)):
            left_s = until - time.monotonic()

    def reset(self) -> None:
        """Something worked."""
        self._backoff.reset()


@dataclass(slots=True)
class Later:
    """An update that the syncer did not want yet: sent again at ``until``, or when ``epoch`` is over."""

    backoff: Backoff
    until: float = 0.0
    epoch: int = 0


class Sender:
    """Sends sealed updates, each until its definite answer."""

    def __init__(
        self,
        participant: Participant,
        client: SyncClient,
        link: LinkMeter,
        outbox: Outbox,
        expect: Callable[[int], None],
    ) -> None:
        """``expect`` is told of a fragment whose update is about to be sent: a version of it is next."""
        self._participant, self._client, self._link, self._outbox = participant, client, link, outbox
        self._expect = expect
        self.queue: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._later: dict[tuple[int, int], Later] = {}

    def run(self) -> None:
        """The thread; None in the queue ends it.  What the syncer wants later waits aside and holds back nothing."""
        while (order := self._next()) is not None:
            if self._deliver(*order):
                self._later.pop(order, None)
            else:
                later = self._later.setdefault(order, Later(Backoff(base_s=0.2, cap_s=CAP_S)))
                later.until = time.monotonic() + later.backoff.next_s(random.random())
                later.epoch = self._participant.epoch

    def _next(self) -> tuple[int, int] | None:
        while True:
            now, epoch = time.monotonic(), self._participant.epoch
            for order, later in self._later.items():
                if now >= later.until or later.epoch != epoch:
                    return order
            with contextlib.suppress(queue.Empty):
                return self.queue.get(timeout=LOOK_S if self._later else None)

    def _deliver(self, fragment: int, sequence: int) -> bool:
        """Send one update until its answer; False when the syncer wants it later."""
        own, malformed = self._participant, 0
        pause = Pause(own)
        while not own.stopping.is_set():
            found = self._found(fragment, sequence)
            if found is None:
                return True
            header, payload = found
            self._expect(fragment)
            try:
                with self._link.up():
                    result = self._client.push(header, payload)
            except Unreachable as error:
                pause.wait(error.retry_after_s)
                continue
            except Refused as error:
                # Not an answer to this update but to this caller: what the syncer says at a join is clearer.
                malformed = malformed + 1 if error.status is Status.INVALID_ARGUMENT else 0
                if malformed >= MALFORMED_MAX:
                    own.give_up(f"the syncer cannot read update {sequence} of fragment {fragment}: {error.text}")
                    return True
                own.rejoin(f"a push was refused: {error.text}")
                pause.wait()
                continue
            facts: dict[str, object] = {"fragment": fragment, "sequence": sequence, "outcome": result.outcome.value}
            reason = result.reason.value if result.reason else None
            own.emit("pushed", {**facts, "reason": reason, "bytes": len(payload)})
            if result.outcome is Outcome.RETRY:
                return False  # What it waits for may stand behind it here.
            self._answered(header, result)
            return True
        return True

    def _found(self, fragment: int, sequence: int) -> tuple[PushHeader, memoryview] | None:
        """The update as it is in the outbox, if it is still the one that waits for an answer.

        A number that was refused is given again, and an order to send can outlive what it was given for.  So can all of
        it, where the run was restored: the lineage that it is sent in was asked for first.
        """
        own = self._participant
        lineage, wanted = own.lineage, own.wanted(fragment, sequence)
        if wanted is None:
            return None
        try:
            mine = (fragment, sequence, own.incarnation)
            header, payload = self._outbox.fresh(*mine) or self._outbox.get(*mine)
        except FileNotFoundError:
            if own.wanted(fragment, sequence) == wanted:
                raise
            return None  # A join or a fate has answered it at this very moment.
        return (replace(header, lineage=lineage), payload) if header.digest == wanted else None

    def _answered(self, header: PushHeader, result: PushResult) -> None:
        answer = (result.outcome, result.reason, header.digest, result.epoch)
        self._participant.tell(PushAnswered(header.fragment, header.sequence, *answer))
        if result.fate is not None and not 0 < result.epoch < self._participant.epoch:
            self._participant.tell(FateTold(result.fate))


class Fetcher:
    """Fetches versions and brings them to what the site holds."""

    def __init__(self, participant: Participant, client: SyncClient, link: LinkMeter, site_tensors: Versions) -> None:
        self._participant, self._client, self._link, self._tensors = participant, client, link, site_tensors
        self._incoming: dict[int, tuple[int, Incoming]] = {}
        self._lock = threading.Lock()
        self._ahead: tuple[int, Ahead] | None = None  # With its lineage.
        self._begun: list[Ahead] = []  # Those that may still work.
        self._at: int | None = None
        self.queue: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def run(self) -> None:
        """The thread; None in the queue ends it."""
        while (fragment := self.queue.get()) is not None:
            with self._lock:
                self._at = fragment
            self._fetch(fragment)
            self._at = None
        with self._lock:
            begun = self._begun
        for ahead in begun:  # torch aborts a process that ends while another thread of it is inside an operation.
            ahead.end()

    def expect(self, fragment: int) -> None:
        """There will soon be a version of ``fragment``: from now on one waits for it at the syncer.

        For one fragment at a time, and any thread; it never fails, and nothing hangs on it.
        """
        with self._lock:
            own = self._participant
            lineage, latest = own.lineage, self._tensors.latest[fragment]
            waits = self._ahead is not None and not self._ahead[1].over
            ends = own.stopping.is_set()
            if ends or waits or latest is None or self._at == fragment or not self._client.has_patience:
                return
            ask = PullAsk(own.run_id, own.site_id, fragment, latest[0])
            ahead = Ahead(self._client, ask, self._of(fragment, lineage).sink)
            self._ahead = (lineage, ahead)
            self._begun = [*(each for each in self._begun if each.is_alive), ahead]

    def _expected(self, fragment: int, lineage: int, have: int) -> PulledVersion | None:
        """What was asked for ahead, if it is this."""
        with self._lock:
            if self._ahead is None or self._ahead[1].ask.fragment != fragment:
                return None
            (of, ahead), self._ahead = self._ahead, None
            if of != lineage or ahead.ask.have_version != have:
                self._incoming.pop(fragment, None)  # It writes to it.
                return None
        if (pulled := ahead.take()) is not None:
            self._link.came(pulled.header.payload_bytes, ahead.carried_s)
        return pulled

    def _fetch(self, fragment: int) -> None:
        own = self._participant
        pause = Pause(own)
        lineage = own.lineage  # Asked first: what is read after it may be of a later one, never of an earlier.
        latest = self._tensors.latest[fragment]
        have = latest[0] if latest is not None else -1
        here = self._expected(fragment, lineage, have)
        incoming = self._of(fragment, lineage)
        # Once the run was restored another order is in the queue, and this one leads nowhere.
        while not own.stopping.is_set() and own.lineage == lineage:
            ask = PullAsk(own.run_id, own.site_id, fragment, have)
            try:
                pulled, here = here or self._pull(ask, incoming.sink), None
            except (Unreachable, Refused) as error:
                pause.wait(getattr(error, "retry_after_s", None))
                continue
            values = incoming.values(pulled)
            incoming.sink.give_back(pulled)
            if values is None:
                # Whatever went wrong on the way here or there, the whole fragment puts it right, and it is said.
                why = f"fragment {fragment}: what came is not version {pulled.header.version}"
                own.emit("note", {"note": "digest_differs", "why": f"{why}; fetching it whole"})
                if pulled.header.whole:
                    pause.wait()
                have = -1
                continue
            if pulled.header.version <= have:
                pause.wait()  # We were told of a newer one that the syncer does not have: do not ask without end.
            facts: dict[str, object] = {"fragment": fragment, "version": pulled.header.version, "had": have}
            own.emit("fetched", {**facts, "bytes": pulled.header.payload_bytes, "whole": pulled.header.whole})
            event = VersionFetched(fragment, pulled.header.version, pulled.header.fates)
            own.keep_fetched(values, event, lineage, pulled.header)
            return

    def _pull(self, ask: PullAsk, sink: PullSink) -> PulledVersion:
        with self._link.down():
            return self._client.pull(ask, sink)

    def _of(self, fragment: int, lineage: int) -> Incoming:
        """What has arrived of a pull that broke off, if it is of this lineage."""
        known = self._incoming.get(fragment)
        if known is None or known[0] != lineage:
            known = self._incoming[fragment] = (lineage, Incoming(fragment, self._tensors))
        return known[1]


class Joining(Participant, Protocol):
    """A participant that joins by itself: rank 0 of a site, or a region."""

    @property
    def left(self) -> bool:
        """Whether goodbye is said: another join would take it back."""

    def join(self) -> None:
        """One attempt; raises ``Unreachable`` or ``Refused``."""


class Listener:
    """Follows the Watch stream; joins again whenever it breaks, and when it is asked to."""

    def __init__(self, participant: Joining, client: SyncClient) -> None:
        self._participant, self._client = participant, client
        self._stream: WatchStream | None = None
        self._join_wanted = threading.Event()
        self._refused = ""
        self.connected = False

    def run(self) -> None:
        """The thread.  The first join was made before it starts, unless the site trains on without."""
        own = self._participant
        pause = Pause(own, CHOICE_CAP_S if self._client.has_choice else CAP_S)
        joined = own.incarnation > 0
        while not own.stopping.is_set():
            try:
                if self._join_wanted.is_set() or not joined:
                    self._join_wanted.clear()
                    if not own.left:
                        own.join()
                joined = True
                self._listen(pause)
                why = "the stream ended"
            except Unreachable as error:
                why = error.why
                self._say_once(error.refused)
            except Refused as error:
                why = error.text
                self._say_once(why)
                if error.final and not own.left:
                    own.give_up(why)
                    return
            joined = False
            if self.connected:
                self.connected = False
                own.emit("disconnected", {"why": why})
            pause.wait()

    def _say_once(self, refused: str) -> None:
        """Say what the site is refused for, until it is connected again or refused for something else."""
        if refused and refused != self._refused:
            self._refused = refused
            self._participant.emit("note", {"note": "join_refused", "why": refused})

    def _listen(self, pause: Pause) -> None:
        with self._client.watch(self._participant.incarnation) as stream:
            self._stream = stream
            # Asked after the stream is known to ``wake``, so that a word from before it is not lost.
            if self._join_wanted.is_set() or self._participant.stopping.is_set():
                return
            for event in stream:
                if not self.connected:
                    self.connected = True
                    self._refused = ""
                    pause.reset()
                    self._participant.emit("connected", {})
                self._take(event)
                if self._participant.stopping.is_set():
                    return

    def _take(self, event: WatchEvent) -> None:
        if isinstance(event, Published):
            run = (event.run_tokens, event.progress_ppm, event.lineage, event.fastest_step_ns)
            self._participant.tell(VersionPublished(event.epoch, event.fragment, event.version, *run))
        elif isinstance(event, FateTold | FinalAnnounced):
            self._participant.tell(event)
        elif isinstance(event, Dropped):
            if event.reason is Reason.SUPERSEDED:
                self._participant.give_up("another process now speaks for this site: is it started twice?")
            else:
                self._participant.give_up(f"the syncer ended this site's part: {event.reason.value}")

    def wake(self) -> None:
        """End the present stream, so that the site joins again (or notices that it is stopping)."""
        self._join_wanted.set()
        if self._stream is not None:
            self._stream.cancel()


class Joiner:
    """One process of a site at the syncer's door; it has one name there as long as it lives."""

    def __init__(
        self, participant: Joining, client: SyncClient, agreement: Agreement, layout: Layout, encodes: Encoder
    ) -> None:
        """``encodes`` is the encoder that a site uses, as the log says it."""
        self._participant, self._client, self._agreement, self._layout = participant, client, agreement, layout
        self._encodes, self._process = encodes, secrets.token_hex(8)

    def attempt(self) -> tuple[JoinReply, JoinAnswered]:
        """One attempt, with the machine's event of the answer; raises ``Unreachable`` or ``Refused``."""
        own, agreement = self._participant, self._agreement
        ask = JoinAsk(
            agreement.protocol,
            agreement.run_id,
            own.lineage,
            own.site_id,
            self._process,
            agreement.layout_fingerprint,
            self._layout.to_json().encode(),
            agreement.shared,
        )
        reply = self._client.join(ask, own.epoch)
        versions = [standing.version for standing in reply.standings]
        facts: dict[str, object] = {"incarnation": reply.incarnation, "epoch": reply.epoch, "versions": versions}
        how = {"syncer": self._client.address, "kernels": native.description(), "encodes": str(self._encodes)}
        own.emit("joined", {**facts, **how})
        return reply, JoinAnswered(
            reply.epoch,
            reply.incarnation,
            reply.standings,
            reply.run_tokens,
            reply.progress_ppm,
            reply.ending,
            reply.lineage,
            reply.settings.keep_until_decided,
        )

    def first(self, until: float) -> None:
        """Join, and try until the instant ``until``, or until the site stops; ``JoinFailed`` says why it failed."""
        own = self._participant
        pause = Pause(own)
        said = ""
        while True:
            try:
                return own.join()
            except Refused as error:
                mismatch = error.status is Status.FAILED_PRECONDITION
                raise JoinFailed("mismatch" if mismatch else "refused", error.text) from error
            except Unreachable as error:
                if error.refused and error.refused != said:
                    said = error.refused
                    own.emit("note", {"note": "join_refused", "why": error.why})
                if time.monotonic() >= until:
                    raise JoinFailed("refused" if error.refused else "unreachable", error.why) from error
                pause.wait(error.retry_after_s)
                if own.stopping.is_set():
                    raise JoinFailed("unreachable", f"the site is stopping; last: {error.why}") from error
