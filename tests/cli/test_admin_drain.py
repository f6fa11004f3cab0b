"""``diloco drain`` says what it does; ``test_operating`` says it to a syncer."""

from __future__ import annotations

import pytest

from diloco.cli.main import main


def test_help_names_the_words_that_follow(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["drain", "--help"])
    assert "diloco drain runs/nimble-otter" in capsys.readouterr().out
