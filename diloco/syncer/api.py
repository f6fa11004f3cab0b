"""``Api`` answers the network's calls (``wire.handlers.SyncerApi``) through the decision loop; ``Reception`` is a push.

``difference`` compares a caller's run with the run that is served here, and names the first difference.

Requests for data units come with the heartbeat. Most change nothing, and are answered without a journal record.

Vital signs. The sums of a decoded update are added up block by block, as the blocks arrive (``added``). They are in
fp64, because the square of an fp32 value may not fit fp32.

Inspection. While an update arrives, the syncer checks that it is well formed, finite, and what its site decoded, and
measures its norm. It reads the received bytes back from the disk by ranges and decodes them, so that only the last
range is left for the commit, and no update is ever whole in memory. An update with an entropy stage has no ranges: once
all of it has arrived, it is unpacked on the disk and then checked like the others.

Memory: for each of the concurrent ``checks`` the payload of one range, on plain torch also its values and the sums'
temporaries (``wire.options.CHECK_BYTES_MAX``), and the memory to unpack a frame.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import KW_ONLY, asdict, dataclass, fields, replace
from math import inf, sqrt
from types import MappingProxyType
from typing import TYPE_CHECKING

from diloco.codec.base import Buffers, DecodeError, NonFinitePayload
from diloco.codec.entropy import RAW
from diloco.codec.merging import Reading, Sums
from diloco.codec.registry import LOSSLESS, make_codec
from diloco.durable import is_full
from diloco.outer.fragments import Layout
from diloco.sync.admission import Verdict, admit
from diloco.sync.effects import AnswerDone, AnswerJoin, AnswerPush, AnswerUnits, AskToConfirm
from diloco.sync.events import (
    DrainRequested,
    FateTold,
    FinalAnnounced,
    JoinRequested,
    Outcome,
    Reason,
    SiteEvicted,
    SiteLeft,
    SiteReadmitted,
    StandbyDetached,
    UnitsAsked,
    UnitsTold,
    UpdateAdmitted,
    UpdateArrived,
    UpdateWithdrawn,
)
from diloco.sync.fates import known_already
from diloco.sync.options import CORPUS, PROTOCOL, PROTOCOL_OLDEST, Agreement, disagreement
from diloco.sync.state import Phase
from diloco.sync.state import Status as SiteStatus
from diloco.syncer.core import Core, NotHandedIn, Room
from diloco.syncer.options import RunPlan, SyncerOptions
from diloco.syncer.publish import EarlierDigests, Feeds, Holdings, as_known, published
from diloco.syncer.replicator import Replicator
from diloco.syncer.spool import opened, read_part
from diloco.syncer.status import Tally, recorded
from diloco.wire.chunks import checksum
from diloco.wire.messages import (
    FOLDER_DIGITS,
    PROCESS_DIGITS,
    TEXT_CHARS_MAX,
    JoinAsk,
    JoinReply,
    LearnerSettings,
    ProbeAnswer,
    PullAsk,
    PushHeader,
    PushResult,
    Refusal,
    ReportInfo,
    ReportReply,
    Status,
)
from diloco.wire.options import ServerOptions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from diloco.sync.events import OuterEvent
    from diloco.sync.syncer import OuterSync
    from diloco.syncer.core import Answer
    from diloco.syncer.publish import Feed
    from diloco.syncer.snapshots import FragmentValues
    from diloco.syncer.spool import PartialUpdate
    from diloco.wire.handlers import PullSource
    from diloco.wire.identity import Identity
    from diloco.wire.messages import ProbeAsk


def difference(plan: RunPlan, lineage: int, theirs: Agreement, layout_json: bytes) -> str | None:
    """Return the first difference between ``theirs`` and ``plan`` in its ``lineage``; None if there is none.

    Raises ``Refusal`` (INVALID_ARGUMENT) if ``layout_json`` does not describe a layout.
    """
    ours = replace(plan.agreement, lineage=lineage)
    text = disagreement(ours, theirs)
    if text is None or theirs.layout_fingerprint == ours.layout_fingerprint or "layout" not in text or not layout_json:
        return text
    try:
        layout = Layout.from_json(layout_json.decode())
    except ValueError as error:
        raise Refusal(Status.INVALID_ARGUMENT, f"layout_json describes no layout: {error}") from error
    first = layout.first_difference(plan.layout)
    return f"{first} (here: at the site, there: at the syncer)" if first else text


def probed(plan: RunPlan, ask: ProbeAsk) -> ProbeAnswer:
    """Return the answer to a probe, without caller and time; empty fields of ``ask`` are not compared."""
    text = None
    if ask.run_id:
        fingerprint = ask.layout_fingerprint or plan.agreement.layout_fingerprint
        theirs = Agreement(ask.protocol, ask.run_id, 0, fingerprint, ask.shared_config)
        text = difference(plan, 0, theirs, ask.layout_json)
    ours = plan.agreement
    told = (text or "")[:TEXT_CHARS_MAX]
    return ProbeAnswer(PROTOCOL, PROTOCOL_OLDEST, ours.run_id, difference=told, shared_config=ours.shared)


JOIN_REFUSALS = MappingProxyType(
    {
        Reason.EVICTED: (Status.PERMISSION_DENIED, "an operator evicted site {site} from the run"),
        Reason.SUPERSEDED: (Status.ALREADY_EXISTS, "a newer process speaks for site {site}: is it started twice?"),
        Reason.FULL: (
            Status.RESOURCE_EXHAUSTED,
            "the run has no room for site {site}: outer.sites_max is reached until a site leaves or is evicted, or the "
            "syncer starts again with a larger one",
        ),
    }
)

DETACH_S = 10.0
HELD_RETRY_MS = 2000
NO_SUCH = MappingProxyType(
    {
        Reason.NOT_JOINED: "site_id is {site!r}: the run has no such site",
        Reason.BAD_BASE: "fragment is {fragment}: the run has no such fragment",
        Reason.GAP: "sequence is {sequence}: {site} has sent no such update of fragment {fragment}",
        Reason.FORGOTTEN: "sequence is {sequence}: decided too long ago to say how",
    }
)

TOKENS_MAX = 1 << 40
"""Tokens that one update may claim: far more than any has, and the run's sum still fits its wire field."""


