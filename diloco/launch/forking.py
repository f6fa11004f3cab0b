"""What a training loop needs that forks: a loader's workers, above all."""

from __future__ import annotations

import os

SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"


def let_workers_fork() -> None:
    """Tell gRPC that no process forked from this one speaks through it; before it is first imported.

    Else it tries, at each fork, to bring its threads into a state that a child could go on from, gives up where they
    are busy, as an agent's are, and a worker may then be aborted by a lock that it has inherited.  Who has set it
    otherwise knows why.
    """
    os.environ.setdefault(SUPPORT, "0")
