from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from diloco.config.errors import ConfigError
from diloco.lab import experiment as labs
from diloco.lab.cell import make_warm, run_cell
from tests.lab.laboratories import rows, written


@pytest.mark.slow
def test_a_cell_is_trained_from_the_warm_start_of_its_seed(tmp_path: Path) -> None:
    lab = labs.read(written(tmp_path, rows("alone", "together")))
    both = {"alone": replace(lab.rows["alone"], control=True), "together": lab.rows["together"]}
    lab = replace(lab, rows=both, speeds=(1.0, 0.5), warm_steps=8)
    alone, together = labs.cells(lab, ("run.tokens=768",), (3,), ())
    assert alone.warm_digest == together.warm_digest
    make_warm(alone, tmp_path)
    (warm,) = (tmp_path / "warm").iterdir()
    before = warm.stat().st_mtime_ns
    make_warm(together, tmp_path)
    assert warm.stat().st_mtime_ns == before, "it is made once"
    whole = warm.read_bytes()
    warm.write_bytes(whole[:-1])
    make_warm(alone, tmp_path)
    assert warm.read_bytes() == whole, "a damaged one is made again"
    found = [run_cell(cell, tmp_path) for cell in (alone, together)]
    assert [each.row for each in found] == ["alone", "together"]
    assert found[0].tokens == 768
    assert 768 <= found[1].tokens < 768 + 4 * 32, "at most the steps that were under way more"
    assert found[1].versions > 3
    assert 0.9 < found[1].goodput <= 1
    assert found[1].seconds < found[0].seconds, "the control waits for its slowest part"
    assert all(each.loss < 5.6 for each in found)


def test_a_run_that_does_not_come_to_its_tokens_is_no_result(tmp_path: Path) -> None:
    lab = replace(labs.read(written(tmp_path, rows("a"))), speeds=(1.0,))
    (cell,) = labs.cells(lab, ("run.tokens=1536", "outer=diloco", "outer.inner_steps=3"), (0,), ())
    far = replace(cell, row=replace(cell.row, rtt_s=25.0))
    with pytest.raises(ConfigError, match=r"row a, seed 0: \d+ of 1536 tokens were trained in 192 s of virtual time"):
        run_cell(far, tmp_path)


@pytest.mark.slow
def test_trouble_costs_time_and_is_drawn_by_the_seed(tmp_path: Path) -> None:
    lab = replace(labs.read(written(tmp_path, rows("a"))), speeds=(1.0, 0.7))
    (calm,) = labs.cells(lab, ("run.tokens=1536",), (0,), ())
    row = replace(calm.row, jitter=0.3, interruptions_per_hour=360.0, away_s=5.0, lost_share=0.3)
    rough = replace(calm, row=row)
    quiet, found, again = (run_cell(cell, tmp_path) for cell in (calm, rough, rough))
    assert found.seconds > quiet.seconds
    assert found.goodput < quiet.goodput
    assert (found.loss, found.seconds, found.points) == (again.loss, again.seconds, again.points)
