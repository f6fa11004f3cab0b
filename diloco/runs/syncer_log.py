"""The event logs of a syncer: in its own run folder and, of several syncers, in that of the whole run as well."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from diloco.config.placing import has_several, syncer_dir, syncer_name
from diloco.config.run_dir import run_dir_of
from diloco.observe.console import identity_lines, lines_to
from diloco.observe.eventlog import EventLog

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from diloco.config.schema import RunConfig
    from diloco.observe.eventlog import Event


def syncer_log(config: RunConfig, stack: ExitStack) -> EventLog:
    """Return the log of the syncer's own events; ``stack`` closes it.

    Its own folder is a run folder like that of a run with one syncer, where fragments are numbered as in its journal.
    The whole run's log numbers them as in the whole model.
    """
    name = syncer_name(config.cluster.syncer.index)
    whole = EventLog(run_dir_of(config).events, name) if has_several(config) else None
    if whole is not None:
        stack.callback(whole.close)  # After the other log, which writes to it.
    log = EventLog(syncer_dir(config).events, name, also=identity_lines(lines_to(sys.stderr, name)))
    stack.callback(log.close)
    if whole is not None:
        log.follow(_in_whole(config, whole))
    return log


def _in_whole(config: RunConfig, whole: EventLog) -> Callable[[Event], None]:
    from diloco.config import build
    from diloco.learner.several_syncers import in_whole

    held, index = build.held_of(config), config.cluster.syncer.index

    def take(event: Event) -> None:
        fields = {key: value for key, value in event.items() if key != "what"}
        whole.emit(str(event["what"]), in_whole(fields, held) | {"of_syncer": index})

    return take
