"""The background threads of a site: ``Sealer`` encodes and writes updates, ``Sender`` pushes them, ``Fetcher`` pulls
versions, ``Listener`` joins and reads the Watch stream.  ``Participant`` owns them.

The network threads take work, make one attempt at a time, wait with capped jittered back-off in between, and end when
``stopping`` is set.  None of them ever gives up on a syncer that is away (DESIGN section 5, "Waiting").

Link.  The client measures the speed of a site's link from the calls that the site makes anyway.  By that ``Link``
chooses how the site sends (codec, connections, overlap), and it reports measurement and choice.

Prefetch.  ``Ahead`` asks for a version before it is published, so that the syncer sends it at the moment of publishing.
Otherwise a round takes one more round trip: the syncer announces the version, and the site then asks for it.  A failed
prefetch costs nothing, because the site asks again when the version is announced.

Decoding.  ``Incoming`` receives the versions of one fragment, and decodes them while their bytes arrive.

Joining.  ``Listener`` joins the run: the first time with a time limit, and again whenever the syncer was away.
"""

from __future__ import annotations

import contextlib
import math
import queue
import random
import re
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from diloco.codec import kernel_library
from diloco.codec.base import DecodeError, NonFiniteError
from diloco.codec.entropy import stage_of
from diloco.codec.registry import LOSSLESS, make_codec
from diloco.codec.site_pass import Following
from diloco.durable import when_there_is_room, write_file
from diloco.learner.seal import Encoder, SealJob, seal
from diloco.sync.events import (
    FateTold,
    FinalAnnounced,
    JoinAnswered,
    Outcome,
    OverlapChosen,
    PushAnswered,
    Reason,
    SealFailed,
    VersionFetched,
    VersionPublished,
)
from diloco.sync.link import Adapter, AdaptOptions, RoundTimes
from diloco.wire.channel import Backoff
from diloco.wire.messages import (
    FOLDER_DIGITS,
    Dropped,
    JoinAsk,
    LinkInfo,
    Published,
    PullAsk,
    Refused,
    ReportInfo,
    Status,
    Unreachable,
)
from diloco.wire.pulling import Patience, PullSink

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from diloco.codec.base import Codec
    from diloco.inner.trainer import Log
    from diloco.learner.seal import Encoded, Outbox
    from diloco.learner.tensors import Versions
    from diloco.sync.events import LearnerEvent
    from diloco.sync.options import Agreement
    from diloco.sync.progress import LearnerState, Standing
    from diloco.wire.channel import Stream
    from diloco.wire.client import SyncClient
    from diloco.wire.messages import PullHeader, PushHeader, WatchEvent
    from diloco.wire.pulling import PulledVersion

T = TypeVar("T")


class Link:
    """Chooses how a participant sends, by what its client has measured; one thread at a time may call ``codec``."""

    def __init__(self, participant: Participant, options: AdaptOptions) -> None:
        self._participant, self._client = participant, participant.client
        self.rounds, self.adapter = RoundTimes(), Adapter(options)

    def codec(self, step_ns: int) -> str:
        """Return the codec of an update sealed now, where an inner step takes ``step_ns``; a change is logged once.

        A new number of connections takes effect with the next transfer, a new overlap with the next seal; operations
        under way are not affected.
        """
        before = self.adapter.choice
        choice = self.adapter.choose(self._client.estimate(), step_ns, self.rounds.usual_ns())
        if choice != before:
            self._client.use_channels(choice.channels)
            self._participant.tell(OverlapChosen(choice.overlap_steps))
            self._participant.emit("adapted", asdict(choice))
        return choice.codec

    def info(self, step_ns: int) -> LinkInfo:
        """Return measurement and choice for a heartbeat, where an inner step takes ``step_ns``."""
        found, choice, round_ns = self._client.estimate(), self.adapter.choice, self.rounds.usual_ns()
        steps = self.adapter.exchange_steps(found, step_ns, round_ns)
        measured = (found.rtt_ns, found.up_bytes_per_s, found.down_bytes_per_s)
        return LinkInfo(*measured, choice.codec, choice.channels, steps, choice.why, round_ns, choice.overlap_steps)


