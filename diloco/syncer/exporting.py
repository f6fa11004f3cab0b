"""The final version as one file that anything can read: full parameters under their own names."""

from __future__ import annotations

import json
from math import prod
from typing import TYPE_CHECKING

import torch

from diloco.durable import DiskFullError, Step, is_full
from diloco.syncer.tensor_files import tensor_file

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from diloco.durable import Disk
    from diloco.outer.fragments import Layout
    from diloco.syncer.snapshots import FragmentValues


def export(disk: Disk, folder: Path, layout: Layout, values: Sequence[FragmentValues], versions: Sequence[int]) -> None:
    """Write ``model.safetensors`` and then ``final.json``, which says what it is, into ``folder``.

    ``DiskFullError`` when there is no room for them: then it may be tried again.
    """
    try:
        disk.make_folder(folder, Step.EXPORT)
        for leftover in folder.glob(".*.tmp"):  # Of a process that died while it wrote.
            disk.remove(leftover, Step.EXPORT)
        parameters = full_parameters(layout, [each.evaluated for each in values])
        disk.write_parts(folder / "model.safetensors", tensor_file(parameters), Step.EXPORT)
        facts = {"versions": list(versions), "digests": [each.digest for each in values]}
        disk.write_file(folder / "final.json", json.dumps(facts, indent=1).encode(), Step.EXPORT)
    except OSError as error:
        if is_full(error):
            raise DiskFullError(error.errno, error.strerror) from error
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
    """Full fp32 parameters by name from the flat values of every fragment.

    One that lies in a single piece, as all of ``plan_layout`` do, is a view of its fragment; nobody may write to it.
    """
    shapes = dict(layout.parameters)
    parameters: dict[str, Tensor] = {}
    for fragment, values in zip(layout.fragments, fragments, strict=True):
        at = 0
        for piece in fragment.pieces:
            size = piece.stop - piece.start
            part = values[at : at + size]
            at += size
            if size == prod(shapes[piece.name]):
                parameters[piece.name] = part.view(shapes[piece.name])
                continue
            if piece.name not in parameters:
                parameters[piece.name] = torch.empty(shapes[piece.name])
            parameters[piece.name].view(-1)[piece.start : piece.stop] = part
    return parameters
