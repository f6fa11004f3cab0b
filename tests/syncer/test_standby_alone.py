"""A standby that an operator promotes where there is no lease: nobody but the operator knows of the old syncer."""

from __future__ import annotations

from pathlib import Path

from tests.loopback.cluster import Log, eventually, free_port, serving
from tests.syncer.test_standby import BOUND_S, a_toy, following


def test_an_old_syncer_that_is_started_again_is_older_than_the_one_that_was_promoted(tmp_path: Path) -> None:
    """Whoever restarts it knows nothing of the promotion, and its own next epoch must not be taken for the new one."""
    toy = a_toy(tmp_path, mode="async")
    with following(toy, f"127.0.0.1:{toy.port}") as (standby, _):
        with serving(toy):
            eventually(lambda: standby.ready, BOUND_S, "it has a state")
        promoted = toy.syncer(Log().emit, folder="standby", port=free_port())
        promoted.start(standby.promote())
        try:
            for _ in range(2):
                with serving(toy) as (old, _address, _log):
                    epoch = old.core.ask(lambda machine: machine.state.epoch)
                    assert epoch < promoted.core.ask(lambda machine: machine.state.epoch)
        finally:
            promoted.stop()
