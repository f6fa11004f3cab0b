"""Implement the network's calls (``wire.handlers.SyncerApi``) by way of the decision loop.

``difference`` compares a caller's run with the run that is served here, and names the first difference.

Requests for data units come with the heartbeat. Most change nothing, and are answered without a journal record.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from diloco.codec.base import Buffers, is_sha256
from diloco.codec.registry import make_codec
from diloco.outer.fragments import Layout
from diloco.sync.admission import Verdict
from diloco.sync.agreement import CORPUS, PROTOCOL, PROTOCOL_OLDEST, Agreement, disagreement
from diloco.sync.effects import AnswerDone, AnswerJoin, AnswerUnits, AskToConfirm
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
    UpdateWithdrawn,
)
from diloco.sync.fates import known_already
from diloco.sync.state import Status as SiteStatus
from diloco.syncer import publish
from diloco.syncer.core import NotHandedIn
from diloco.syncer.receive import Reception
from diloco.syncer.status import recorded
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

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco.sync.events import OuterEvent
    from diloco.sync.syncer import OuterSync
    from diloco.syncer.core import Core, Room
    from diloco.syncer.options import RunPlan, SyncerOptions
    from diloco.syncer.publish import Feed, Feeds, Holdings
    from diloco.syncer.replicator import Replicator
    from diloco.syncer.snapshots import FragmentValues
    from diloco.syncer.status import Tally
    from diloco.wire.handlers import PullSource
    from diloco.wire.identity import Identity
    from diloco.wire.messages import ProbeAsk
    from diloco.wire.options import ServerOptions


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


def answered(core: Core, report: ReportInfo) -> UnitsTold | None:
    """Return the part of the site's unit list that it lacks; None if it asks for none, or none is leased to it."""
    ask = report.units
    if ask is None:
        return None
    event = UnitsAsked(0, report.site_id, report.incarnation, ask.known, ask.begin, ask.upto, ask.floor, ask.again)

    def look(machine: OuterSync) -> AnswerUnits | None:
        return known_already(machine.options, machine.state, event)

    told = core.ask(look) or core.call(lambda call: replace(event, call=call))
    assert isinstance(told, AnswerUnits), told
    return UnitsTold(told.first, told.pieces) if told.reason is None else None