WAIT_S = 60.0
"""Longest wait of a prefetch: in a round that takes longer, one more round trip makes little difference."""
END_S = 5.0


class Ahead:
    """A prefetch: one pull that waits for a version, in a thread that starts at once.  Any thread may call ``take``."""

    def __init__(self, client: SyncClient, ask: PullAsk, sink: Incoming) -> None:
        self.ask, self.sink = ask, sink
        self._patience = Patience(WAIT_S)
        self._pulled: PulledVersion | None = None
        self.carried_s = 0.0
        """Seconds that the transfer took, from when the version was available."""
        self.thread = threading.Thread(target=self._run, args=(client,), name="pull-ahead", daemon=True)
        self.thread.start()

    def _run(self, client: SyncClient) -> None:
        with suppress(Refused, Unreachable):
            pulled = client.pull(self.ask, self.sink, self._patience)
            self._pulled = pulled if pulled.parts else None
            self.carried_s = self._patience.carried_s

    @property
    def over(self) -> bool:
        """Whether it has ended without a version."""
        return not self.thread.is_alive() and self._pulled is None

    def take(self) -> PulledVersion | None:
        """Return the version, which is known to be published by now; None when it must be pulled again."""
        self._patience.due()
        self.thread.join()
        return self._pulled


class Incoming(PullSink):
    """Receives one fragment's versions of one lineage, by one pull at a time, and decodes them on arrival."""

    def __init__(self, fragment: int, lineage: int, tensors: Versions) -> None:
        super().__init__()
        self.lineage = lineage
        self._fragment, self._numel = fragment, tensors.layout.fragments[fragment].numel
        self._tensors = tensors
        self._arriving: Following | None = None
        self._working = threading.Lock()

    def begun(self, header: PullHeader, payload: memoryview) -> Callable[[int], None] | None:
        """Begin a payload.  It is decoded on arrival if it has one part and its base is the latest version here."""
        self._arriving, held = None, self._held(header)
        if held is None or len(header.part_bytes) != 1:
            return None
        try:
            codec = _codec(header)
        except ValueError:
            return None  # ``values`` reports an unknown codec.
        values = self._tensors.buffers.values(header.numel)
        arriving = self._arriving = Following(held, [payload], codec, values, header.digest)

        def come(count: int) -> None:
            if self._working.acquire(blocking=False):  # Otherwise another stream's thread is decoding already.
                try:
                    arriving.come(count)
                finally:
                    self._working.release()

        return come

    def broke_off(self) -> None:
        """Stop decoding on arrival after a break: the bytes are kept, and decoded when the resumed pull has ended."""
        super().broke_off()
        self._arriving = None

    def values(self, pulled: PulledVersion) -> Tensor | None:
        """Return the pulled values, flat fp32; None when the bytes do not decode to values with the header's digest."""
        arriving, self._arriving = self._arriving, None
        header, held = pulled.header, self._held(pulled.header)
        try:
            if arriving is not None and arriving.held is held:
                with self._working:
                    values, found = arriving.out, arriving.finish()
            elif header.numel == self._numel and (held is not None or header.whole):
                values = self._tensors.buffers.values(header.numel)
                before = held if held is not None else values
                found = Following(before, pulled.parts, _codec(header), values, header.digest).finish()
            else:
                return None
        except DecodeError:
            return None
        return values if found == header.digest else None

    def _held(self, header: PullHeader) -> Tensor | None:
        """Return the base values that the payload of ``header`` is a difference to; None if they are not here."""
        latest = self._tensors.latest[self._fragment]
        fits = latest is not None and not header.whole and latest[0] == header.from_version
        return latest[1] if latest is not None and fits and header.numel == self._numel else None


