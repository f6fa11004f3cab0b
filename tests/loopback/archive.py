"""A past that nothing prunes, beside the data of a syncer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from diloco.syncer.journal_files import JournalFiles
from diloco.syncer.spool import Spool


def archive(folder: Path, data: Path) -> None:
    """Keep a second name for every journal segment and payload, so that what is pruned can still be audited."""
    prune = JournalFiles.prune
    (folder / "journal").mkdir(parents=True, exist_ok=True)
    for path in (data / "spool").glob("*/*.update"):  # A power cut may have taken the second name.
        if path.parent.name != ".partial":
            link(path, folder / "spool" / path.parent.name / path.name)

    def pruning(journal: JournalFiles, first: int) -> None:
        for path in journal.folder.glob("journal-*.log"):
            link(path, folder / "journal" / path.name)
        prune(journal, first)

    def linking(put: Callable[..., str]) -> Callable[..., str]:
        def putting(spool: Spool, *args: object) -> str:
            reference = put(spool, *args)
            link(spool.folder / reference, folder / "spool" / reference)
            return reference

        return putting

    JournalFiles.prune = pruning  # type: ignore[method-assign]
    Spool.keep, Spool.put_above = linking(Spool.keep), linking(Spool.put_above)  # type: ignore[method-assign]


def link(path: Path, target: Path) -> None:
    """Give ``path`` a second name, in the place of an older one; do nothing where it has that name."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and target.samefile(path):
        return
    beside = target.with_suffix(".tmp")
    beside.unlink(missing_ok=True)
    os.link(path, beside)
    beside.replace(target)