JOIN_REFUSALS = MappingProxyType(
    {
        Reason.EVICTED: (Status.PERMISSION_DENIED, "site {site} was put out of the run by an operator"),
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


class Api:
    """Called from many threads; the decision loop or the tally's lock guards all state."""

    def __init__(
        self,
        options: SyncerOptions,
        plan: RunPlan,
        network: ServerOptions,
        core: Core,
        holdings: Holdings,
        feeds: Feeds,
        tally: Tally,
        room: Room,
        replicator: Replicator,
        emit: Callable[[str, dict[str, object]], None],
        *,
        status: Callable[[], dict[str, object]],
        snapshot: Callable[[], None],
    ) -> None:
        """``status`` and ``snapshot`` carry out the operator's requests of these names."""
        self._options, self._plan, self._network = options, plan, network
        self._core, self._holdings, self._feeds, self.tally = core, holdings, feeds, tally
        self._room, self._replicator, self._emit = room, replicator, emit
        self.status, self.snapshot = status, snapshot
        self._protocols: dict[str, int] = {}
        self._earlier = publish.EarlierDigests(len(plan.layout.fragments))
        self._checks = threading.BoundedSemaphore(network.checks_max)
        self._buffers = Buffers(network.checks_max)  # Memory for the checks: one update's range in each buffer.

    def join(self, request: JoinAsk) -> JoinReply:
        """Let a learner process join, if it agrees with this syncer on everything that is shared."""
        theirs = Agreement(
            request.protocol, request.run_id, request.lineage, request.layout_fingerprint, request.shared_config
        )
        lineage = self._core.ask(lambda machine: machine.state.lineage)
        if (text := difference(self._plan, lineage, theirs, request.layout_json)) is not None:
            raise Refusal(Status.FAILED_PRECONDITION, text)
        corpus = request.shared_config.get(CORPUS, "")
        answer = self._core.call(
            lambda call: JoinRequested(call, request.site_id, request.process, request.ticket, corpus)
        )
        assert isinstance(answer, AnswerJoin | AskToConfirm), answer
        if isinstance(answer, AnswerJoin) and answer.reason is Reason.OTHER_DATA:
            units = self._core.ask(lambda machine: machine.state.units)
            here = units.corpus[:12] if units is not None else ""
            raise Refusal(
                Status.FAILED_PRECONDITION,
                f"{CORPUS} is {corpus[:12]} at the site and {here} at the syncer: the run leases units of one text "
                "(data.leased), and this site has prepared another",
            )
        if isinstance(answer, AnswerJoin) and answer.reason is not None:
            raise _refusal(answer.reason, request.site_id)

        settings = LearnerSettings(
            heartbeat_ns=int(self._options.heartbeat_s * 1e9),
            chunk_bytes=self._network.chunk_bytes,
            updates_in_flight_max=self._plan.outer.updates_in_flight_max,
            site_timeout_ns=self._plan.outer.site_timeout_ns,
            keep_until_decided=self._replicator.acks_first,
        )

        def look(machine: OuterSync) -> JoinReply:
            state = machine.state
            run = (state.lineage, (), state.run_tokens(), machine.progress_ppm(), None, settings)
            return JoinReply(state.epoch, 0, *run, protocol=min(request.protocol, PROTOCOL))

        reply = self._core.ask(look)
        if isinstance(answer, AskToConfirm):
            self._refuse_beside_another_folder(request)
            return replace(reply, ticket=answer.ticket)
        self._protocols[request.site_id] = request.protocol
        reply = replace(reply, incarnation=answer.incarnation, standings=answer.standings, ending=answer.ending)
        return publish.as_known(reply, request.protocol)

    def _refuse_beside_another_folder(self, request: JoinAsk) -> None:
        """Refuse for now a process that would replace a live one of another folder: two machines with one name.

        Process ids of earlier releases, and of one that takes over, name no folder.
        """

        def holder(machine: OuterSync) -> tuple[str, bool]:
            site = machine.state.sites.get(request.site_id)
            return (site.process, site.status is SiteStatus.LIVE) if site is not None else ("", False)

        process, is_live = self._core.ask(holder)
        both_named = len(process) == len(request.process) == PROCESS_DIGITS + FOLDER_DIGITS
        if is_live and both_named and process[PROCESS_DIGITS:] != request.process[PROCESS_DIGITS:]:
            silent_s = self._plan.outer.site_timeout_ns / 1e9
            text = (
                f"another process, started in another folder, speaks for site {request.site_id}: stop that one, or "
                f"give this one another site.id; site.takeover=true replaces it, so does {silent_s:g} s of its silence"
            )
            raise Refusal(Status.UNAVAILABLE, text, retry_ms=HELD_RETRY_MS, reason=Reason.SUPERSEDED)

    def _protocol(self, site: str) -> int:
        """Return the protocol version of ``site``; the newest until it has rejoined this process, as every site does.

        Taken for an older one, a site would get digests that do not match its own. An older one gets those of its own
        updates as it made them, and cannot read the others: it asks again once it has joined.
        """
        return self._protocols.get(site, PROTOCOL)

    def probe(self, ask: ProbeAsk) -> ProbeAnswer:
        """Return what a join would be refused for, without asking the machine."""
        return probed(self._plan, ask)

    def open_push(self, header: PushHeader) -> Reception | PushResult:
        """Admit an update before its first payload byte, or return its answer at once."""
        self._check_fragment(header.fragment)
        self._core.heard(header.site_id)

        def look(machine: OuterSync) -> tuple[Verdict, int, int]:
            state, verdict = machine.state, Verdict(Outcome.REFUSED, Reason.NOT_JOINED)
            if header.lineage in (0, state.lineage):  # Otherwise it belongs to an earlier lineage.
                verdict = machine.admit(
                    header.site_id,
                    header.incarnation,
                    header.fragment,
                    header.sequence,
                    header.base_version,
                    header.digest,
                )
            return verdict, state.fragments[header.fragment].version, state.epoch

        verdict, version, epoch = self._core.ask(look)
        protocol = self._protocol(header.site_id)
        if verdict.outcome is not Outcome.ACCEPTED:
            if verdict.reason is not None:
                self.tally.refused(verdict.reason.value)
            result = PushResult(verdict.outcome, version, verdict.reason, verdict.fate, epoch=epoch)
            return publish.as_known(result, protocol)
        self._check_shape(header)
        if (wanting := self._room.wanting(header.payload_bytes)) is not None:
            self.tally.refused("disk_full")
            raise Refusal(Status.UNAVAILABLE, wanting)
        return Reception(
            self._core, self._holdings, header, self.tally, self._emit, protocol, epoch, self._checks, self._buffers
        )

    def _check_fragment(self, fragment: int) -> None:
        if fragment >= len(self._plan.layout.fragments):
            self.tally.refused("fragment")
            raise Refusal(Status.NOT_FOUND, f"fragment is {fragment}: the run has no such fragment")

    def _check_shape(self, header: PushHeader) -> None:
        """Refuse, before reading a byte, impossible values and sizes that do not fit fragment and encoding."""
        numel = self._plan.layout.fragments[header.fragment].numel
        if not 1 <= header.tokens <= TOKENS_MAX:
            raise self._malformed("tokens", f"tokens is {header.tokens}: 1 to {TOKENS_MAX} in one update")
        if header.steps < 1:
            raise self._malformed("steps", f"steps is {header.steps}: at least 1 in one update")
        if header.encoding not in self._options.up_codecs:
            allowed = ", ".join(self._options.up_codecs)
            raise self._malformed("encoding", f"encoding is {header.encoding!r}: this run allows {allowed}")
        if header.numel != numel:
            raise self._malformed("numel", f"numel is {header.numel}: fragment {header.fragment} has {numel} values")
        codec = make_codec(header.encoding)
        exact, most = codec.payload_bytes(numel), codec.payload_bytes_max(numel)
        if header.payload_bytes > most or (exact == most and header.payload_bytes != exact):
            wanted = f"at most {most}" if exact != most else str(exact)
            text = f"payload_bytes is {header.payload_bytes}: {header.encoding} of {numel} values has {wanted}"
            raise self._malformed("payload_bytes", text)

    def _malformed(self, field: str, text: str) -> Refusal:
        self.tally.refused(field)
        return Refusal(Status.INVALID_ARGUMENT, text)

    def watch(self, site: str, incarnation: int) -> Feed:
        """Return the stream of events for ``site``, which begins with the present state."""

        def begin(machine: OuterSync) -> Feed:
            known = machine.state.sites.get(site)
            if known is None or known.incarnation != incarnation:
                raise Refusal(Status.FAILED_PRECONDITION, f"incarnation is {incarnation}: join first")
            if known.status is SiteStatus.EVICTED:
                raise _refusal(Reason.EVICTED, site)
            feed = self._feeds.open(site, incarnation, self._protocol(site))
            # Events between the join and this instant reached no stream: send the state (again).
            for index, fragment in enumerate(machine.state.fragments):
                feed.put(publish.published(machine, index, fragment.version, fragment.digest))
                for fate in known.lines[index].fates[-2 * machine.options.updates_in_flight_max :]:
                    feed.put(FateTold(fate))
            if machine.state.ending is not None:
                feed.put(FinalAnnounced(machine.state.ending))
            return feed

        return self._core.ask(begin)

    def pull(self, ask: PullAsk, identity: Identity) -> PullSource:
        """Return a version, with the site's fates as of the same instant."""
        self._check_fragment(ask.fragment)
        holdings = self._holdings

        def look(machine: OuterSync) -> tuple[PullSource, FragmentValues, bool]:
            for name in (ask.site_id, identity.site or ""):
                known = machine.state.sites.get(name)
                if known is not None and known.status is SiteStatus.EVICTED:
                    raise _refusal(Reason.EVICTED, name)
            site = machine.state.sites.get(ask.site_id)
            told = tuple(site.lines[ask.fragment].fates) if site else ()
            source = holdings.choose(ask, publish.as_known(told, ask.protocol), machine.state)
            return source, holdings.values[ask.fragment], site is not None

        source, held, known = self._core.ask(look)
        if ask.protocol < PROTOCOL:
            source = self._as_in_2(source, held)
        if known:
            self._core.heard(ask.site_id)
            self.tally.count(ask.site_id, payload_bytes_down=max(0, source.header.payload_bytes - ask.offset))
        return source

    def has_newer(self, fragment: int, version: int, timeout_s: float) -> bool:
        """Return whether a version newer than ``version`` is published, or is within ``timeout_s``."""
        self._check_fragment(fragment)
        return self._holdings.has_newer(fragment, version, timeout_s)

    def _as_in_2(self, source: PullSource, held: FragmentValues) -> PullSource:
        """Return ``source`` with the digest of protocol 2, which the first request for it computes from the values, and
        a checksum of the whole besides those of the chunks."""
        fragment, version, digest = source.header.fragment, source.header.version, source.header.digest
        if version == held.version:
            digest = self._earlier.of(fragment, held)
        elif not is_sha256(digest):
            known = self._earlier.known(fragment, version)
            if known is None:
                text = f"version {version} of fragment {fragment} cannot be sent any more"
                raise Refusal(Status.NOT_FOUND, text)
            digest = known
        header = replace(source.header, digest=digest, payload_crc32=checksum(source.parts))
        return replace(source, header=header)

    def report(self, report: ReportInfo) -> ReportReply:
        """Take a heartbeat: a sign of life, and figures for status."""
        core = self._core
        core.heard(report.site_id)
        protocol = self._protocols.get(report.site_id)  # None: unknown in which form it got its digests.
        earlier = protocol is not None and protocol < PROTOCOL
        if earlier:  # Compute, after a start, the digests that the previous process sent to the site.
            for fragment, held in enumerate(self._holdings.values[: len(report.versions)]):
                if report.versions[fragment] == held.version and any(report.digests[fragment : fragment + 1]):
                    self._earlier.of(fragment, held)

        def told(fragment: int, version: int, digest: str) -> str | None:
            return self._earlier.known(fragment, version) if earlier and not is_sha256(digest) else digest

        def look(machine: OuterSync) -> tuple[ReportReply, dict[int, int]]:
            site = machine.state.sites.get(report.site_id)
            known = (
                site is not None and site.incarnation == report.incarnation and site.status is not SiteStatus.EVICTED
            )
            if known and site is not None and site.status is SiteStatus.LEFT:
                self._feeds.says(report.site_id, lacks=report.tokens_in_flight > 0)
            state = machine.state
            compared = known and protocol is not None
            bases = self._holdings.differing(report.versions, report.digests, told) if compared else {}
            reply = ReportReply(
                state.epoch, state.run_tokens(), machine.progress_ppm(), known, state.ending, tuple(sorted(bases))
            )
            return reply, bases

        reply, bases = core.ask(look)
        if reply.known:
            reply = replace(reply, units=answered(core, report))
            if self.tally.heard(report):
                self._emit("reported", recorded(report))
            for fragment, version in self.tally.differing(report.site_id, bases).items():
                why = f"what it holds of fragment {fragment} is not version {version}; it is told to take it whole"
                self._emit("note", {"note": "base_differs", "why": why, "site": report.site_id})
        return reply

    def leave(self, site: str, incarnation: int) -> None:
        """Let ``site`` leave; its last heartbeat is recorded, whenever it was."""
        if (last := self.tally.last_words(site)) is not None:
            self._emit("reported", recorded(last))
        self._done(site, lambda call: SiteLeft(call, site, incarnation))

    def drain(self) -> None:
        """Begin the last round of this part of the run."""
        self._core.call(DrainRequested)

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
        answer, (fragment, sequence) = self._core.call(make), update
        assert isinstance(answer, AnswerDone), answer
        if answer.reason is None:
            return
        if answer.reason in NO_SUCH:
            text = NO_SUCH[answer.reason].format(fragment=fragment, sequence=sequence, site=site)
            raise Refusal(Status.NOT_FOUND, text)
        if answer.reason is Reason.CONFLICT:
            fate = self._core.ask(lambda machine: _fate(machine, site, fragment, sequence))
            raise Refusal(Status.FAILED_PRECONDITION, f"update {sequence} of fragment {fragment} of {site} {fate}")
        raise Refusal(Status.FAILED_PRECONDITION, f"site {site}: {answer.reason.value}")

    def promote(self, *, lossy: bool) -> None:
        """Refuse: only a standby can be promoted."""
        del lossy
        raise Refusal(Status.FAILED_PRECONDITION, "this is no standby: it is the syncer")

    def detach(self) -> None:
        """Continue without a standby until one has caught up."""
        core, replicator = self._core, self._replicator
        if replicator.options.mode != "sync":
            raise Refusal(
                Status.FAILED_PRECONDITION, f"nothing waits for a standby: replication is {replicator.options.mode}"
            )
        is_new = replicator.detach()
        until = time.monotonic() + DETACH_S
        while core.held is not None and time.monotonic() < until:
            time.sleep(0.02)  # The held turn is released, and only then can the loop decide the next one.
        try:
            core.call(StandbyDetached)
        except NotHandedIn:
            if is_new:  # The loop no longer waits for the standby: journal that when it goes on.
                core.post(StandbyDetached(0))
            raise


def _refusal(reason: Reason, site: str) -> Refusal:
    """Return the refusal's text with its reason: a site ends for some reasons."""
    status, text = JOIN_REFUSALS[reason]
    return Refusal(status, text.format(site=site), reason=reason)


def _fate(machine: OuterSync, site: str, fragment: int, sequence: int) -> str:
    """Describe the fate that an update already has, for an operator who requested another."""
    for fate in machine.state.sites[site].lines[fragment].fates:
        if fate.sequence == sequence:
            return f"was refused: {fate.reason.value}" if fate.reason else f"is in version {fate.version} already"
    return "is being merged"
