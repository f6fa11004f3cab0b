"""Where a site's tokens are."""

from __future__ import annotations

import random

from diloco.sync.progress import (
    FragmentProgress,
    LearnerState,
    Ledger,
    Orphan,
    Sent,
    SentState,
    combined,
    ledger_of,
    site_ledger,
)


def a_state(draw: random.Random) -> LearnerState:
    parts = []
    for _ in range(draw.randint(1, 7)):
        part = FragmentProgress()
        part.tokens_merged, part.tokens_refused = draw.randint(0, 99), draw.randint(0, 9)
        part.tokens_overwritten, part.unsent_tokens = draw.randint(0, 9), draw.randint(0, 50)
        part.in_flight = [Sent(1, 0, draw.randint(1, 9), 1, merged_version=draw.choice([None, 3]))]
        part.orphans = [Orphan(2, draw.randint(1, 9))]
        parts.append(part)
    state = LearnerState(parts, tokens_processed=max(part.accounted() for part in parts))
    for part in parts:
        part.tokens_lost = state.tokens_processed - part.accounted()
    return state


def test_invariant_10_the_sites_ledger_balances_in_whole_tokens() -> None:
    for seed in range(300):
        state = a_state(random.Random(seed))
        ledger = site_ledger(state)
        assert ledger.balanced(), f"seed {seed}: {ledger}"
        for index in range(len(state.fragments)):
            assert ledger_of(state, index).balanced(), f"seed {seed}"
        lost = sum(part.tokens_lost for part in state.fragments) / len(state.fragments)
        assert abs(ledger.lost - lost) <= 1, f"seed {seed}: no part is off by more than its rounding"


def test_what_an_ended_part_did_not_hear_of_is_unsent_in_the_whole() -> None:
    assert combined([Ledger(3, 3, 0, 0, 0, 0, 0), Ledger(3, 0, 0, 0, 3, 0, 0)]).balanced()
    assert combined([Ledger(6, 6, 0, 0, 0, 0, 0), Ledger(4, 4, 0, 0, 0, 0, 0)]) == Ledger(6, 5, 0, 0, 1, 0, 0)


def test_a_ledger_can_be_out_of_balance() -> None:
    assert Ledger(6, 1, 1, 1, 1, 1, 1).balanced()
    assert not Ledger(7, 1, 1, 1, 1, 1, 1).balanced()


def test_a_merged_update_is_in_flight_until_it_is_adopted_but_its_tokens_are_not() -> None:
    part = FragmentProgress(in_flight=[Sent(1, 0, 5, 1), Sent(2, 0, 7, 1, merged_version=4)])
    assert [sent.sequence for sent in part.undecided()] == [1]
    assert part.tokens_in_flight() == 5


def test_an_update_awaits_its_answer_until_it_is_accepted() -> None:
    for state in SentState:
        part = FragmentProgress(in_flight=[Sent(1, 0, 5, 1, state=state)])
        assert part.unanswered() == (state is not SentState.ACCEPTED)
