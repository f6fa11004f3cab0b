"""What a site holds of a run, and why a cold one is never a source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.codec.base import digest
from diloco.inner import checkpoint
from diloco.models.read import ColdError, read_site
from diloco.sync.data_units import SKIPPED
from diloco.sync.journal import to_plain
from diloco.sync.progress import FragmentProgress, LearnerState, Sent, SentState, SiteUnits

BASES = (torch.arange(12.0), torch.arange(7.0) * 0.5)
FLIPPED = BASES[0].clone()
FLIPPED.view(torch.int32)[3] ^= 1


def state(versions: tuple[int, int] = (5, 6)) -> LearnerState:
    """A site that has heard of a merge which its base lacks."""
    ahead = Sent(9, 5, 100, 10, "d9", SentState.ACCEPTED, merged_version=6)
    waiting = Sent(10, 5, 70, 7, "d10", SentState.ACCEPTED)
    parts = [
        FragmentProgress(
            versions[0], next_sequence=11, tokens_merged=900, updates_merged=9, in_flight=[ahead, waiting]
        ),
        FragmentProgress(versions[1], next_sequence=4, tokens_merged=300, updates_merged=3),
    ]
    return LearnerState(parts, lineage=3, epoch=8, step=120)


def checkpointed(
    folder: Path, told: LearnerState, *, bases: tuple[torch.Tensor, ...] = BASES, **published: Any
) -> Path:
    facts = {"site": "b", "run_id": "past", "layout_fingerprint": "f", "digests": [digest(base) for base in BASES]}
    extra = {"machine": to_plain(told), "published": {**facts, **published}}
    tensors = {f"extra/base.{index}": base for index, base in enumerate(bases)}
    checkpoint.save(folder / "checkpoints", f"step-{told.step:08d}", tensors, {"trainer": {}, "extra": extra})
    return folder


def test_a_warm_site_is_read_with_what_its_base_holds_of_its_own_and_the_units_it_leased(
    tmp_path: Path,
) -> None:
    site = read_site(checkpointed(tmp_path / "none", told := state()))
    assert (site.site, site.run_id, site.lineage, site.epoch, site.step) == ("b", "past", 3, 8, 120)
    assert (site.versions, site.digests) == ((5, 6), tuple(digest(base) for base in BASES))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(site.bases, BASES, strict=True))
    assert [(line.watermark, line.tokens_merged, line.updates_merged) for line in site.lines] == [
        (10, 800, 8),
        (3, 300, 3),
    ]
    assert site.units_begun == 0
    told.units = SiteUnits(first=3, pieces=[(SKIPPED, 2), (40, 5), (7, 9)])
    assert read_site(checkpointed(tmp_path / "some", told)).units_begun == 45


@pytest.mark.parametrize(
    ("versions", "changes", "said"),
    [
        ((5, -1), {}, "versions 5 -1: a cold site is never a source"),
        ((0, 0), {}, "versions 0 0: a cold site is never a source"),
        ((5, 6), {"digests": ["0" * 64, "1" * 64]}, "version 5 of fragment 0 has digest .*, and 0{12} was published"),
        ((5, 6), {"digests": [digest(BASES[0]), ""]}, "version 6 of fragment 1 .*, and nothing was published"),
        ((5, 6), {"digests": None}, "does not say what was published"),
        ((5, 6), {"bases": (FLIPPED, BASES[1])}, "version 5 of fragment 0 has digest"),
    ],
)
def test_invariant_16_a_cold_learner_is_never_a_source(
    tmp_path: Path, versions: tuple[int, int], changes: dict[str, Any], said: str
) -> None:
    checkpointed(tmp_path, state(versions), **changes)
    with pytest.raises(ColdError, match=said):
        read_site(tmp_path)


def test_a_site_that_is_not_there_is_no_cold_one_without_a_checkpoint_it_is_and_a_damaged_one_is_named(
    tmp_path: Path,
) -> None:
    for name in ("site-b", "site-a"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
    for name, words in (
        ("site-x", r"site-x is not there; beside it are site-a, site-b"),
        ("elsewhere/site-x", r"elsewhere/site-x is not there$"),
        ("site-a", "has no checkpoint: a cold site is never a source"),
    ):
        with pytest.raises(ColdError, match=words):
            read_site(tmp_path / name)
    checkpointed(tmp_path, state())
    (tmp_path / "checkpoints/step-00000120/extra.safetensors").write_bytes(b"")
    with pytest.raises(ColdError, match=r"extra\.safetensors is damaged"):
        read_site(tmp_path)


def test_the_part_of_one_of_several_syncers_is_read_alone(tmp_path: Path) -> None:
    folder = checkpointed(tmp_path, state())
    alone = read_site(folder)
    found = checkpoint.latest(folder / "checkpoints")
    assert found is not None
    tensors = {f"extra/1.{name}": value for name, value in found.part("extra").items()}
    meta = {**found.meta, "extra": {"parts": [{}, found.meta["extra"]]}}
    checkpoint.save(folder / "checkpoints", "step-99999999", tensors, meta, keep=3)
    with pytest.raises(ColdError):
        read_site(folder)
    part = read_site(folder, 1)
    assert part.versions == alone.versions
    assert part.digests == alone.digests
    with pytest.raises(ColdError):
        read_site(folder, 0)