@dataclass(eq=False, repr=False)
class Api:
    """Called from many threads; the decision loop or the tally's lock guards all state.

    ``status`` and ``snapshot`` carry out the operator's requests of these names.
    """

    options: SyncerOptions
    plan: RunPlan
    network: ServerOptions
    core: Core
    holdings: Holdings
    room: Room
    replicator: Replicator
    _: KW_ONLY
    status: Callable[[], dict[str, object]]
    snapshot: Callable[[], None]

    def __post_init__(self) -> None:
        self.emit = self.core.store.emit
        self.feeds = Feeds()
        self.tally = Tally()
        self.behind = ""
        """Why this process may be outdated: a site of another lineage has tried to join. Empty until then."""
        self.old_copy = ""
        """Which published version its data lack; the caller sets it, by the run's events."""
        self._protocols: dict[str, int] = {}
        """The protocol version of each site; the newest until it has rejoined this process, as every site does.

        A site wrongly taken for an older one would get digests that do not match its own. One wrongly taken for a newer
        one gets those of its own updates as it made them, and cannot read the others: it asks again once it has joined.
        """
        self._earlier = EarlierDigests(len(self.plan.layout.fragments))
        self.checks = threading.BoundedSemaphore(self.network.checks_max)
        """Entered while some values of an update are in memory: admits as many as there is space for."""
        self.buffers = Buffers(self.network.checks_max)  # Memory for the checks: one update's range in each buffer.

    def join(self, request: JoinAsk) -> JoinReply:
        """Let a learner process join, if it agrees with this syncer on everything that is shared."""
        theirs = Agreement(
            request.protocol, request.run_id, request.lineage, request.layout_fingerprint, request.shared_config
        )
        lineage = self.core.ask(lambda machine: machine.state.lineage)
        if (text := difference(self.plan, lineage, theirs, request.layout_json)) is not None:
            if text.startswith("lineage is ") and not self.behind:
                self.behind = f"site {request.site_id}: {text}"
                self.emit("note", {"note": "site_ahead", "why": self.behind, "site": request.site_id})
            raise Refusal(Status.FAILED_PRECONDITION, text)
        corpus = request.shared_config.get(CORPUS, "")
        answer = self.core.call(
            lambda call: JoinRequested(call, request.site_id, request.process, request.ticket, corpus)
        )
        assert isinstance(answer, AnswerJoin | AskToConfirm), answer
        if isinstance(answer, AnswerJoin) and answer.reason is Reason.OTHER_DATA:
            units = self.core.ask(lambda machine: machine.state.units)
            here = units.corpus[:12] if units is not None else ""
            raise Refusal(
                Status.FAILED_PRECONDITION,
                f"{CORPUS} is {corpus[:12]} at the site and {here} at the syncer: the run leases units of one text "
                "(data.leased), and this site has prepared another",
            )
        if isinstance(answer, AnswerJoin) and answer.reason is not None:
            raise _refusal(answer.reason, request.site_id)

        settings = LearnerSettings(
            heartbeat_ns=int(self.options.heartbeat_s * 1e9),
            chunk_bytes=self.network.chunk_bytes,
            updates_in_flight_max=self.plan.outer.updates_in_flight_max,
            site_timeout_ns=self.plan.outer.site_timeout_ns,
            keep_until_decided=self.core.acks_first,
        )

        def look(machine: OuterSync) -> tuple[JoinReply, str]:
            state, site = machine.state, machine.state.sites.get(request.site_id)
            run = (state.lineage, (), state.run_tokens(), machine.progress_ppm(), None, settings)
            reply = JoinReply(state.epoch, 0, *run, protocol=min(request.protocol, PROTOCOL))
            return reply, site.process if site is not None and site.status is SiteStatus.LIVE else ""

        reply, live = self.core.ask(look)
        if isinstance(answer, AskToConfirm):
            # Two machines with one name, unless the process is of an earlier release or takes over: it names no folder.
            both_named = len(live) == len(request.process) == PROCESS_DIGITS + FOLDER_DIGITS
            if both_named and live[PROCESS_DIGITS:] != request.process[PROCESS_DIGITS:]:
                silent_s = self.plan.outer.site_timeout_ns / 1e9
                text = (
                    f"another process, started in another folder, speaks for site {request.site_id}: stop that one, or "
                    f"give this one another site.id; site.takeover=true replaces it, so does {silent_s:g} s of its "
                    "silence"
                )
                raise Refusal(Status.UNAVAILABLE, text, retry_ms=HELD_RETRY_MS, reason=Reason.SUPERSEDED)
            return replace(reply, ticket=answer.ticket)
        self._protocols[request.site_id] = request.protocol
        reply = replace(reply, incarnation=answer.incarnation, standings=answer.standings, ending=answer.ending)
        return as_known(reply, request.protocol)

    def probe(self, ask: ProbeAsk) -> ProbeAnswer:
        """Return why the syncer would refuse a join, without asking the machine."""
        return probed(self.plan, ask)

    def open_push(self, header: PushHeader) -> Reception | PushResult:
        """Admit an update before its first payload byte, or return its answer at once."""
        self._check_fragment(header.fragment)
        self.core.heard(header.site_id)

        declared = (header.site_id, header.incarnation, header.fragment, header.sequence)

        def look(machine: OuterSync) -> tuple[Verdict, int, int]:
            state, verdict = machine.state, Verdict(Outcome.REFUSED, Reason.NOT_JOINED)
            if header.lineage in (0, state.lineage):  # Otherwise it belongs to an earlier lineage.
                verdict = admit(machine, *declared, header.base_version, header.digest)
            return verdict, state.fragments[header.fragment].version, state.epoch

        verdict, version, epoch = self.core.ask(look)
        protocol = self._protocols.get(header.site_id, PROTOCOL)
        if verdict.outcome is not Outcome.ACCEPTED:
            if verdict.reason is not None:
                self.tally.refused(verdict.reason.value)
            result = PushResult(verdict.outcome, version, verdict.reason, verdict.fate, epoch=epoch)
            return as_known(result, protocol)
        if (wrong := self._misshapen(header)) is not None:
            self.tally.refused(wrong.partition(" ")[0])
            raise Refusal(Status.INVALID_ARGUMENT, wrong)
        if (wanting := self.room.wanting(header.payload_bytes)) is not None:
            self.tally.refused("disk_full")
            raise Refusal(Status.UNAVAILABLE, wanting)
        return Reception(self, header, protocol, epoch)

    def _check_fragment(self, fragment: int) -> None:
        if fragment >= len(self.plan.layout.fragments):
            self.tally.refused("fragment")
            raise Refusal(Status.NOT_FOUND, f"fragment is {fragment}: the run has no such fragment")

    def _misshapen(self, header: PushHeader) -> str | None:
        """Return a text that begins with the field whose value is impossible here; None if all values fit."""
        numel = self.plan.layout.fragments[header.fragment].numel
        if not 1 <= header.tokens <= TOKENS_MAX:
            return f"tokens is {header.tokens}: 1 to {TOKENS_MAX} in one update"
        if header.steps < 1:
            return f"steps is {header.steps}: at least 1 in one update"
        allowed = [LOSSLESS] if header.fragment in self.plan.layout.averaged else self.options.up_codecs
        if header.encoding not in allowed:
            return f"encoding is {header.encoding!r}: this run allows {', '.join(allowed)}"
        if header.numel != numel:
            return f"numel is {header.numel}: fragment {header.fragment} has {numel} values"
        codec = make_codec(header.encoding)
        exact, most = codec.payload_bytes(numel), codec.payload_bytes_max(numel)
        if header.payload_bytes > most or (exact == most and header.payload_bytes != exact):
            wanted = f"at most {most}" if exact != most else str(exact)
            return f"payload_bytes is {header.payload_bytes}: {header.encoding} of {numel} values has {wanted}"
        return None

    def watch(self, site: str, incarnation: int) -> Feed:
        """Return the stream of events for ``site``, which begins with the present state."""

        def begin(machine: OuterSync) -> Feed:
            known = machine.state.sites.get(site)
            if known is None or known.incarnation != incarnation:
                raise Refusal(Status.FAILED_PRECONDITION, f"incarnation is {incarnation}: join first")
            if known.status is SiteStatus.EVICTED:
                raise _refusal(Reason.EVICTED, site)
            feed = self.feeds.open(site, incarnation, self._protocols.get(site, PROTOCOL))
            # Events between the join and this instant reached no stream: send the state (again).
            for index, fragment in enumerate(machine.state.fragments):
                feed.put(published(machine, index, fragment.version, fragment.digest))
                for fate in known.lines[index].fates[-2 * machine.options.updates_in_flight_max :]:
                    feed.put(FateTold(fate))
            if machine.state.ending is not None:
                is_over = machine.state.phase is Phase.ENDED
                versions = tuple(fragment.version for fragment in machine.state.fragments) if is_over else ()
                feed.put(FinalAnnounced(machine.state.ending, versions))
            return feed

        return self.core.ask(begin)

    def pull(self, ask: PullAsk, identity: Identity) -> PullSource:
        """Return a version, with the site's fates as of the same instant."""
        self._check_fragment(ask.fragment)

        def look(machine: OuterSync) -> tuple[PullSource, FragmentValues, bool]:
            for name in (ask.site_id, identity.site or ""):
                known = machine.state.sites.get(name)
                if known is not None and known.status is SiteStatus.EVICTED:
                    raise _refusal(Reason.EVICTED, name)
            site = machine.state.sites.get(ask.site_id)
            told = tuple(site.lines[ask.fragment].fates) if site else ()
            source = self.holdings.choose(ask, as_known(told, ask.protocol), machine.state)
            return source, self.holdings.values[ask.fragment], site is not None

        source, held, is_site = self.core.ask(look)
        if ask.protocol < PROTOCOL:
            # It reads a SHA-256 alone, which its first request computes from the values, and a checksum of the whole.
            header = source.header
            if header.version == held.version:
                self._earlier.compute(ask.fragment, held)
            if (digest := self._earlier.known(ask.fragment, header.version, header.digest)) is None:
                text = f"version {header.version} of fragment {ask.fragment} cannot be sent any more"
                raise Refusal(Status.NOT_FOUND, text)
            source = replace(source, header=replace(header, digest=digest, payload_crc32=checksum(source.parts)))
        if is_site:
            self.core.heard(ask.site_id)
            self.tally.count(ask.site_id, payload_bytes_down=max(0, source.header.payload_bytes - ask.offset))
        return source

    def has_newer(self, fragment: int, version: int, timeout_s: float) -> bool:
        """Return whether a version newer than ``version`` is published, or is within ``timeout_s``."""
        self._check_fragment(fragment)
        return self.holdings.has_newer(fragment, version, timeout_s)

    def report(self, report: ReportInfo) -> ReportReply:
        """Take a heartbeat: a sign of life, and figures for status."""
        core = self.core
        core.heard(report.site_id)
        protocol = self._protocols.get(report.site_id)  # None: the form of its digests is unknown.
        earlier = protocol is not None and protocol < PROTOCOL
        if earlier:  # Compute, after a start, the digests that the previous process sent to the site.
            for fragment, held in enumerate(self.holdings.values[: len(report.versions)]):
                if report.versions[fragment] == held.version and any(report.digests[fragment : fragment + 1]):
                    self._earlier.compute(fragment, held)

        def is_known(machine: OuterSync) -> bool:
            site = machine.state.sites.get(report.site_id)
            return site is not None and site.incarnation == report.incarnation and site.status is not SiteStatus.EVICTED

        def look(machine: OuterSync) -> ReportReply:
            known = is_known(machine)
            if known and machine.state.sites[report.site_id].status is SiteStatus.LEFT:
                self.feeds.says(report.site_id, lacks=report.tokens_in_flight > 0)
            state = machine.state
            echoed = report.digests if known and protocol is not None else ()
            retake = self.holdings.differing(report.versions, echoed, self._earlier if earlier else None)
            return ReportReply(state.epoch, state.run_tokens(), machine.progress_ppm(), known, state.ending, retake)

        if core.ask(is_known, early=True) and self.tally.heard(report):  # Status shows it also while the loop is held.
            self.emit("reported", recorded(report))
        reply = core.ask(look)
        if reply.known:
            if (lacking := report.units) is not None:
                asked = UnitsAsked(0, report.site_id, report.incarnation, **asdict(lacking))
                units = core.ask(lambda machine: known_already(machine, asked)) or core.call(
                    lambda call: replace(asked, call=call)
                )
                assert isinstance(units, AnswerUnits), units
                if units.reason is None:
                    reply = replace(reply, units=UnitsTold(units.first, units.pieces))
            bases = {fragment: report.versions[fragment] for fragment in reply.retake}
            for fragment, version in self.tally.differing(report.site_id, bases).items():
                why = f"its copy of fragment {fragment} is not version {version}; it must fetch the whole fragment"
                self.emit("note", {"note": "base_differs", "why": why, "site": report.site_id})
        return reply

    def leave(self, site: str, incarnation: int) -> None:
        """Let ``site`` leave; its last heartbeat is recorded, whenever it was."""
        if (last := self.tally.last_words(site)) is not None:
            self.emit("reported", recorded(last))
        self._done(site, lambda call: SiteLeft(call, site, incarnation))

    def drain(self) -> None:
        """Begin the last round of this part of the run."""
        self.core.call(DrainRequested)

    def evict(self, site: str) -> None:
        """Evict ``site`` from the run."""
        self._done(site, lambda call: SiteEvicted(call, site))

    def readmit(self, site: str) -> None:
        """Let the evicted ``site`` join again."""
        self._done(site, lambda call: SiteReadmitted(call, site))

    def admit(self, site: str, fragment: int, sequence: int) -> None:
        """Let a held update be merged."""
        self._done(site, lambda call: UpdateAdmitted(call, site, fragment, sequence), (fragment, sequence))

    def refuse(self, site: str, fragment: int, sequence: int) -> None:
        """Refuse an accepted update, so that it is never merged."""
        self._done(site, lambda call: UpdateWithdrawn(call, site, fragment, sequence), (fragment, sequence))

    def _done(self, site: str, make: Callable[[int], OuterEvent], update: tuple[int, int] = (0, 0)) -> None:
        """Have the machine handle an operator's request for ``site``, or for its ``update`` (fragment, sequence)."""
        answer, (fragment, sequence) = self.core.call(make), update
        assert isinstance(answer, AnswerDone), answer
        if answer.reason is None:
            return
        if answer.reason in NO_SUCH:
            text = NO_SUCH[answer.reason].format(fragment=fragment, sequence=sequence, site=site)
            raise Refusal(Status.NOT_FOUND, text)
        if answer.reason is Reason.CONFLICT:
            fates = self.core.ask(lambda machine: tuple(machine.state.sites[site].lines[fragment].fates))
            fate, text = next((each for each in fates if each.sequence == sequence), None), "is being merged"
            if fate is not None:
                text = f"was refused: {fate.reason.value}" if fate.reason else f"is in version {fate.version} already"
            raise Refusal(Status.FAILED_PRECONDITION, f"update {sequence} of fragment {fragment} of {site} {text}")
        raise Refusal(Status.FAILED_PRECONDITION, f"site {site}: {answer.reason.value}")

    def promote(self, *, lossy: bool) -> None:
        """Refuse: only a standby can be promoted."""
        del lossy
        raise Refusal(Status.FAILED_PRECONDITION, "this is the syncer, not a standby")

    def detach(self) -> None:
        """Continue without a standby until one has caught up."""
        core, replicator = self.core, self.replicator
        if (mode := replicator.options.mode) != "sync":
            raise Refusal(Status.FAILED_PRECONDITION, f"nothing waits for a standby: replication is {mode}")
        if self.old_copy:  # A second run would begin. What only a site claims stops no operator.
            raise Refusal(Status.FAILED_PRECONDITION, f"this syncer has {self.old_copy}")
        if replicator.detach():
            core.post(StandbyDetached(0))
        until = time.monotonic() + DETACH_S
        while core.held is not None and time.monotonic() < until:
            time.sleep(0.02)  # The held turn is released, and only then can the loop decide the next one.
        core.ask(lambda machine: None)  # Answered once the event is durable; raises what is still wanting.


