"""How a site's part begins badly, or ends."""

from __future__ import annotations

from diloco.learner.agent import Finished
from diloco.learner.transfer import JoinFailed


def test_what_failed_says_its_kind_and_its_words() -> None:
    error = JoinFailed("mismatch", "run_id is 'a' at the site and 'b' at the syncer")
    assert (error.kind, error.text, str(error)) == ("mismatch", error.text, error.text)
    assert Finished("left", "asked", {"lost": 0}) == Finished("left", "asked", {"lost": 0})