def _codec(header: PullHeader) -> Codec:
    return make_codec("fp32" if header.whole else header.encoding)


LOOK_S = 0.1
"""Interval at which a waiting thread of a site looks for what it is to do."""
MALFORMED_MAX = 3
"""Refusals in a row of one update as malformed (bytes may change in transit) after which the site stops."""


CAP_S = 3.0
CHOICE_CAP_S = 0.5
"""Back-off cap where a standby may take over: the site tries all addresses this often, so a failover costs this."""


class Pause:
    """Back-off that ends early when the agent stops, and when the site has joined another syncer meanwhile."""

    def __init__(self, participant: Participant, cap_s: float = CAP_S) -> None:
        self._participant = participant
        self.backoff = Backoff(base_s=0.2, cap_s=cap_s)
        self._until, self._epoch = 0.0, 0

    def begin(self, at_least_s: float | None = None) -> None:
        """Start a pause after one more failure, longer than the last one and at least ``at_least_s`` seconds."""
        self._until = time.monotonic() + self.backoff.next_s(random.random(), at_least_s or 0.0)
        self._epoch = self._participant.known.epoch

    def left_s(self) -> float:
        """Return the seconds left of the pause."""
        return max(0.0, self._until - time.monotonic()) if self._epoch == self._participant.known.epoch else 0.0

    def wait(self, at_least_s: float | None = None) -> None:
        """Wait for one more pause."""
        self.begin(at_least_s)
        while (left_s := self.left_s()) and not self._participant.stopping.wait(min(left_s, LOOK_S)):
            continue


ROOM_EVERY_S = 1.0
"""Interval between attempts to write to a full disk."""


def with_room(participant: Participant, what: str, write: Callable[[], T]) -> T | None:
    """Return the result of ``write``, retried while the disk is full; None if the participant stops before.

    The log says that ``what`` waits for disk space, and when it no longer waits.
    """

    def say(full: OSError | None) -> None:
        waits: dict[str, object] = {"note": "disk_full", "why": f"{what} waits for disk space: {full}"}
        participant.emit("note", waits if full is not None else {"note": "disk_has_room"})

    return when_there_is_room(write, participant.stopping, ROOM_EVERY_S, say)


class Sealer:
    """Encodes updates and makes them durable, and drops updates no longer needed from the outbox, in order."""

    def __init__(self, participant: Participant, encoders: Sequence[Encoder]) -> None:
        """``encoders`` are those of all codecs that a job may name, the configured one first."""
        self._participant = participant
        self.encoder = encoders[0]
        self._encoders = {each.codec.name: each for each in encoders}
        self.queue: queue.SimpleQueue[SealJob | tuple[int, int] | None] = queue.SimpleQueue()

    def run(self) -> None:
        """Run the thread; None in the queue ends it."""
        while (job := self.queue.get()) is not None:
            if isinstance(job, tuple):
                self._participant.outbox.drop(*job)
            else:
                self._seal(job)

    def _seal(self, job: SealJob) -> None:
        own, effect, encoder = self._participant, job.effect, self._encoders[job.codec]
        began_s = time.perf_counter()
        try:
            header, encoded = seal(job, encoder, own.run_id, own.site_id, own.known.incarnation)
        except NonFiniteError:
            own.tell(SealFailed(effect.fragment, effect.sequence))
            return
        finally:
            if job.inputs.in_place:
                own.was_read(job)
        # Training continues meanwhile, and its progress goes into the next update.
        if with_room(own, "an update", lambda: own.outbox.put(header, encoded.payload)) is None:
            return
        facts: dict[str, object] = {"fragment": effect.fragment, "sequence": effect.sequence, "steps": effect.steps}
        facts["codec"] = job.codec
        if (stage := stage_of(encoder.codec, encoded.payload)) is not None:
            facts["stage"] = stage
        if encoded.fed is not None:
            facts["residual"] = float(torch.linalg.vector_norm(encoded.fed.residual))
        numbers = {"base_version": effect.base_version, "tokens": effect.tokens, "norm": encoded.norm}
        spent = {"seal_s": job.seal_s, "wait_s": began_s - job.since_s, "encode_s": time.perf_counter() - began_s}
        own.emit("sealed", facts | numbers | {name: round(seconds, 6) for name, seconds in spent.items()})
        own.keep_sealed(header, encoded)


