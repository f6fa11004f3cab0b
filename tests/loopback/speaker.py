"""Who speaks for the region that a toy is, to the syncer of another toy of the same kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from diloco.durable import Disk
from diloco.learner.region import Upward, UpwardOptions

if TYPE_CHECKING:
    from tests.loopback.toy import Toy

UPDATES = 4
"""Merged ones for one that goes up."""


def speaker(
    toy: Toy, site: str, address: str, emit: Callable[[str, dict[str, object]], None], disk: Disk, data: str = "syncer"
) -> Upward:
    """One that has its outbox in the syncer's folder ``data``."""
    options = UpwardOptions(folder=f"{toy.folder}/{data}", site=site, updates=UPDATES, up_codec=toy.codec)
    return Upward(options, toy.layout(), toy.agreement(), toy.sync_client(site, address), emit, disk)