def _refusal(reason: Reason, site: str) -> Refusal:
    """Return the refusal with its text and its reason: some reasons end a site."""
    status, text = JOIN_REFUSALS[reason]
    return Refusal(status, text.format(site=site), reason=reason)


# --- One incoming push -----------------------------------------------------------------------------------------------

LARGEST = 2.0**100
"""The largest magnitude of an update's values. Larger finite ones could make a sum overflow, and then the honest
updates of that round would be refused together with the faulty one; no training comes near."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """Measurements of an update; ``intact``: its values are those that the site has decoded itself.

    ``norm`` is 0 and ``cosine`` None unless the update is ``finite``, which means within ``LARGEST``.
    """

    finite: bool
    norm: float = 0.0
    cosine: float | None = None
    intact: bool = True


def added(so_far: Sums, block: Sums) -> Sums:
    """Add the next block's sums, taken against the same part of the momentum if there is one.

    An update may take longer to arrive than a version to be made. Then each block is measured against the momentum at
    its arrival, and the cosine is taken to the vector of those parts.
    """
    return Sums(
        max(so_far.largest, block.largest),
        so_far.squares + block.squares,
        so_far.products + block.products,
        so_far.against_squares + block.against_squares,
    )


def vitals_of(sums: Sums) -> Vitals:
    """Return the measurements of an update by the ``sums`` of all its blocks.

    ``cosine`` is None if either vector is zero.
    """
    if sums.largest > LARGEST:
        return Vitals(finite=False)
    lengths = sqrt(sums.squares) * sqrt(sums.against_squares)
    return Vitals(True, sqrt(sums.squares), sums.products / lengths if lengths > 0 else None)


class Inspection:
    """Checks the update that is being written to ``path``. Not thread-safe."""

    def __init__(self, api: Api, path: Path, header: PushHeader) -> None:
        """While values are in memory, ``api.checks`` is entered; ``api.buffers`` has memory for a range's payload."""
        self._api, self._path, self._header = api, path, header
        self._codec = make_codec(header.encoding)
        self._reading = Reading(self._codec.plain, header.numel, header.values_digest)
        self._left = deque(self._reading.ranges())
        """The ranges still to be checked; empty too once the update is malformed."""
        self._begin = 0 if self._codec.plain is self._codec else -1
        """The offset of the plain codec's payload; negative: unknown, or the payload is packed."""
        self._sums = Sums()
        self._has_digest = bool(header.values_digest)
        self._malformed: DecodeError | None = None
        self._file = os.open(path, os.O_RDONLY)
        api.tally.count(header.site_id, payloads_decoded=1)

    def advance(self, here_bytes: int) -> None:
        """Check the ranges that are complete in the first ``here_bytes`` of the payload, which are on the disk."""
        if self._ready(here_bytes) is None:
            return
        with self._api.checks:
            while (bounds := self._ready(here_bytes)) is not None:
                plain, numel, buffers = self._codec.plain, self._header.numel, self._api.buffers
                part = read_part(self._file, plain, numel, *bounds, self._begin, buffers)
                self._look(part, bounds[1] - bounds[0], 0)

    def finish(self) -> Vitals:
        """Check the rest of the complete payload; raise ``DecodeError`` if it is malformed."""
        header = self._header
        self.advance(header.payload_bytes)
        if self._left:  # A frame of the entropy stage has no ranges.
            with self._api.checks:
                _, mapped = opened(self._path, self._codec, header.numel)
                while self._left:
                    self._look(mapped.payload, header.numel, self._left[0][0])
                    mapped.let_go()
        if self._malformed is not None:
            raise self._malformed
        intact = not self._has_digest or self._reading.digest() == header.values_digest
        return replace(vitals_of(self._sums), intact=intact)

    def close(self) -> None:
        """End the inspection and close its file."""
        os.close(self._file)

    def _ready(self, here_bytes: int) -> tuple[int, int] | None:
        """Return the next range, if all its bytes are on the disk."""
        if not self._left or not here_bytes:
            return None
        if self._begin < 0:
            staged = self._header.payload_bytes - len(RAW) == self._codec.payload_bytes(self._header.numel)
            if not staged or os.pread(self._file, len(RAW), 0) != RAW:
                return None
            self._begin = len(RAW)
        sections = self._codec.plain.sections(self._header.numel, *self._left[0])
        return self._left[0] if self._begin + max(map(sum, sections)) <= here_bytes else None

    def _look(self, payload: memoryview, numel: int, start: int) -> None:
        """Check the values of the next range, which begin at ``start`` of a ``payload`` of ``numel``."""
        bounds = self._left[0]
        momentum = self._api.holdings.values[self._header.fragment].optimizer.momentum
        against = momentum[slice(*bounds)] if momentum is not None else None
        try:
            block = self._reading.read(payload, numel, start, bounds[1] - bounds[0], against)
            self._sums = added(self._sums, block)
        except NonFinitePayload:  # The rest may still be malformed.
            self._sums = Sums(largest=inf)
            self._has_digest = False
        except DecodeError as error:
            self._malformed = error
            self._left.clear()
            return
        self._left.popleft()