class Sender:
    """Sends sealed updates, each until the syncer gives a definite answer."""

    def __init__(self, participant: Participant) -> None:
        self._participant = participant
        self.queue: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._later: dict[tuple[int, int], Pause] = {}

    def run(self) -> None:
        """Run the thread; None in the queue ends it.  Updates that the syncer wants later do not delay the others."""
        while (order := self._next()) is not None:
            if self._deliver(*order):
                self._later.pop(order, None)
            else:
                self._later.setdefault(order, Pause(self._participant)).begin()

    def _next(self) -> tuple[int, int] | None:
        while True:
            for order, later in self._later.items():
                if not later.left_s():
                    return order
            with contextlib.suppress(queue.Empty):
                return self.queue.get(timeout=LOOK_S if self._later else None)

    def _deliver(self, fragment: int, sequence: int) -> bool:
        """Send one update until the syncer answers; return False when the syncer wants it later (RETRY)."""
        own, malformed, began_s = self._participant, 0, time.perf_counter()
        pause = Pause(own)
        while not own.stopping.is_set():
            found = self._found(fragment, sequence)
            if found is None:
                return True
            header, payload = found
            own.fetcher.expect(fragment)  # Because a version of that fragment comes next.
            try:
                result = own.client.push(header, payload)
            except Unreachable as error:
                pause.wait(error.retry_after_s)
                continue
            except Refused as error:
                # The refusal concerns this caller and not this update: joining again gives a clearer answer.
                malformed = malformed + 1 if error.status is Status.INVALID_ARGUMENT else 0
                if malformed >= MALFORMED_MAX:
                    own.give_up(f"the syncer cannot read update {sequence} of fragment {fragment}: {error.text}")
                    return True
                own.rejoin(f"a push was refused: {error.text}")
                pause.wait()
                continue
            facts: dict[str, object] = {"fragment": fragment, "sequence": sequence, "outcome": result.outcome.value}
            reason = result.reason.value if result.reason else None
            facts["seconds"] = round(time.perf_counter() - began_s, 6)
            own.emit("pushed", {**facts, "reason": reason, "bytes": len(payload)})
            if result.outcome is Outcome.RETRY:
                return False  # The update that it waits for may be behind it in this queue.
            own.tell(PushAnswered(fragment, sequence, result.outcome, result.reason, header.digest, result.epoch))
            if result.fate is not None and not 0 < result.epoch < own.known.epoch:
                own.tell(FateTold(result.fate))
            return True
        return True

    def _found(self, fragment: int, sequence: int) -> tuple[PushHeader, memoryview] | None:
        """Return the update from the outbox, if it is still the one that waits for an answer.

        The sequence of a refused update is reused, so an order to send may outlive its update.  The run itself may be
        restored meanwhile: the lineage is read first, so that the update is not sent in a later lineage.
        """
        own = self._participant
        lineage, wanted = own.known.lineage, own.wanted(fragment, sequence)
        if wanted is None:
            return None
        try:
            incarnation = own.known.incarnation
            header, payload = own.outbox.get(fragment, sequence)
        except FileNotFoundError:
            if own.wanted(fragment, sequence) == wanted:
                raise
            return None  # A join or a fate has just answered it.
        if header.digest != wanted:
            return None
        return replace(header, incarnation=incarnation, lineage=lineage), payload


