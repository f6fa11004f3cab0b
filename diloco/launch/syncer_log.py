"""Where a syncer writes its events: in its own run folder, and of several each in that of the whole run as well."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from diloco.launch.console import identity_lines, lines_to
from diloco.launch.eventlog import EventLog
from diloco.launch.placing import has_several, syncer_dir, syncer_name
from diloco.launch.run_dir import run_dir_of
from diloco.learner.meter import in_whole

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from diloco.launch.eventlog import Event
    from diloco.launch.schema import RunConfig


def syncer_log(config: RunConfig, stack: ExitStack) -> EventLog:
    """The log of the syncer's own events; ``stack`` closes it.

    Its own folder is a run folder like that of a run with one syncer, and counts the fragments as its journal does.
    The whole run's has them in the whole model's numbers.
    """
    name = syncer_name(config.cluster.syncer.index)
    whole = EventLog(run_dir_of(config).events, name) if has_several(config) else None
    if whole is not None:
        stack.callback(whole.close)  # After the other, which tells it.
    log = EventLog(syncer_dir(config).events, name, also=identity_lines(lines_to(sys.stderr, name)))
    stack.callback(log.close)
    if whole is not None:
        log.follow(_in_whole(config, whole))
    return log


def _in_whole(config: RunConfig, whole: EventLog) -> Callable[[Event], None]:
    from diloco.launch import build

    held, index = build.held_of(config), config.cluster.syncer.index

    def take(event: Event) -> None:
        fields = {key: value for key, value in event.items() if key != "what"}
        whole.emit(str(event["what"]), in_whole(fields, held) | {"of_syncer": index})

    return take
