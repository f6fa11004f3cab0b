"""What the syncer holds in memory for everybody to read: the published fragments and the latest down-links."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.sync.agreement import PROTOCOL
from diloco.sync.events import Fate
from diloco.syncer.outer_step import merged_into
from diloco.wire.chunks import checksum
from diloco.wire.messages import PullAsk, PullHeader, Refusal, Status, short_digest
from diloco.wire.service import PullSource

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from diloco.sync.state import OuterState
    from diloco.syncer.outer_step import Downlink, OuterResult
    from diloco.syncer.snapshots import FragmentValues

DIGESTS_KEPT = 256
"""Versions of each fragment whose digest is remembered, to be compared with what sites say that they hold."""


class Holdings:
    """Values by fragment.  One thread calls these methods, the decision loop's, so that a pull sees one instant."""

    def __init__(self, values: Sequence[FragmentValues], down_codec: str, downlinks_kept: int) -> None:
        self.values = list(values)
        self.down_codec = down_codec
        self._downlinks: list[deque[Downlink]] = [deque(maxlen=downlinks_kept) for _ in values]
        self._digests: list[deque[tuple[int, str]]] = [
            deque([(each.version, each.digest)], maxlen=DIGESTS_KEPT) for each in values
        ]
        self._sites: dict[int, tuple[int, int]] = {}

    def take(self, fragment: int, result: OuterResult) -> None:
        """``result`` is the fragment's newest version, computed now or again by a replay: its bytes are the same.

        A chain is sent only where it is shorter than the whole fragment, so twice that length is all that is kept: it
        lets a pull of a chain that broke off go on when newer versions have come.
        """
        assert result.values.version == self.values[fragment].version + 1, result.values.version
        self.values[fragment] = result.values
        self._digests[fragment].append((result.values.version, result.values.digest))
        whole_bytes = result.values.published.numel() * 4
        links, link = self._downlinks[fragment], result.link()
        links.append(link)
        if len(link.payload) >= whole_bytes:
            links.clear()
        while sum(len(each.payload) for each in links) > 2 * whole_bytes:
            links.popleft()

    def differing(
        self,
        versions: Sequence[int],
        echoed: Sequence[int],
        told: Callable[[int, int, str], str | None] = lambda fragment, version, digest: digest,
    ) -> dict[int, int]:
        """The fragments, with the version, for which a site holds other values than were published.

        ``echoed`` are the short digests of what it holds for ``versions``; one that is 0, or of a version that is not
        remembered here, says nothing.  ``told`` gives what the site was told for the digest of a version, or None.
        """
        found: dict[int, int] = {}
        for fragment, (version, short) in enumerate(zip(versions, echoed, strict=False)):
            if not short or fragment >= len(self.values):
                continue
            known = [digest for number, digest in self._digests[fragment] if number == version]
            digest = told(fragment, version, known[-1]) if known else None
            if digest is not None and short_digest(digest) != short:
                found[fragment] = version
        return found

    def begin_again(self, values: Sequence[FragmentValues]) -> None:
        """A new lineage begins with ``values``: no chain leads to them from what was published before."""
        assert [held.version + 1 for held in self.values] == [first.version for first in values], "a version is missing"
        self.values = list(values)
        for links in self._downlinks:
            links.clear()
        self._sites.clear()

    def sites_in(self, fragment: int, version: int, state: OuterState) -> int:
        """Of how many sites ``version`` holds updates that the one before it lacks, as far as ``state`` knows still.

        Counted once for each version: all sites ask.
        """
        if self._sites.get(fragment, (-1, 0))[0] != version:
            self._sites[fragment] = version, len(merged_into(state, fragment, version))
        return self._sites[fragment][1]

    def choose(self, ask: PullAsk, fates: tuple[Fate, ...]) -> Choice:
        """What a pull gets: a chain of down-links where that is shorter, else the whole fragment in fp32."""
        held = self.values[ask.fragment]
        numel = held.published.numel()
        if ask.want_version == 0 and ask.have_version == held.version:
            return Choice(ask.fragment, held.version, held.version, self.down_codec, numel, [], held.digest, fates)
        version = ask.want_version or held.version
        chain = self._chain(ask.fragment, ask.have_version, version) if ask.have_version >= 0 else None
        if chain is not None and sum(len(link.payload) for link in chain) < numel * 4:
            parts: list[bytes | memoryview] = [link.payload for link in chain]
            return Choice(
                ask.fragment, ask.have_version, version, self.down_codec, numel, parts, chain[-1].digest, fates
            )
        if version != held.version:
            raise Refusal(Status.NOT_FOUND, f"version {version} of fragment {ask.fragment} cannot be sent any more")
        whole = [_bytes_of(held.published)]
        return Choice(ask.fragment, version, version, "fp32", numel, whole, held.digest, fates, whole=True)

    def _chain(self, fragment: int, have: int, version: int) -> list[Downlink] | None:
        links = [link for link in self._downlinks[fragment] if have < link.version <= version]
        if not links or len(links) != version - have:  # Compared first: anybody may ask for any version.
            return None
        return links if [link.version for link in links] == list(range(have + 1, version + 1)) else None


@dataclass(frozen=True, slots=True)
class Choice:
    """What a pull gets, as of one instant.  The rest of the work, a pass over all bytes, is any thread's."""

    fragment: int
    from_version: int
    version: int
    encoding: str
    numel: int
    parts: Sequence[bytes | memoryview]
    digest: str
    fates: tuple[Fate, ...]
    whole: bool = False

    def source(self, protocol: int = PROTOCOL) -> PullSource:
        """With header, for one who speaks ``protocol``: 2 wants a checksum of the whole beside those of the chunks."""
        header = PullHeader(
            fragment=self.fragment,
            from_version=self.from_version,
            version=self.version,
            whole=self.whole,
            encoding=self.encoding,
            numel=self.numel,
            payload_bytes=sum(len(part) for part in self.parts),
            part_bytes=tuple(len(part) for part in self.parts),
            digest=self.digest,
            payload_crc32=checksum(self.parts) if protocol < PROTOCOL else 0,
            fates=self.fates,
        )
        return PullSource(header, self.parts)


def _bytes_of(values: Tensor) -> memoryview:
    """The little-endian fp32 bytes of a flat tensor, without a copy."""
    return values.numpy().data.cast("B")