class Fetcher:
    """Pulls versions and stores them at the site."""

    def __init__(self, participant: Participant) -> None:
        self._participant = participant
        self._incoming: dict[int, Incoming] = {}
        self._lock = threading.Lock()
        self._ahead: Ahead | None = None  # The present prefetch.
        self._begun: list[Ahead] = []  # Prefetches whose threads may still run.
        self._at: int | None = None
        self.queue: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def run(self) -> None:
        """Run the thread; None in the queue ends it."""
        while (fragment := self.queue.get()) is not None:
            with self._lock:
                self._at = fragment
            self._fetch(fragment)
            self._at = None
        with self._lock:
            begun = self._begun
        for ahead in begun:  # torch aborts a process that exits while one of its threads is inside an operation.
            ahead.thread.join(END_S)  # It ends once the client is closed.

    def expect(self, fragment: int) -> None:
        """Start to prefetch the next version of ``fragment``, which will soon be published.

        One prefetch at a time; callable from any thread.  It never fails, and nothing depends on its success.
        """
        with self._lock:
            own = self._participant
            lineage, latest = own.known.lineage, own.tensors.latest[fragment]
            waits = self._ahead is not None and not self._ahead.over
            if own.stopping.is_set() or waits or latest is None or self._at == fragment:
                return
            ask = PullAsk(own.run_id, own.site_id, fragment, latest[0])
            self._ahead = Ahead(own.client, ask, self._of(fragment, lineage))
            self._begun = [*(each for each in self._begun if each.thread.is_alive()), self._ahead]

    def _expected(self, fragment: int, lineage: int, have: int) -> tuple[PulledVersion | None, float]:
        """Return the prefetched version if the prefetch was for this fragment, lineage and base, else None; and the
        seconds that it took."""
        with self._lock:
            ahead = self._ahead
            if ahead is None or ahead.ask.fragment != fragment:
                return None, 0.0
            self._ahead = None
            if ahead.sink.lineage != lineage or ahead.ask.have_version != have:
                self._incoming.pop(fragment, None)  # The stale prefetch still writes to this sink.
                return None, 0.0
        return ahead.take(), ahead.carried_s

    def _fetch(self, fragment: int) -> None:
        own, began_s = self._participant, time.perf_counter()
        pause = Pause(own)
        lineage = own.known.lineage  # Read first: values read later may be of a later lineage, never of an earlier one.
        latest = own.tensors.latest[fragment]
        have = latest[0] if latest is not None else -1
        here, ahead_s = self._expected(fragment, lineage, have)
        incoming = self._of(fragment, lineage)
        # After a restore of the run the queue holds another order, and this one is void.
        while not own.stopping.is_set() and own.known.lineage == lineage:
            try:
                pulled, here = here, None
                if pulled is None:
                    pulled = own.client.pull(PullAsk(own.run_id, own.site_id, fragment, have), incoming)
            except (Unreachable, Refused) as error:
                pause.wait(getattr(error, "retry_after_s", None))
                continue
            values = incoming.values(pulled)
            incoming.give_back(pulled)
            if values is None:
                # Whatever went wrong, here or in transit, fetching the whole fragment repairs it.
                why = f"fragment {fragment}: the fetched bytes are not version {pulled.header.version}"
                own.emit("note", {"note": "digest_differs", "why": f"{why}; fetching it whole"})
                if pulled.header.whole:
                    pause.wait()
                have = -1
                continue
            if pulled.header.version <= have:
                pause.wait()  # A newer version was announced, but the syncer does not have it: do not busy-loop.
            facts: dict[str, object] = {"fragment": fragment, "version": pulled.header.version, "had": have}
            facts |= {"lineage": lineage, "seconds": round(max(ahead_s, time.perf_counter() - began_s), 6)}
            own.emit("fetched", {**facts, "bytes": pulled.header.payload_bytes, "whole": pulled.header.whole})
            event = VersionFetched(fragment, pulled.header.version, pulled.header.fates)
            own.keep_fetched(values, event, lineage, pulled.header)
            return

    def _of(self, fragment: int, lineage: int) -> Incoming:
        """Return the fragment's ``Incoming``, with the bytes of an interrupted pull; a new one for a new lineage."""
        known = self._incoming.get(fragment)
        if known is None or known.lineage != lineage:
            known = self._incoming[fragment] = Incoming(fragment, lineage, self._participant.tensors)
        return known


