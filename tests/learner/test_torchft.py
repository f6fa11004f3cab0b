"""Streaming DiLoCo by torchft's numbers: its six recorded runs of mocked updates.

Two fragments of one parameter each, from 1.0; an inner step subtracts 2; outer SGD of rate 2; each fragment every six
steps, three apart.  The numbers are those of torchft's own fixtures (diloco_regression_test, mocked updates 0 to 5).
Its two replicas are alike, so that one stands for both.
"""

from __future__ import annotations

import pytest
import torch

from diloco.learner.tensors import SiteTensors
from diloco.outer.fragments import plan_layout
from diloco.outer.optimizer import NOTHING, OuterOptimizerOptions, outer_step
from tests.learner.participant import held

PERIOD, STEPS = 6, 15
UNDISTURBED = [1.0 - 2 * step for step in range(STEPS + 1)]
RUNS = {
    (0, 0.0): (
        [1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59],
        [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53],
        [-11, -23, -35, -47],
    ),
    (0, 0.5): (
        [1, -1, -3, -8, -10, -12, -14, -16, -18, -24.5, -26.5, -28.5, -30.5, -32.5, -34.5, -40.25],
        [1, -1, -3, -5, -7, -9, -17, -19, -21, -23, -25, -27, -32, -34, -36, -38],
        [-11, -23, -29, -35],
    ),
    (0, 1.0): (UNDISTURBED, UNDISTURBED, [-11, -23, -23, -23]),
    (1, 0.0): (
        [1, -1, -3, -7, -9, -11, -13, -15, -17, -27, -29, -31, -33, -35, -37, -47],
        [1, -1, -3, -5, -7, -9, -19, -21, -23, -25, -27, -29, -39, -41, -43, -45],
        [-7, -19, -27, -39, -47],
    ),
    (1, 0.5): (
        [1, -1, -3, -6, -8, -10, -12, -14, -16, -21.5, -23.5, -25.5, -27.5, -29.5, -31.5, -35.75],
        [1, -1, -3, -5, -7, -9, -15, -17, -19, -21, -23, -25, -29, -31, -33, -35],
        [-7, -19, -25, -31, -38],
    ),
    (1, 1.0): (UNDISTURBED, UNDISTURBED, [-7, -19, -23, -23]),
}
"""By delay and alpha: the values of either parameter after each step, and of the fragments' versions as they came.  The
recordings of a few runs end before the last version."""


@pytest.mark.parametrize(("delay", "alpha"), RUNS)
def test_the_recorded_runs_come_out_exactly(delay: int, alpha: float) -> None:
    layout = plan_layout([("first", (1,)), ("second", (1,))], 2)
    parameters = {name: torch.ones(1) for name, _ in layout.parameters}
    site = SiteTensors(layout, held(parameters), "blend", alpha, measure_from="published")
    theta = [torch.ones(1), torch.ones(1)]
    for index in (0, 1):
        site.arrived(index, 0, theta[index], "")
        site.retake(index, 0, [])
    options = OuterOptimizerOptions(kind="sgd", lr=2.0, momentum=0.0)
    walked, published = [[1.0], [1.0]], []
    for step in range(1, STEPS + 1):
        for values in parameters.values():
            values -= 2
        for index in (0, 1):
            place = 3 * (index + 1)
            if (step + delay - place) % PERIOD == 0:
                gradient = site.measure(index, []).pseudo_gradient()
                theta[index], _ = outer_step(theta[index], gradient, NOTHING, options)
            if step >= place and (step - place) % PERIOD == 0:
                version = 1 + step // PERIOD
                site.arrived(index, version, theta[index], "")
                site.adopt(index, version, [])
                published.append(theta[index].item())
            walked[index].append(site.local(index).item())
    first, second, versions = RUNS[delay, alpha]
    assert walked == [first, second]
    assert published[: len(versions)] == versions
