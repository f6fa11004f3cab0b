"""From a checkpoint, an outbox and an odometer to the machine of a new process."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from diloco.inner.checkpoint import CheckpointError
from diloco.sync.events import StepDone
from diloco.sync.learner import LearnerSync
from diloco.sync.plain import PlainError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from diloco.inner.trainer import StepInfo
    from diloco.learner.odometer import Odometer
    from diloco.learner.outbox import Outbox
    from diloco.learner.site_tensors import SiteTensors
    from diloco.sync.options import LearnerOptions


def restored_machine(
    options: LearnerOptions,
    restored: tuple[Mapping[str, Tensor], Mapping[str, object]] | None,
    redo: StepInfo | None,
    outbox: Outbox,
    odometer: Odometer,
    site_tensors: SiteTensors,
) -> LearnerSync:
    """The machine, and the tensors that it lists in ``site_tensors``; the outbox keeps what it lists and nothing else.

    ``redo`` is the step that the checkpoint holds and that its machine had not heard of.  It is told before the first
    join: if the syncer has later work, what this step learned is thrown away with the rest and counts as lost.
    """
    odometer_step, tokens = odometer.read()
    if restored is None:
        outbox.clear(set())
        machine = LearnerSync(options)
        machine.state.tokens_processed = tokens
        return machine
    tensors, meta = restored
    if redo is not None and odometer_step >= redo.step:
        tokens -= redo.tokens  # It is counted when the machine hears of it.
    machine = _restored(options, meta, outbox, tokens)
    site_tensors.restore(tensors, [part.base_version for part in machine.state.fragments], _told(meta))
    listed = {(index, sent.sequence) for index, part in enumerate(machine.state.fragments) for sent in part.in_flight}
    for fragment, sequence in [key for key in site_tensors.sent if key not in listed]:
        site_tensors.release(fragment, sequence)
    # A process that died between an ack and the removal has left bytes that nobody asks for again.
    parts = enumerate(machine.state.fragments)
    outbox.clear({(index, sent.sequence) for index, part in parts for sent in part.in_flight if sent.bytes_wanted})
    if redo is not None:
        step = StepDone(redo.step, redo.tokens, redo.step_ns, redo.cursor, redo.sequences)
        effects = machine.handle(step, time.monotonic_ns())
        assert not effects, "before it has joined, a machine decides nothing"
    return machine


def _told(meta: Mapping[str, object]) -> list[str] | None:
    """The digests that were told with the bases; None in a checkpoint of an earlier version, which does not say."""
    published = meta.get("published")
    return [str(each) for each in published["digests"]] if isinstance(published, dict) else None


def _restored(options: LearnerOptions, meta: Mapping[str, object], outbox: Outbox, tokens: int) -> LearnerSync:
    """The machine that ``meta`` holds; CheckpointError in words when it is of another run or another version."""
    plain = meta.get("machine")
    parts = plain.get("fragments") if isinstance(plain, dict) else None
    if not isinstance(parts, list):
        raise CheckpointError("the checkpoint is not one of a site: it says nothing about what was sent")
    if len(parts) != options.num_fragments:
        raise CheckpointError(
            f"num_fragments is {options.num_fragments}, and the checkpoint has {len(parts)} fragments"
        )
    try:
        return LearnerSync.restore(options, plain, outbox.digests(), tokens)
    except PlainError as error:
        raise CheckpointError(f"the checkpoint is of another version: {error}") from error
