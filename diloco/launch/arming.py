"""``DILOCO_KILL_AT``: where a syncer, a standby, a site or a restore kills itself.  For tests only; no run needs it.

``DILOCO_KILL_AT=journal.sync:7 diloco syncer ...`` ends that process by SIGKILL at the seventh passage of the step
``journal.sync`` (``diloco.durable.Step`` lists them).  Every operation counts twice, before and after it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from diloco.durable import armed_disk
from diloco.launch.errors import ConfigError

if TYPE_CHECKING:
    from diloco.durable import Disk

KILL_VARIABLE = "DILOCO_KILL_AT"


def disk_from_environment() -> Disk:
    """The plain disk, unless a test asks for a killing one."""
    try:
        return armed_disk(os.environ.get(KILL_VARIABLE, ""))
    except ValueError as error:
        raise ConfigError(f"{KILL_VARIABLE}: {error}") from error
