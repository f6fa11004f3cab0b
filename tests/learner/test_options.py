"""What a site's agent is told before it starts."""

from __future__ import annotations

import pytest

from diloco.learner.exchange import AgentOptions
from diloco.outer.optimizer import OuterOptimizerOptions


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("up_codec", "int5"),
        ("adopt_alpha", 1.5),
        ("measure_from", "above"),
        ("ahead", OuterOptimizerOptions(kind="adamw")),
        ("feedback", 1.5),
        ("feedback", 0.5),
        ("join_timeout_s", 0.0),
        ("lock_step_timeout_s", -1.0),
        ("finish_timeout_s", 0.0),
        ("meter_every_s", 0.0),
    ],
)
def test_an_option_that_cannot_work_is_refused_with_its_value(field: str, value: object) -> None:
    said = value.kind if isinstance(value, OuterOptimizerOptions) else value
    with pytest.raises(ValueError, match=repr(said).replace(".", r"\.")):
        AgentOptions(folder="x", **{field: value})  # type: ignore[arg-type]
