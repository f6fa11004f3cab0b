"""Read from a site's newest checkpoint its bases, which are versions that the syncer had published.

A site is warm when it has a base for every fragment; its checkpoint holds the digest that was published with each.
A cold site, which has only the values from the seed, is never a source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from diloco.codec.base import digest, shorter
from diloco.inner import checkpoint
from diloco.sync.plain import PlainError, from_plain
from diloco.sync.progress import FragmentProgress, LearnerState
from diloco.sync.state import Line

if TYPE_CHECKING:
    from pathlib import Path


class ColdError(ValueError):
    """The site cannot be a source; the text says why."""


@dataclass(frozen=True, slots=True)
class WarmSite:
    """``bases`` are Θ̂ of ``versions``, flat fp32, and ``digests`` were published with them.  ``lines`` is how far the
    site's own updates are merged in them; ``step`` is the checkpoint's; ``units_begun`` is the first data unit after
    all units that the site was recently leased."""

    site: str
    run_id: str
    layout_fingerprint: str
    lineage: int
    epoch: int
    step: int
    versions: tuple[int, ...]
    digests: tuple[str, ...]
    bases: tuple[Tensor, ...]
    lines: tuple[Line, ...]
    units_begun: int = 0


def read_site(folder: Path, syncer: int | None = None) -> WarmSite:
    """Return the site in ``folder``, every base compared with its digest; ``ColdError`` when it cannot be a source.

    ``syncer`` selects one of several syncers, whose fragments are read.
    """
    try:
        found = checkpoint.latest(folder / "checkpoints")
    except checkpoint.CheckpointError as error:
        raise ColdError(str(error)) from error
    if found is None and not folder.is_dir():
        beside = ", ".join(sorted(path.parent.name for path in folder.parent.glob("*/checkpoints")))
        raise ColdError(f"{folder} is not there" + (f"; beside it are {beside}" if beside else ""))
    if found is None:
        raise ColdError(f"{folder} has no checkpoint: a cold site is never a source")
    told = found.meta.get("extra", {})
    begin = "extra/" if syncer is None else f"extra/{syncer}."
    try:
        told = told if syncer is None else told["parts"][syncer]
        state: LearnerState = from_plain(LearnerState, told["machine"], "machine")
        published = told["published"]
        digests = tuple(str(each) for each in published["digests"])
        who = (str(published["site"]), str(published["run_id"]), str(published["layout_fingerprint"]))
    except (LookupError, TypeError, PlainError) as error:
        raise ColdError(
            f"{found.path} does not say what was published (it is of an earlier version, or of no site): {error!r}"
        ) from error
    versions = tuple(part.base_version for part in state.fragments)
    if min(versions) < 0 or max(versions) == 0:
        raise ColdError(f"{found.path} has versions {' '.join(map(str, versions))}: a cold site is never a source")
    bases = []
    for index, (version, wanted) in enumerate(zip(versions, digests, strict=True)):
        base = found.tensors[f"{begin}base.{index}"]
        here = digest(base, wanted)
        if here != wanted:
            raise ColdError(
                f"{found.path}: what it holds as version {version} of fragment {index} is {shorter(here)}, and "
                f"{shorter(wanted) or 'nothing'} was told when that was published"
            )
        bases.append(base)
    lines = tuple(_line(part) for part in state.fragments)
    begun = max((stop for _, stop in state.units.real()), default=0)
    return WarmSite(*who, state.lineage, state.epoch, state.step, versions, digests, tuple(bases), lines, begun)


def _line(part: FragmentProgress) -> Line:
    """Return what the syncer may know of the site's own updates: those inside its base are merged."""
    ahead = [sent for sent in part.in_flight if sent.merged_version is not None]
    accepted = part.next_sequence - 1
    return Line(
        watermark=accepted,
        tokens_merged=part.tokens_merged - sum(sent.tokens for sent in ahead),
        updates_merged=part.updates_merged - len(ahead),
    )
