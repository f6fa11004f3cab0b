from __future__ import annotations

import json

import pytest

from tests.hunts.disaster import BOUND_S, main


@pytest.mark.slow
@pytest.mark.parametrize("way", ["backup", "site"])
def test_a_run_that_lost_its_syncers_folder_goes_on(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--ways", way, "--sites", "2", "--versions", "3"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0, found
    assert 0 < found[way]["seconds_to_all_merging"] < BOUND_S
    assert found[way]["tokens"]["merged"] > 0
    assert found["violations"] == 0


def test_a_way_that_there_is_not_is_named() -> None:
    with pytest.raises(SystemExit, match="--ways is 'luck': some of backup, site"):
        main(["--ways", "luck"])
