"""The final version as one file that anything can read: full parameters under their own names."""

from __future__ import annotations

import errno
import json
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from diloco.durable import DiskFullError, Step, is_full
from diloco.outer.fragments import Layout, scatter

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from diloco.durable import Disk
    from diloco.syncer.snapshots import FragmentValues

FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)


def export(disk: Disk, folder: Path, layout: Layout, values: Sequence[FragmentValues], versions: Sequence[int]) -> None:
    """Write ``model.safetensors`` and then ``final.json``, which says what it is, into ``folder``.

    ``DiskFullError`` when there is no room for them: then it may be tried again.
    """
    try:
        disk.make_folder(folder, Step.EXPORT)
        for leftover in folder.glob(".*.tmp"):  # Of a process that died while it wrote.
            disk.remove(leftover, Step.EXPORT)
        parameters = full_parameters(layout, [each.published for each in values])
        disk.keep(folder / "model.safetensors", lambda beside: save_file(parameters, beside), Step.EXPORT)
        facts = {"versions": list(versions), "digests": [each.digest for each in values]}
        disk.write_file(folder / "final.json", json.dumps(facts, indent=1).encode(), Step.EXPORT)
    except OSError as error:
        if is_full(error):
            raise DiskFullError(error.errno, error.strerror) from error
        raise
    except SafetensorError as error:
        if any(f"os error {number}" in str(error) for number in FULL_ERRORS):  # It has no other way to say so.
            raise DiskFullError(errno.ENOSPC, str(error)) from error
        raise


def when_there_is_room(
    write: Callable[[], object], stopping: threading.Event, again_s: float, put_off: Callable[[str], None]
) -> None:
    """Repeat ``write`` until it finds room, or the process stops; ``put_off`` hears once why that takes so long."""
    told = False
    while True:
        try:
            write()
            return
        except DiskFullError as error:
            if not told:
                put_off(f"disk full: {error.strerror}")
            told = True
            if stopping.wait(again_s):
                return


def full_parameters(layout: Layout, fragments: Sequence[Tensor]) -> dict[str, Tensor]:
    """Full fp32 parameters by name from the flat values of every fragment."""
    parameters = {name: torch.empty(shape) for name, shape in layout.parameters}
    for fragment, values in zip(layout.fragments, fragments, strict=True):
        scatter(fragment, values, parameters)
    return parameters
