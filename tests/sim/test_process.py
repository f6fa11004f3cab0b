from __future__ import annotations

from diloco.sim.world import Died, Process


def test_frozen_process_does_everything_after_the_thaw_in_order() -> None:
    seen: list[int] = []
    process = Process(lambda: None)
    process.freeze()
    process.deliver(lambda: seen.append(1))
    process.deliver(lambda: seen.append(2))
    assert seen == []
    process.thaw()
    assert seen == [1, 2]


def test_dead_process_does_nothing() -> None:
    seen: list[int] = []
    process = Process(lambda: seen.append(-1))
    process.freeze()
    process.deliver(lambda: seen.append(1))
    process.kill()
    process.thaw()
    process.deliver(lambda: seen.append(2))
    assert seen == [], "a kill from outside is known to whoever kills"


def test_process_that_dies_in_the_middle_says_so() -> None:
    seen: list[int] = []
    process = Process(lambda: seen.append(-1))

    def die() -> None:
        seen.append(1)
        raise Died("here")

    process.deliver(die)
    process.deliver(lambda: seen.append(2))
    assert (seen, process.alive) == ([1, -1], False)