DECLARED = tuple({each.name for each in fields(UpdateArrived)} & {each.name for each in fields(PushHeader)})
"""The fields that a site declares of an update and the machine gets, under the same names."""


class Reception:
    """One push; satisfies ``wire.handlers.PushSession``.  Its ack means: durable in spool and journal."""

    def __init__(self, api: Api, header: PushHeader, protocol: int, epoch: int) -> None:
        """``protocol`` is the site's, ``epoch`` the syncer's."""
        self._api, self._header, self._protocol, self._epoch = api, header, protocol, epoch
        self._spool = api.core.store.spool
        self._busy_s, self._begun_s = 0.0, time.perf_counter()
        with _storing():
            self._partial = self._spool.open_partial(header)
        with _storing(self._partial):
            self._inspection = Inspection(api, self._partial.path, header)
        try:
            with _storing(self._partial):
                self._inspection.advance(self.offset)  # Check once what an earlier attempt has brought.
        except BaseException:
            self.close()  # The caller gets no session to close.
            raise

    @property
    def offset(self) -> int:
        """The number of bytes received, in this attempt and earlier ones."""
        return self._partial.offset

    def write(self, offset: int, data: memoryview) -> None:
        """Store the next bytes, and check the values that they complete."""
        assert offset == self._partial.offset, (offset, self._partial.offset)
        began_s = time.perf_counter()
        with _storing(self._partial):
            self._partial.write(data)
            self._inspection.advance(self._partial.offset)
        self._busy_s += time.perf_counter() - began_s
        self._api.tally.count(self._header.site_id, payload_bytes_up=len(data))
        self._api.core.heard(self._header.site_id)

    def commit(self, digest: str) -> PushResult:
        """Check the rest, make the update durable, and let the machine decide."""
        header = self._header
        began_s = time.perf_counter()
        if digest != header.digest or self._partial.hash.text() != header.digest:
            self._partial.discard()
            raise Refusal(Status.DATA_LOSS, "digest of the payload is not the declared one; send it again")
        try:
            with _storing(self._partial):
                found = self._inspection.finish()
        except DecodeError as error:
            self._partial.discard()
            raise Refusal(Status.INVALID_ARGUMENT, f"payload is no {header.encoding}: {error}") from error
        if not (found.finite and found.intact):
            self._partial.discard()
            return self._decided("", found)
        with _storing(self._partial):  # Never retried with the same pages: after a failed fsync they count as written.
            reference = self._spool.keep(self._partial)
        now_s = time.perf_counter()
        self._api.tally.received(reference, self._busy_s + now_s - began_s, now_s - self._begun_s)
        return self._decided(reference, found)

    def _decided(self, reference: str, vitals: Vitals) -> PushResult:
        """Let the machine decide on the update, and settle its payload: ``reference``, "" if it is not kept."""
        header, tally = self._header, self._api.tally
        try:
            answer = self._api.core.call(
                lambda call: UpdateArrived(
                    call,
                    header.site_id,
                    **{name: getattr(header, name) for name in DECLARED},
                    payload=reference,
                    **asdict(vitals),
                ),
                late=lambda answer: self._settle(reference, answer),
            )
        except NotHandedIn:
            if reference:
                self._spool.settle(reference, keep=False, back=self._partial)
            raise
        assert isinstance(answer, AnswerPush), answer
        if answer.outcome is Outcome.REFUSED and answer.reason is not None:
            tally.refused(answer.reason.value)
        if answer.reason is Reason.CORRUPT:
            tally.count(header.site_id, updates_corrupt=1)
            why = f"update {header.sequence} of fragment {header.fragment} decodes to other values than at the site"
            self._api.emit("note", {"note": "update_corrupt", "why": why, "site": header.site_id})
        self._settle(reference, answer, self._partial)
        result = PushResult(answer.outcome, answer.version, answer.reason, answer.fate, epoch=self._epoch)
        return as_known(result, self._protocol)

    def _settle(self, reference: str, answer: Answer, partial: PartialUpdate | None = None) -> None:
        """Release or keep the payload, as the answer requires; without ``partial`` no attempt can resume it."""
        assert isinstance(answer, AnswerPush), answer
        if not reference:
            return
        if answer.outcome is Outcome.RETRY:
            self._spool.settle(reference, keep=False, back=partial)
        elif answer.outcome is Outcome.REFUSED and answer.reason is not Reason.FORGOTTEN:
            self._spool.settle(reference, keep=False)  # Never accepted by this name: nothing can need it.
        else:
            self._spool.settle(reference, keep=True)
            if answer.fate is not None or answer.outcome is Outcome.REFUSED:
                self._api.core.store.release(reference)  # Decided long ago: only a replay could still need it.

    def close(self) -> None:
        """End the push; without a commit its bytes stay for another attempt."""
        self._inspection.close()
        try:
            self._partial.close()
        except OSError:
            self._partial.discard()  # The file's content is not what was counted.


@contextmanager
def _storing(partial: PartialUpdate | None = None) -> Iterator[None]:
    """Turn an error of the disk into a refusal for now, and discard ``partial``: the site sends all of it again."""
    try:
        yield
    except OSError as error:
        if partial is not None:
            partial.discard()
        why = "disk full" if is_full(error) else "the update cannot be stored here now"
        raise Refusal(Status.UNAVAILABLE, f"{why}: {error.strerror or error}") from error
