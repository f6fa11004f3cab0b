"""What the network may ask of the syncer (``wire.service.SyncerApi``), answered through the decision loop.

Agreement.  ``difference`` says whether a caller means the run that is served here, in words that name the first thing
in which it does not.

Units.  Requests for units of the data come with the heartbeat.  Most change nothing, and are answered without a record.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from diloco.codec import native
from diloco.codec.base import is_sha256
from diloco.codec.buffers import Buffers
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
from diloco.syncer.outer_step import standstill_facts
from diloco.syncer.receive import Reception
from diloco.syncer.status import Tally, describe
from diloco.wire.messages import (
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
    from diloco.sync.syncer import OuterSync
    from diloco.syncer.core import Core
    from diloco.syncer.holdings import Choice
    from diloco.syncer.options import RunPlan
    from diloco.syncer.publish import Feed
    from diloco.syncer.server import Syncer
    from diloco.syncer.snapshots import FragmentValues
    from diloco.wire.identity import Identity
    from diloco.wire.messages import ProbeAsk
    from diloco.wire.service import PullSource


def difference(plan: RunPlan, lineage: int, theirs: Agreement, layout_json: bytes) -> str | None:
    """The first difference of ``theirs`` to ``plan`` in its ``lineage``; None where there is none.

    Refuses with INVALID_ARGUMENT a ``layout_json`` that describes no layout.
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


def other_data(machine: OuterSync, corpus: str) -> str:
    """In words that ``corpus``, which a site draws from, is not the run's."""
    units = machine.state.units
    there = units.corpus if units is not None else ""
    return (
        f"{CORPUS} is {corpus[:12]} at the site and {there[:12]} at the syncer: the run leases units of one text "
        "(data.leased), and this site has prepared another"
    )


def probed(plan: RunPlan, ask: ProbeAsk) -> ProbeAnswer:
    """The answer to a probe, but for who asks and when; what the ask leaves empty is not compared."""
    text = None
    if ask.run_id:
        fingerprint = ask.layout_fingerprint or plan.agreement.layout_fingerprint
        theirs = Agreement(ask.protocol, ask.run_id, 0, fingerprint, ask.shared_config)
        text = difference(plan, 0, theirs, ask.layout_json)
    ours = plan.agreement
    told = (text or "")[:TEXT_CHARS_MAX]
    return ProbeAnswer(PROTOCOL, PROTOCOL_OLDEST, ours.run_id, difference=told, shared_config=ours.shared)


def answered(core: Core, report: ReportInfo) -> UnitsTold | None:
    """The list of the site, as far as it did not know it; None where it asks for none, or none is leased to it."""
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
NO_SUCH_UPDATE = MappingProxyType(
    {
        Reason.BAD_BASE: "fragment is {fragment}: the run has no such fragment",
        Reason.GAP: "sequence is {sequence}: {site} has sent no such update of fragment {fragment}",
        Reason.FORGOTTEN: "sequence is {sequence}: decided too long ago to say how",
    }
)

TOKENS_MAX = 1 << 40
"""Tokens that one update may claim: far more than any has, and the run's sum stays a number that the wire carries."""