class JoinFailed(RuntimeError):
    """The site could not join.  ``kind`` is ``unreachable``, ``mismatch`` or ``refused``."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text


class Participant:
    """A participant of a run at one syncer: a rank of a site that owns fragments, or a region.

    It owns the threads that seal, send and fetch, and others that it starts.  Every method is thread-safe.
    """

    emit: Log
    """Write an event into the log."""
    tell: Callable[[LearnerEvent], None]
    """Pass an event to the machine."""
    rejoin: Callable[[str], None]
    """Join again soon, for the given reason."""
    give_up: Callable[[str], None]
    """Stop this participant with a failure, for the given reason."""
    wanted: Callable[[int, int], str | None]
    """Return the digest of an update (fragment, sequence) that waits to be sent and answered; None: there is none."""
    keep_sealed: Callable[[PushHeader, Encoded], None]
    """Store an update that is durable, and tell the machine."""
    keep_fetched: Callable[[Tensor, VersionFetched, int, PullHeader], None]
    """Store the values of a version requested in a lineage, with its header, and tell the machine."""
    known: LearnerState
    """What is known of the run and the latest syncer: ``lineage``, ``epoch``, and this process's ``incarnation`` at
    that syncer (0 before it has joined)."""

    def __init__(self, client: SyncClient, options: AdaptOptions, outbox: Outbox, tensors: Versions) -> None:
        """``options`` are the ways of sending to choose from, the configured one first."""
        self.run_id, self.site_id, self.client = client.run_id, client.site_id, client
        self.link, self.outbox, self.tensors = Link(self, options), outbox, tensors
        self.stopping = threading.Event()
        """Set when the threads must end."""
        self.left = threading.Event()
        """Set when this participant has left the run: another join would undo that."""
        names = [way.codec for way in options.ways]
        if tensors.layout.averaged:  # Buffers are sent without loss.
            names.append(LOSSLESS)
        # They share memory, because a site makes one update at a time.
        encoders = [Encoder(make_codec(name), tensors.place, tensors.buffers) for name in dict.fromkeys(names)]
        self.sealer, self.fetcher, self.sender = Sealer(self, encoders), Fetcher(self), Sender(self)
        self.threads: list[threading.Thread] = []

    def was_read(self, job: SealJob) -> None:
        """Note that ``job`` no longer reads the model's memory."""

    def begin_threads(self, *loops: Callable[[], None]) -> None:
        """Start the threads that seal, send and fetch, and one for each of ``loops``."""
        for loop in (self.sender.run, self.fetcher.run, self.sealer.run, *loops):
            thread = threading.Thread(
                target=self._guarded, args=(loop,), name=f"learner {loop.__qualname__}", daemon=True
            )
            thread.start()
            self.threads.append(thread)

    def end_threads(self) -> None:
        """Close the client, and wait until each thread has finished its present work, at most 10 s for each."""
        self.stopping.set()
        for orders in (self.sealer.queue, self.sender.queue, self.fetcher.queue):
            orders.put(None)
        self.client.close()
        for thread in self.threads:
            thread.join(10.0)

    def _guarded(self, loop: Callable[[], None]) -> None:
        """Run a thread; if it fails, stop the participant with the error instead of leaving it half alive."""
        try:
            self.tensors.place.begin_thread()
            loop()
        except Exception as error:
            if not self.stopping.is_set():
                self.emit("note", {"note": "thread_died", "why": repr(error)})
                self.give_up(f"a thread failed: {error!r}")
                raise


