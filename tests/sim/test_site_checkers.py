"""The checkers of the sites: their list, and conservation by hand; ``test_mutants`` shows the rest."""

from __future__ import annotations

import pytest

from diloco.sim.checkers import Violation
from diloco.sim.site_checkers import CHECKERS, Conservation, Ledger
from tests.sim.small import Small


def test_names_are_unique_and_every_one_says_what_breaks_it() -> None:
    names = [checker.name for checker in CHECKERS]
    assert len(set(names)) == len(names)
    assert all(checker.mutation for checker in CHECKERS)


def test_progress_that_vanishes_between_two_events_is_seen() -> None:
    small = Small()
    small.run(3)
    process = small.process("a")
    process.theta[0] = (process.theta[0][0] - 1, *process.theta[0][1:])
    with pytest.raises(Violation, match="r is") as raised:
        small.run(1)
    assert raised.value.checker == Conservation.name


def test_token_that_vanishes_is_seen() -> None:
    small = Small()
    small.run(3)
    process = small.process("a")
    process.machine.state.fragments[1].tokens_merged -= 1
    with pytest.raises(Violation) as raised:
        small.run(1)
    assert raised.value.checker == Ledger.name
