"""The exchange of all fragments of one agent, whichever rank of the site owns them.

What the machine orders of a fragment of rank 0 is done here; of another, its owner is told over the channel, and at a
boundary all ranks take their part.  What owners tell is heard by one thread for each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.learner.exchange import Source
from diloco.learner.orders import ADOPT, RETAKE, SEAL, lend_a_hand
from diloco.sync.effects import Adopt, Retake, Seal, StartOver
from diloco.sync.events import LearnerEvent, VersionFetched

if TYPE_CHECKING:
    from diloco.learner.channel import Channel, Words
    from diloco.learner.exchange import Beside, Exchange
    from diloco.learner.orders import Orders
    from diloco.learner.owners import Dealt
    from diloco.sync.progress import LearnerState
    from diloco.wire.client import SyncClient


@dataclass(frozen=True, slots=True)
class Heard:
    """What is done with what the owners say."""

    change: Callable[[Callable[[], None], LearnerEvent, Source | None], bool]
    wanted: Callable[[int, int], str | None]
    tell: Callable[[LearnerEvent], None]
    rejoin: Callable[[str], None]
    give_up: Callable[[str], None]
    lost: Callable[[str], None]
    """A rank of the site is gone."""
    emit: Callable[[str, dict[str, object]], None]


class Exchanges:
    """Orders are given under the agent's lock."""

    def __init__(self, dealt: Dealt, exchange: Exchange, orders: Orders, client: SyncClient, heard: Heard) -> None:
        """``exchange`` is that of rank 0's own fragments."""
        self.owners, self._channels = dealt.owners, dealt.channels
        self._exchange, self._tensors = exchange, exchange.tensors
        self._orders, self._client, self._heard = orders, client, heard
        # The latest that was fetched, of what is owned elsewhere.
        self._versions: list[int] = [-1] * len(dealt.owners)
        self._echoes: dict[int, tuple[int, int]] = {}
        self._bytes = dict.fromkeys(dealt.channels, (0, 0))
        self._known: object = None
        self._parting = threading.Event()

    def begin(self, state: LearnerState) -> None:
        """Tell the owners what the machine knows of their fragments; hear them from now on."""
        versions = [part.base_version for part in state.fragments]
        listed = {(index, sent.sequence) for index, part in enumerate(state.fragments) for sent in part.in_flight}
        self._versions = list(versions)
        for rank, channel in self._channels.items():
            channel.send("begin", versions, self._tensors.told_base, listed)
            channel.hear(self._hearing(rank), self._losing(rank))

    def know(self, state: LearnerState) -> None:
        """What the machine knows of the run, before any order that may rest on it."""
        if not self._channels:
            return
        known = ((state.incarnation, state.epoch, state.lineage), self._client.taken_in)
        if known != self._known:
            self._known = known
            for channel in self._channels.values():
                channel.send("knows", *known)

    def adopt(self, effect: Adopt) -> None:
        """The model takes a version."""
        if self.owners[effect.fragment] == 0:
            self._exchange.adopt(effect)
        else:
            self._have_done(effect)

    def retake(self, effect: Retake) -> None:
        """The model takes a version, and what it has learned since is gone."""
        if self.owners[effect.fragment] == 0:
            self._exchange.retake(effect)
        else:
            self._have_done(effect)

    def seal(self, effect: Seal, codec: str, *, at_rest: bool) -> None:
        """Measure what an update is made of; the rest is done beside training.  No owner but rank 0 stands still."""
        if self.owners[effect.fragment] == 0:
            self._exchange.seal(effect, codec, at_rest=at_rest)
        else:
            self._have_done(effect, codec)

    def _have_done(self, effect: Adopt | Retake | Seal, codec: str = "") -> None:
        """The owner does it, and all ranks take their part."""
        fragment, owner = effect.fragment, self.owners[effect.fragment]
        what = {Adopt: ADOPT, Retake: RETAKE, Seal: SEAL}[type(effect)]
        self._channels[owner].send("boundary", effect, codec)
        with self._orders.all_do(what, fragment, owner):
            part = self._tensors.layout.fragments[fragment]
            lend_a_hand(self._tensors.holding, part, what, self._tensors.adopt_rule, owner)
        if isinstance(effect, Adopt) or (isinstance(effect, Retake) and effect.version == self._versions[fragment]):
            self._tensors.told_base[fragment] = self._tensors.told_latest[fragment]

    def order(self, effect: Beside) -> None:
        """What changes nothing in the model."""
        owner = self.owners[effect.fragment]
        if owner == 0:
            self._exchange.order(effect)
            return
        if isinstance(effect, StartOver):
            self._versions[effect.fragment] = -1
            self._echoes.pop(effect.fragment, None)
        self._channels[owner].send("order", effect)

    def capture(self) -> None:
        """Each owner's part of a checkpoint is as the machine knows it now."""
        for channel in self._channels.values():
            channel.send("state")

    def digests(self, own: tuple[int, ...], state: LearnerState) -> tuple[int, ...]:
        """What a heartbeat says of the bases, ``own`` being those that lie here."""
        found = list(own)
        for fragment, (version, digest) in self._echoes.items():
            found[fragment] = digest if state.fragments[fragment].base_version == version else 0
        return tuple(found)

    @property
    def bytes_up(self) -> int:
        """All ranks' bytes of Push messages."""
        return self._client.bytes_up + sum(up for up, _ in self._bytes.values())

    @property
    def bytes_down(self) -> int:
        """All ranks' bytes of Pull messages."""
        return self._client.bytes_down + sum(down for _, down in self._bytes.values())

    def part(self) -> None:
        """The site ends: that a rank goes is in order."""
        self._parting.set()

    def close(self) -> None:
        """End the connections."""
        self.part()
        for channel in self._channels.values():
            channel.close()

    def _hearing(self, rank: int) -> Callable[[Words], None]:
        channel = self._channels[rank]

        def hear(words: Words) -> None:
            what, self._bytes[rank], *rest = words
            match what:
                case "change":
                    number, event, source = rest
                    if not self._heard.change(lambda: self._keep(channel, number, event, source), event, source):
                        channel.send("changed", number, False)
                case "wanted":
                    number, fragment, sequence = rest
                    channel.send("answer", number, self._heard.wanted(fragment, sequence))
                case "echo":
                    fragment, version, digest = rest
                    self._echoes[fragment] = (version, digest)
                case "tell":
                    self._heard.tell(rest[0])
                case "rejoin":
                    self._heard.rejoin(rest[0])
                case "give_up":
                    self._heard.give_up(rest[0])
                case "emit":
                    self._heard.emit(*rest)
                case _:
                    raise AssertionError(f"rank {rank} says {what}")

        return hear

    def _keep(self, channel: Channel, number: int, event: LearnerEvent, source: Source | None) -> None:
        """The owner has its change before it hears of anything that the machine makes of it."""
        if isinstance(event, VersionFetched) and source is not None and event.version >= self._versions[event.fragment]:
            self._versions[event.fragment] = event.version
            self._tensors.told_latest[event.fragment] = source.digest
        channel.send("changed", number, True)

    def _losing(self, rank: int) -> Callable[[str], None]:
        def lost(why: str) -> None:
            if not self._parting.is_set():
                self._heard.lost(f"rank {rank} of this site is gone: {why}")

        return lost