def report_info(own: Participant, standing: Standing, traffic: tuple[int, int], **more: Any) -> ReportInfo:
    """Return a heartbeat.  ``traffic`` is bytes (up, down); ``more`` are fields that only a training site has."""
    fields = {"loss": None, "tokens_per_s": 0.0, "train_ns": 0, "stall_ns": 0, **more}
    tokens = ("processed", "unsent", "in_flight", "overwritten", "lost")
    return ReportInfo(
        run_id=own.run_id,
        site_id=own.site_id,
        incarnation=own.known.incarnation,
        step=standing.steps,
        step_ns=standing.step_ns,
        bytes_up=traffic[0],
        bytes_down=traffic[1],
        versions=standing.versions if min(standing.versions) >= 0 else (),
        **{f"tokens_{name}": getattr(standing.ledger, name) for name in tokens},
        **fields,
    )


def say_goodbye(own: Participant) -> bool:
    """Make one attempt to leave; return False when the syncer is away, so that the caller must retry."""
    try:
        own.client.leave(own.known.incarnation)
    except Unreachable:
        return False
    except Refused as error:
        own.emit("note", {"note": "leave_refused", "why": error.text})
    return True


SILENT_S = 3.0
"""Seconds without an answer to the first join after which the log says what the site waits for."""
FOLDER_ID = re.compile(f"[0-9a-f]{{{FOLDER_DIGITS}}}")


