"""The values that each lineage of a run began with, kept until no snapshot is older than its beginning.

    lineages/1795234567/  an image (``images.py``)

They are durable before the journal says ``LineageBegan``, so that whoever reads that record finds them: a recovery of a
restore that was cut short, and a replay from before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.durable import PLAIN_DISK, Step
from diloco.sync.journal import JournalError
from diloco.syncer.images import Image, ImageError, read_image, write_image

if TYPE_CHECKING:
    from pathlib import Path

    from diloco.durable import Disk
    from diloco.sync.events import LineageBegan
    from diloco.syncer.snapshots import FragmentValues


class Lineages:
    """The folder of them.  It is there once a run was restored."""

    def __init__(self, folder: Path, disk: Disk = PLAIN_DISK) -> None:
        self.folder = folder
        self._disk = disk

    def sweep(self) -> None:
        """Remove what a process that died has left half written; for the process that has the folder now."""
        for leftover in self.folder.glob(".*.tmp"):
            self._disk.remove(leftover, Step.LINEAGE_PRUNE)

    def numbers(self) -> list[int]:
        """The lineages whose beginning is kept, rising."""
        return sorted(int(path.name) for path in self.folder.glob("*") if path.name.isdigit())

    def keep(self, lineage: int, image: Image) -> None:
        """Make the values of a lineage that is about to begin durable."""
        self._disk.make_folder(self.folder, Step.LINEAGE_FOLDER)
        self._disk.sync_folder(self.folder.parent, Step.LINEAGE_FOLDER)
        path = self.folder / str(lineage)
        self._disk.remove(path, Step.LINEAGE_PRUNE)  # Of an attempt that ended before the journal said so.
        write_image(path, image, disk=self._disk, step=Step.LINEAGE_IMAGE)

    def values(self, event: LineageBegan) -> tuple[FragmentValues, ...]:
        """The values that ``event`` speaks of, verified; ``JournalError`` names what is missing or damaged."""
        path = self.folder / str(event.lineage)
        try:
            image = read_image(path)
        except ImageError as error:
            raise JournalError(f"the values that lineage {event.lineage} began with are not here: {error}") from error
        if tuple(values.digest for values in image.fragments) != event.digests:
            raise JournalError(f"{path} holds other values than those that lineage {event.lineage} began with")
        return image.fragments

    def prune(self, lineage: int) -> None:
        """Drop the beginnings up to and with ``lineage``: every snapshot left is of a later instant."""
        for number in self.numbers():
            if number <= lineage:
                self._disk.remove(self.folder / str(number), Step.LINEAGE_PRUNE)
