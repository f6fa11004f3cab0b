"""What the syncer holds in memory for everybody to read: the published fragments and the latest down-links."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from diloco.wire.chunks import checksum
from diloco.wire.messages import PullAsk, PullHeader, Refusal, Status
from diloco.wire.service import PullSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from diloco.sync.events import Fate
    from diloco.syncer.executor import OuterResult
    from diloco.syncer.snapshots import FragmentValues


class Holdings:
    """Values by fragment.  Only the decision loop's thread calls these methods, so that a pull sees one instant."""

    def __init__(self, values: Sequence[FragmentValues], down_codec: str, downlinks_kept: int) -> None:
        self.values = list(values)
        self.down_codec = down_codec
        self._downlinks: list[deque[OuterResult]] = [deque(maxlen=downlinks_kept) for _ in values]

    def take(self, fragment: int, result: OuterResult) -> None:
        """``result`` is the fragment's newest version."""
        assert result.values.version == self.values[fragment].version + 1, result.values.version
        self.values[fragment] = result.values
        self._downlinks[fragment].append(result)

    def recall(self, fragment: int, result: OuterResult) -> None:
        """A down-link that a replay has computed again may be sent again: its bytes are the same."""
        self._downlinks[fragment].append(result)

    def source(self, ask: PullAsk, fates: tuple[Fate, ...]) -> PullSource:
        """The answer to a pull: a chain of down-links where that is shorter, else the whole fragment in fp32."""
        held = self.values[ask.fragment]
        if ask.want_version == 0 and ask.have_version == held.version:
            return self._sourced(ask, held, held.version, False, [], fates)
        version = ask.want_version or held.version
        chain = self._chain(ask.fragment, ask.have_version, version) if ask.have_version >= 0 else None
        whole_bytes = held.published.numel() * 4
        if chain is not None and sum(len(link.downlink) for link in chain) < whole_bytes:
            return self._sourced(
                ask, chain[-1].values, ask.have_version, False, [link.downlink for link in chain], fates
            )
        if version != held.version:
            raise Refusal(Status.NOT_FOUND, f"version {version} of fragment {ask.fragment} cannot be sent any more")
        return self._sourced(ask, held, version, True, [_bytes_of(held.published)], fates)

    def _chain(self, fragment: int, have: int, version: int) -> list[OuterResult] | None:
        links = [link for link in self._downlinks[fragment] if have < link.values.version <= version]
        expected = list(range(have + 1, version + 1))
        return links if expected and [link.values.version for link in links] == expected else None

    def _sourced(
        self,
        ask: PullAsk,
        values: FragmentValues,
        from_version: int,
        whole: bool,
        parts: list[bytes | memoryview],
        fates: tuple[Fate, ...],
    ) -> PullSource:
        header = PullHeader(
            fragment=ask.fragment,
            from_version=values.version if whole else from_version,
            version=values.version,
            whole=whole,
            encoding="fp32" if whole else self.down_codec,
            numel=values.published.numel(),
            payload_bytes=sum(len(part) for part in parts),
            part_bytes=tuple(len(part) for part in parts),
            digest=values.digest,
            payload_crc32=checksum(parts),
            fates=fates,
        )
        return PullSource(header, parts)


def _bytes_of(values: Tensor) -> memoryview:
    """The little-endian fp32 bytes of a flat tensor, without a copy."""
    return values.numpy().data.cast("B")