def _folder_id(folder: Path) -> str:
    """Return the 16 random hex digits kept in ``folder``, which identify it to the syncer when a process restarts."""
    path = folder / "folder.id"
    with suppress(FileNotFoundError, UnicodeDecodeError):
        if FOLDER_ID.fullmatch(found := path.read_text("ascii")):
            return found
    made = secrets.token_hex(FOLDER_DIGITS // 2)
    write_file(path, made.encode())
    return made


class Listener:
    """Joins the run and reads the Watch stream; joins again when that breaks, and on ``wake`` and ``rejoin``.

    It joins under one random id for the life of the process.
    """

    def __init__(self, participant: Participant, agreement: Agreement, folder: Path | None = None) -> None:
        """With ``folder``, the process id contains its id, and the syncer keeps a live process of another folder."""
        self._participant, self._agreement = participant, agreement
        self._process = secrets.token_hex(8) + (_folder_id(folder) if folder else "")
        self._stream: Stream[WatchEvent] | None = None
        self._join_wanted = threading.Event()
        self._rejoining = ""  # The last reason logged for joining again; empty once joined.
        self._refused = ""
        self.connected = False
        self.heartbeat_s = 1.0

    def run(self) -> None:
        """Run the thread.  The first join was made before it starts, unless the site trains without a syncer."""
        own = self._participant
        pause = Pause(own, CHOICE_CAP_S if own.client.has_choice else CAP_S)
        if own.known.incarnation == 0:
            self._join_wanted.set()
        while not own.stopping.is_set():
            try:
                if self._join_wanted.is_set():
                    self._join_wanted.clear()
                    if not own.left.is_set():
                        own.tell(self.attempt())
                self._listen(pause)
                why, refused, final = "the syncer closed the stream", "", False
            except Unreachable as error:
                why, refused, final = error.why, error.refused, False
            except Refused as error:
                why, refused, final = error.text, error.text, error.final
            if refused and refused != self._refused:  # Logged once, until it is connected again or the reason changes.
                self._refused = refused
                own.emit("note", {"note": "join_refused", "why": refused})
            if final and not own.left.is_set():
                own.give_up(why)
                return
            self._join_wanted.set()
            if self.connected:
                self.connected = False
                own.emit("disconnected", {"why": why})
            pause.wait()

    def _listen(self, pause: Pause) -> None:
        with self._participant.client.watch(self._participant.known.incarnation) as stream:
            self._stream = stream
            # Checked after ``_stream`` is set, so that a ``wake`` before that is not lost.
            if self._join_wanted.is_set() or self._participant.stopping.is_set():
                return
            for event in stream:
                if not self.connected:
                    self.connected = True
                    self._refused = ""
                    pause.backoff.failures = 0
                    self._participant.emit("connected", {})
                self._take(event)
                if self._participant.stopping.is_set():
                    return

    def _take(self, event: WatchEvent) -> None:
        own = self._participant
        if isinstance(event, Published):
            run = (event.run_tokens, event.progress_ppm, event.lineage, event.fastest_step_ns)
            own.tell(VersionPublished(event.epoch, event.fragment, event.version, *run))
        elif isinstance(event, FateTold):
            fate = event.fate
            facts: dict[str, object] = {"fragment": fate.fragment, "sequence": fate.sequence}
            if fate.reason is None:
                own.emit("merged", {**facts, "version": fate.version, "lineage": own.known.lineage})
            else:
                own.emit("fate", {**facts, "reason": fate.reason.value})
            own.tell(event)
        elif isinstance(event, FinalAnnounced):
            own.tell(event)
        elif isinstance(event, Dropped):
            if event.reason is Reason.SUPERSEDED:
                own.give_up("another process now speaks for this site: is it started twice?")
            else:
                own.give_up(f"the syncer ended this site's part: {event.reason.value}")

    def wake(self) -> None:
        """End the present stream, so that the site joins again (or sees that it is stopping)."""
        self._join_wanted.set()
        if self._stream is not None:
            self._stream.cancel()

    def rejoin(self, why: str) -> None:
        """Join again, and log the reason once."""
        if why != self._rejoining:
            self._rejoining = why
            self._participant.emit("note", {"note": "rejoin", "why": why})
        self.wake()

    def attempt(self) -> JoinAnswered:
        """Make one attempt to join; return the machine's event for it; raises ``Unreachable`` or ``Refused``."""
        own, agreement = self._participant, self._agreement
        ask = JoinAsk(
            agreement.protocol,
            agreement.run_id,
            own.known.lineage,
            own.site_id,
            self._process,
            agreement.layout_fingerprint,
            own.tensors.layout.to_json().encode(),
            agreement.shared,
        )
        reply = own.client.join(ask, own.known.epoch)
        versions = [standing.version for standing in reply.standings]
        facts: dict[str, object] = {"incarnation": reply.incarnation, "epoch": reply.epoch, "versions": versions}
        how = {"syncer": own.client.address, "kernels": kernel_library.description()}
        own.emit("joined", {**facts, **how, "encodes": own.sealer.encoder.where})
        self.heartbeat_s, self._rejoining = reply.settings.heartbeat_ns / 1e9, ""
        run = (reply.run_tokens, reply.progress_ppm, reply.ending, reply.lineage, reply.settings.keep_until_decided)
        return JoinAnswered(reply.epoch, reply.incarnation, reply.standings, *run)

    def first(self, until: float) -> None:
        """Join, with retries until the monotonic time ``until`` or until the site stops; raises ``JoinFailed``."""
        own = self._participant
        pause = Pause(own)
        said, say_at = "", time.monotonic() + SILENT_S
        while True:
            try:
                own.tell(self.attempt())
                return
            except Refused as error:
                mismatch = error.status is Status.FAILED_PRECONDITION
                raise JoinFailed("mismatch" if mismatch else "refused", error.text) from error
            except Unreachable as error:
                if error.refused and error.refused != said:
                    said = error.refused
                    own.emit("note", {"note": "join_refused", "why": error.why})
                elif time.monotonic() >= say_at:
                    left_s, say_at = max(until - time.monotonic(), 0.0), math.inf
                    why = f"no answer from {own.client.address} yet: {error.why}; trying for {left_s:.0f} s more"
                    own.emit("note", {"note": "not_joined", "why": why})
                if time.monotonic() >= until:
                    raise JoinFailed("refused" if error.refused else "unreachable", error.why) from error
                pause.wait(error.retry_after_s)
                if own.stopping.is_set():
                    raise JoinFailed("unreachable", f"the site is stopping; last: {error.why}") from error