class Api:
    """Called from many threads; all state is behind the decision loop or the tally's lock."""

    def __init__(self, syncer: Syncer) -> None:
        self._syncer = syncer
        self.tally = Tally()
        self._protocols: dict[str, int] = {}
        self._earlier = publish.EarlierDigests(len(syncer.plan.layout.fragments))
        self._checks = threading.BoundedSemaphore(syncer.network.checks_max)
        self._buffers = Buffers(syncer.network.checks_max)  # What is looked at lies there, one update's range in each.

    def join(self, request: JoinAsk, identity: Identity) -> JoinReply:
        """Take a learner process in, if it agrees with us on everything that is shared."""
        del identity
        syncer, core = self._syncer, self._syncer.core
        self._agree(request)
        corpus = request.shared_config.get(CORPUS, "")
        answer = core.call(lambda call: JoinRequested(call, request.site_id, request.process, request.ticket, corpus))
        assert isinstance(answer, AnswerJoin | AskToConfirm), answer
        if isinstance(answer, AnswerJoin) and answer.reason is Reason.OTHER_DATA:
            raise Refusal(Status.FAILED_PRECONDITION, core.ask(lambda machine: other_data(machine, corpus)))
        if isinstance(answer, AnswerJoin) and answer.reason is not None:
            raise _refusal(answer.reason, request.site_id)
        epoch, lineage, run_tokens, progress_ppm = core.ask(_standing_of_run)
        options = syncer.plan.outer
        settings = LearnerSettings(
            heartbeat_ns=int(syncer.options.heartbeat_s * 1e9),
            chunk_bytes=syncer.network.chunk_bytes,
            updates_in_flight_max=options.updates_in_flight_max,
            site_timeout_ns=options.site_timeout_ns,
            keep_until_decided=syncer.replicator.acks_first,
        )
        if isinstance(answer, AskToConfirm):
            unanswered = JoinReply(
                epoch, 0, lineage, (), run_tokens, progress_ppm, None, settings, ticket=answer.ticket
            )
            return publish.join_reply(unanswered, request.protocol)
        self._protocols[request.site_id] = request.protocol
        reply = JoinReply(
            epoch=epoch,
            incarnation=answer.incarnation,
            lineage=lineage,
            standings=answer.standings,
            run_tokens=run_tokens,
            progress_ppm=progress_ppm,
            ending=answer.ending,
            settings=settings,
        )
        return publish.join_reply(reply, request.protocol)

    def _protocol(self, site: str) -> int:
        """What ``site`` speaks; until it has joined this process, as every site does when it comes back, the newest.

        Taken for an older one, a site would be told digests that are none of its own.  One that is older is told those
        of its own updates as it made them, and cannot read the others: it asks again once it has joined.
        """
        return self._protocols.get(site, PROTOCOL)

    def _agree(self, request: JoinAsk) -> None:
        lineage = self._syncer.core.ask(lambda machine: machine.state.lineage)
        theirs = Agreement(
            request.protocol, request.run_id, request.lineage, request.layout_fingerprint, request.shared_config
        )
        text = difference(self._syncer.plan, lineage, theirs, request.layout_json)
        if text is not None:
            raise Refusal(Status.FAILED_PRECONDITION, text)

    def probe(self, ask: ProbeAsk, identity: Identity) -> ProbeAnswer:
        """What a join would be refused for; the machine is not asked."""
        del identity
        return probed(self._syncer.plan, ask)

    def open_push(self, header: PushHeader, identity: Identity) -> Reception | PushResult:
        """Admit an update before its first payload byte, or answer at once."""
        del identity
        core = self._syncer.core
        self._check_fragment(header.fragment)
        core.heard(header.site_id)

        def look(machine: OuterSync) -> tuple[Verdict, int, int]:
            state = machine.state
            if header.lineage not in (0, state.lineage):  # What it was sent for is no more, whatever its numbers are.
                gone = Verdict(Outcome.REFUSED, Reason.NOT_JOINED)
                return gone, _version(machine, header.fragment), state.epoch
            verdict = machine.admit(
                header.site_id,
                header.incarnation,
                header.fragment,
                header.sequence,
                header.base_version,
                header.digest,
            )
            return verdict, _version(machine, header.fragment), state.epoch

        verdict, version, epoch = core.ask(look)
        if verdict.outcome is not Outcome.ACCEPTED:
            if verdict.reason is not None:
                self.tally.refused(verdict.reason.value)
            result = PushResult(verdict.outcome, version, verdict.reason, verdict.fate, epoch=epoch)
            return publish.push_result(result, self._protocol(header.site_id))
        self._check_shape(header)
        if (wanting := self._syncer.room.wanting(header.payload_bytes)) is not None:
            self.tally.refused("disk_full")
            raise Refusal(Status.UNAVAILABLE, wanting)
        return Reception(
            core,
            self._syncer.store,
            header,
            self.tally,
            lambda fragment: self._syncer.holdings.values[fragment].optimizer.momentum,
            lambda reason: self._refused(header, reason),
            self._protocol(header.site_id),
            epoch,
            self._checks,
            self._buffers,
            self._syncer.costs.received,
        )

    def _check_fragment(self, fragment: int) -> None:
        if fragment >= len(self._syncer.plan.layout.fragments):
            self.tally.refused("fragment")
            raise Refusal(Status.NOT_FOUND, f"fragment is {fragment}: the run has no such fragment")

    def _refused(self, header: PushHeader, reason: Reason) -> None:
        """A whole update was not accepted."""
        self.tally.refused(reason.value)
        if reason is Reason.CORRUPT:
            self.tally.corrupt(header.site_id)
            where = f"update {header.sequence} of fragment {header.fragment}"
            self._syncer.note("update_corrupt", f"{where} decodes to other values here than there", header.site_id)

    def _check_shape(self, header: PushHeader) -> None:
        """What is declared must be possible, and of the size that fragment and encoding give, before a byte is read."""
        numel = self._syncer.plan.layout.fragments[header.fragment].numel
        if not 1 <= header.tokens <= TOKENS_MAX:
            raise self._malformed("tokens", f"tokens is {header.tokens}: 1 to {TOKENS_MAX} in one update")
        if header.steps < 1:
            raise self._malformed("steps", f"steps is {header.steps}: at least 1 in one update")
        if header.encoding not in self._syncer.options.up_codecs:
            allowed = ", ".join(self._syncer.options.up_codecs)
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

    def watch(self, site: str, incarnation: int, identity: Identity) -> Feed:
        """The events for ``site`` from now on, after how everything stands."""
        del identity
        feeds = self._syncer.feeds

        def begin(machine: OuterSync) -> Feed:
            known = machine.state.sites.get(site)
            if known is None or known.incarnation != incarnation:
                raise Refusal(Status.FAILED_PRECONDITION, f"incarnation is {incarnation}: join first")
            if known.status is SiteStatus.EVICTED:
                raise _refusal(Reason.EVICTED, site)
            feed = feeds.open(site, incarnation, self._protocol(site))
            # What was said between the join and this instant was said to nobody: say it (again).
            for index, fragment in enumerate(machine.state.fragments):
                feed.put(self._syncer.published(machine, index, fragment.version, fragment.digest))
                for fate in known.lines[index].fates[-2 * machine.options.updates_in_flight_max :]:
                    feed.put(FateTold(fate))
            if machine.state.ending is not None:
                feed.put(FinalAnnounced(machine.state.ending))
            return feed

        return self._syncer.core.ask(begin)

    def pull(self, ask: PullAsk, identity: Identity) -> PullSource:
        """A version, with the site's fates as of the same instant."""
        syncer = self._syncer
        self._check_fragment(ask.fragment)

        def look(machine: OuterSync) -> tuple[Choice, FragmentValues, bool, int, int]:
            for name in (ask.site_id, identity.site or ""):
                known = machine.state.sites.get(name)
                if known is not None and known.status is SiteStatus.EVICTED:
                    raise _refusal(Reason.EVICTED, name)
            site = machine.state.sites.get(ask.site_id)
            told = site.lines[ask.fragment].fates if site else ()
            choice = syncer.holdings.choose(ask, publish.fates(told, ask.protocol))
            sites = syncer.holdings.sites_in(ask.fragment, choice.version, machine.state)
            return choice, syncer.holdings.values[ask.fragment], site is not None, machine.state.epoch, sites

        choice, held, known, epoch, sites = syncer.core.ask(look)
        if ask.protocol < PROTOCOL:
            choice = self._as_in_2(choice, held)
        source = choice.source(ask.protocol)
        source = replace(source, header=replace(source.header, epoch=epoch, sites=sites))
        if known:
            syncer.core.heard(ask.site_id)
            self.tally.sent(ask.site_id, max(0, source.header.payload_bytes - ask.offset))
        return source

    def has_newer(self, fragment: int, version: int, timeout_s: float) -> bool:
        """Whether a version newer than ``version`` is published, or is within ``timeout_s``."""
        self._check_fragment(fragment)
        syncer = self._syncer
        return syncer.made.wait_for(lambda: syncer.holdings.values[fragment].version > version, timeout_s)

    def _as_in_2(self, choice: Choice, held: FragmentValues) -> Choice:
        """With the digest that protocol 2 knows; a pass over the values where it is the first to ask for it."""
        if choice.version == held.version:
            return replace(choice, digest=self._earlier.of(choice.fragment, held))
        digest = choice.digest if is_sha256(choice.digest) else self._earlier.known(choice.fragment, choice.version)
        if digest is None:
            text = f"version {choice.version} of fragment {choice.fragment} cannot be sent any more"
            raise Refusal(Status.NOT_FOUND, text)
        return replace(choice, digest=digest)

    def report(self, report: ReportInfo, identity: Identity) -> ReportReply:
        """A heartbeat: a sign of life, and figures for status."""
        del identity
        core = self._syncer.core
        core.heard(report.site_id)
        protocol = self._protocols.get(report.site_id)  # None: who knows how it was told the digests that it compares.
        earlier = protocol is not None and protocol < PROTOCOL
        if earlier:  # After a start nobody has asked yet for what the site was told by the process before.
            for fragment, held in enumerate(self._syncer.holdings.values[: len(report.versions)]):
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
                self._syncer.feeds.says(report.site_id, lacks=report.tokens_in_flight > 0)
            state = machine.state
            compared = known and protocol is not None
            bases = self._syncer.holdings.differing(report.versions, report.digests, told) if compared else {}
            reply = ReportReply(
                state.epoch, state.run_tokens(), machine.progress_ppm(), known, state.ending, tuple(sorted(bases))
            )
            return reply, bases

        reply, bases = core.ask(look)
        if reply.known:
            reply = replace(reply, units=answered(core, report))
            self.tally.heard(report)
            for fragment, version in self.tally.differing(report.site_id, bases).items():
                why = f"what it holds of fragment {fragment} is not version {version}; it is told to take it whole"
                self._syncer.note("base_differs", why, report.site_id)
        return reply

    def leave(self, site: str, incarnation: int, identity: Identity) -> None:
        """``site`` says goodbye."""
        del identity
        self._done(self._syncer.core.call(lambda call: SiteLeft(call, site, incarnation)), site)

    def status(self) -> dict[str, object]:
        """How the run stands."""
        tally, refusals = self.tally.sites(), self.tally.refusals()
        now_s = time.monotonic()
        plan = self._syncer.plan
        return self._syncer.core.ask(
            lambda machine: {
                "run_id": plan.agreement.run_id,
                "held": list(plan.held),
                "lineage": machine.state.lineage,
                "up_seconds": round(now_s - self.tally.began_s, 1),
                "refused_at_the_door": refusals,
                "not_ready": self._syncer.readiness.reasons(),
                "calls": self._syncer.calls(),
                "payloads_decoded": self.tally.payloads_decoded(),
                "identity_complaints": self._syncer.complaints(),
                "kernels": native.description(),
                "memory_bytes_max": self._syncer.memory_bytes_max,
                "wanting": self._syncer.room.wanting(),
                "replication": self._syncer.replicator.status(),
                "lease": self._syncer.leadership.status() if self._syncer.leadership is not None else None,
                "backup": self._syncer.backups.status() if self._syncer.backups is not None else None,
                "standstill": standstill_facts(machine, self._syncer.core.now_ns()),
                **describe(machine, tally, now_s, self._syncer.costs.latest),
            },
            early=True,
        )

    def drain(self) -> None:
        """Begin the last round of this part of the run."""
        self._syncer.core.call(DrainRequested)

    def evict(self, site: str) -> None:
        """Put ``site`` out of the run."""
        answer = self._syncer.core.call(lambda call: SiteEvicted(call, site))
        self._done(answer, site)

    def readmit(self, site: str) -> None:
        """Let ``site``, which was put out, join again."""
        self._done(self._syncer.core.call(lambda call: SiteReadmitted(call, site)), site)

    def admit(self, site: str, fragment: int, sequence: int) -> None:
        """Let a held update be merged."""
        self._said(
            self._syncer.core.call(lambda call: UpdateAdmitted(call, site, fragment, sequence)),
            site,
            fragment,
            sequence,
        )

    def refuse(self, site: str, fragment: int, sequence: int) -> None:
        """An accepted update is never merged."""
        self._said(
            self._syncer.core.call(lambda call: UpdateWithdrawn(call, site, fragment, sequence)),
            site,
            fragment,
            sequence,
        )

    def _said(self, answer: object, site: str, fragment: int, sequence: int) -> None:
        """What came of a word on one update."""
        assert isinstance(answer, AnswerDone), answer
        if answer.reason is not None and answer.reason in NO_SUCH_UPDATE:
            text = NO_SUCH_UPDATE[answer.reason].format(fragment=fragment, sequence=sequence, site=site)
            raise Refusal(Status.NOT_FOUND, text)
        if answer.reason is Reason.CONFLICT:
            fate = self._syncer.core.ask(lambda machine: _fate(machine, site, fragment, sequence))
            raise Refusal(Status.FAILED_PRECONDITION, f"update {sequence} of fragment {fragment} of {site} {fate}")
        self._done(answer, site)

    def snapshot(self) -> None:
        """Write a snapshot now."""
        self._syncer.snapshot_now()

    def promote(self, *, lossy: bool) -> None:
        """There is nobody here to promote."""
        del lossy
        raise Refusal(Status.FAILED_PRECONDITION, "this is no standby: it is the syncer")

    def detach(self) -> None:
        """Go on without a standby until one has caught up."""
        core, replicator = self._syncer.core, self._syncer.replicator
        if replicator.options.mode != "sync":
            raise Refusal(
                Status.FAILED_PRECONDITION, f"nothing waits for a standby: replication is {replicator.options.mode}"
            )
        is_new = replicator.detach()
        until = time.monotonic() + DETACH_S
        while core.held is not None and time.monotonic() < until:
            time.sleep(0.02)  # The turn that is held is let go, and only then the next one can be decided.
        try:
            core.call(StandbyDetached)
        except NotHandedIn:
            if is_new:  # Nothing waits for the standby any more: that is to be in the journal when the loop goes on.
                core.post(StandbyDetached(0))
            raise

    def _done(self, answer: object, site: str) -> None:
        assert isinstance(answer, AnswerDone), answer
        if answer.reason is Reason.NOT_JOINED:
            raise Refusal(Status.NOT_FOUND, f"site_id is {site!r}: the run has no such site")
        if answer.reason is not None:
            raise Refusal(Status.FAILED_PRECONDITION, f"site {site}: {answer.reason.value}")


def _refusal(reason: Reason, site: str) -> Refusal:
    """In words, and with the reason itself: a site ends for some of them."""
    status, text = JOIN_REFUSALS[reason]
    return Refusal(status, text.format(site=site), reason=reason)


def _standing_of_run(machine: OuterSync) -> tuple[int, int, int, int]:
    state = machine.state
    return state.epoch, state.lineage, state.run_tokens(), machine.progress_ppm()


def _fate(machine: OuterSync, site: str, fragment: int, sequence: int) -> str:
    """In words, for an operator who wanted another one."""
    for fate in machine.state.sites[site].lines[fragment].fates:
        if fate.sequence == sequence:
            return f"was refused: {fate.reason.value}" if fate.reason else f"is in version {fate.version} already"
    return "is being merged"


def _version(machine: OuterSync, fragment: int) -> int:
    return machine.state.fragments[fragment].version if fragment < len(machine.state.fragments) else 0
