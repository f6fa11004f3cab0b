"""A region between a site and the syncer above, in one thread: real machines, real rules, numbers instead of models.

``Level`` is a syncer with the values of its one fragment; ``Region`` is one that speaks to another ``Level``.  Nothing
moves by itself: a test says what happens next, so that it can stop and restart anything in between.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from diloco.outer.merge import merge_mean
from diloco.outer.optimizer import NOTHING, OuterOptimizerOptions, outer_step
from diloco.outer.pseudo_gradient import blend
from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.events import UpstreamAsked, UpstreamFetched, UpstreamStarted
from diloco.sync.region import standing
from diloco.sync.syncer import OuterSync
from tests.sync.driving import Syncer, through_json

if TYPE_CHECKING:
    from torch import Tensor

    from diloco.outer.optimizer import OuterState
    from diloco.sync.progress import FragmentProgress


def number(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


class Level:
    """A syncer; ``theta`` is what it holds, ``payloads`` what has arrived.  Rounds are of one update."""

    def __init__(self, **options: Any) -> None:
        rules = {"grace": "fixed", "grace_ns": 0, "round_updates": 1, "staleness_max": 30, "fates_kept_max": 64}
        self.syncer = Syncer(**(rules | options))
        self.optimizer = OuterOptimizerOptions(kind="sgd", lr=1.0, momentum=0.0)
        self.theta = number(0.0)
        self.memory: OuterState = NOTHING
        self.payloads: dict[str, Tensor] = {}
        self.commands: deque[fx.StartOuterStep | fx.TakeVersion] = deque()
        self.told: list[fx.OuterEffect] = []
        self.regions: list[Region] = []

    @property
    def version(self) -> int:
        return self.syncer.machine.state.fragments[0].version

    def handle(self, event: ev.OuterEvent) -> list[fx.OuterEffect]:
        self.syncer.now_ns += 1_000_000
        effects = self.syncer.handle(event)
        for effect in effects:
            if isinstance(effect, fx.StartOuterStep | fx.TakeVersion):
                self.commands.append(effect)
            else:
                self.carry_out(effect)
        return effects

    def carry_out(self, effect: fx.OuterEffect) -> None:
        self.told.append(effect)
        for region in self.regions:
            region.mail.append(effect)

    def restart(self) -> None:
        """kill -9, and another process; its sites notice, and join again."""
        self.commands.clear()
        self.syncer.machine = OuterSync.restore(self.syncer.options, through_json(self.syncer.machine.snapshot()))
        self.handle(ev.SyncerStarted(self.syncer.machine.state.epoch + 1))
        for region in self.regions:
            region.mail.clear()
            region.join()

    def push(self, site: str, sequence: int, value: float | Tensor, **given: Any) -> list[fx.OuterEffect]:
        """An update arrives; its base is the present version unless it is ``given``."""
        update = self.syncer.update(site, sequence, **({"base_version": self.version} | given))
        self.payloads[update.payload] = value if isinstance(value, torch.Tensor) else number(value)
        return self.handle(update)

    def step(self) -> list[fx.OuterEffect]:
        """Compute the next outer step that was ordered."""
        command = self.commands.popleft()
        assert isinstance(command, fx.StartOuterStep)
        parts = [(each.weight, [self.payloads[u.payload] for u in each.updates]) for each in command.contributions]
        self.theta, self.memory = outer_step(self.theta, merge_mean(parts), self.memory, self.optimizer)
        return self.handle(ev.OuterStepDone(0, command.version, f"v{command.version}", "d"))


class Region(Level):
    """``above`` is the level above it, where it is the site ``name``; ``outbox`` and ``spool`` are its disk.

    What it wants of the one above waits in ``orders``, and the encoding of an update in ``sealing``.
    """

    def __init__(self, above: Level, name: str, updates: int = 2, from_blend: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.from_blend = from_blend
        self.above, self.name, self.updates = above, name, updates
        self.outbox: dict[int, tuple[str, Tensor]] = {}
        self.spool: dict[str, Tensor] = {}
        self.reference: Tensor | None = None
        self.sealing: deque[tuple[fx.Seal, Tensor]] = deque()
        self.orders: deque[fx.OuterEffect] = deque()
        self.sent: list[fx.Seal] = []
        self.fetches = 0
        self.mail: deque[fx.OuterEffect] = deque()
        above.regions.append(self)
        self.start()

    def start(self) -> None:
        outbox = tuple((0, sequence, digest) for sequence, (digest, _) in sorted(self.outbox.items()))
        self.handle(UpstreamStarted(self.name, self.updates, 0.25, 2, outbox, self.from_blend))

    def restart(self, had_finished: bool = False) -> None:
        """kill -9: what was not on the disk is gone, and another process begins with what was."""
        self.commands.clear()
        self.sealing.clear()
        self.orders.clear()
        self.mail.clear()
        self.syncer.machine = OuterSync.restore(self.syncer.options, through_json(self.syncer.machine.snapshot()))
        if had_finished:
            self.handle(UpstreamAsked())
        self.handle(ev.SyncerStarted(self.syncer.machine.state.epoch + 1))
        self.start()
        self.join()

    def join(self) -> None:
        """Join the one above, and hear its answer."""
        effects = self.above.handle(ev.JoinRequested(1, self.name, f"process {self.syncer.machine.state.epoch}"))
        (taken,) = [each for each in effects if isinstance(each, fx.AnswerJoin)]
        state = self.above.syncer.machine.state
        run = (state.run_tokens(), self.above.syncer.machine.progress_ppm(), taken.ending, state.lineage)
        self.handle(ev.JoinAnswered(state.epoch, taken.incarnation, taken.standings, *run))

    def carry_out(self, effect: fx.OuterEffect) -> None:
        match effect:
            case fx.Seal():
                assert self.reference is not None
                since = sum((self.outbox[each][1] for each in effect.in_flight), number(0.0))
                self.sealing.append((effect, self.reference - self.theta - since))
            case fx.Release():
                self.outbox.pop(effect.sequence, None)
            case fx.LetGo():
                del self.spool[effect.payload]
            case fx.Send() | fx.Fetch() | fx.Join() | fx.Leave():
                self.orders.append(effect)
            case _:
                super().carry_out(effect)

    def step(self) -> list[fx.OuterEffect]:
        if not isinstance(self.commands[0], fx.TakeVersion):
            return super().step()
        command = self.commands.popleft()
        assert isinstance(command, fx.TakeVersion)
        self.theta = self.reference = blend(self.theta, self.spool[command.payload], 1 - command.share)
        return self.handle(ev.OuterStepDone(0, command.version, f"v{command.version}", "d"))

    def seal(self) -> None:
        """The update that was ordered is encoded, and durable."""
        effect, value = self.sealing.popleft()
        digest = f"{self.name} {effect.sequence} {len(self.sent)}"
        self.outbox[effect.sequence] = (digest, value)
        self.sent.append(effect)
        self.handle(ev.Sealed(0, effect.sequence, digest))

    def do(self) -> None:
        """The next thing that is wanted of the one above, with its answer."""
        order = self.orders.popleft()
        match order:
            case fx.Send():
                self.send(order.sequence)
            case fx.Fetch():
                self.fetch()
            case fx.Join():
                self.join()
            case fx.Leave():
                self.above.handle(ev.SiteLeft(1, self.name, self.incarnation))

    @property
    def incarnation(self) -> int:
        return self.above.syncer.machine.state.sites[self.name].incarnation

    def send(self, sequence: int) -> None:
        if sequence not in self.outbox:
            return  # It was taken back meanwhile.
        digest, value = self.outbox[sequence]
        seal = next(each for each in reversed(self.sent) if each.sequence == sequence)
        numbers = {name: getattr(seal, name) for name in ("base_version", "tokens", "steps", "step_ns", "final")}
        where = {"incarnation": self.incarnation, "digest": digest, "payload": f"{self.name}/{digest}"}
        effects = self.above.push(self.name, sequence, value, **numbers, **where)
        answer = next(each for each in effects if isinstance(each, fx.AnswerPush))
        self.handle(ev.PushAnswered(0, sequence, answer.outcome, answer.reason, digest))

    def hear(self) -> None:
        """The fates and versions that the one above has told since."""
        while self.mail:
            effect = self.mail.popleft()
            if isinstance(effect, fx.TellFate) and effect.site == self.name:
                self.handle(ev.FateTold(effect.fate))
            elif isinstance(effect, fx.PublishVersion):
                self.handle(ev.VersionPublished(self.above.syncer.machine.state.epoch, 0, effect.version, 0, 250_000))
            elif isinstance(effect, fx.AnnounceFinal):
                self.handle(ev.FinalAnnounced(effect.ending))

    def fetch(self) -> None:
        self.fetches += 1
        payload = f"above {self.fetches}"
        self.spool[payload] = self.above.theta
        for fate in self.above.syncer.machine.state.sites[self.name].lines[0].fates:
            self.handle(ev.FateTold(fate))
        self.handle(UpstreamFetched(0, self.above.version, payload, "p", 1, self.above.syncer.machine.state.epoch))

    def settle(self) -> None:
        """Whatever can be done on both levels, until nothing is left to do."""
        while self.commands or self.sealing or self.orders or self.above.commands or self.mail:
            if self.commands:
                self.step()
            elif self.sealing:
                self.seal()
            elif self.orders:
                self.do()
            elif self.above.commands:
                self.above.step()
            else:
                self.hear()

    @property
    def learner(self) -> FragmentProgress:
        upstream = self.syncer.machine.state.upstream
        assert upstream is not None
        return upstream.parts[0].progress

    def ledger(self) -> dict[str, int]:
        found = standing(self.syncer.machine.state)
        assert found is not None
        assert found.ledger.balanced()
        return found.ledger._asdict()
