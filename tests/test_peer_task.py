"""What the benchmarks hold every system's result against: it must be what torch's own optimizer comes to."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.peers.task import OUTER_LR, OUTER_MOMENTUM, Task, report, reports_in, round_seconds

TASK = Task(numel=200_000, sites=3, rounds=3, warm_up=2, seed=7)


def by_torch(task: Task, rule: str) -> list[np.ndarray]:
    """The values that all sites end with, worked out by torch on all of every tensor."""
    theta = [torch.nn.Parameter(torch.from_numpy(values)) for values in task.zeros()]
    outer = torch.optim.SGD(theta, lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
    for step in range(task.rounds_in_all):
        sites = [[values.detach().clone() for values in theta] for _ in range(task.sites)]
        for site, values in enumerate(sites):
            task.disturb([tensor.numpy() for tensor in values], site, step)
        means = [torch.stack(each).mean(0) for each in zip(*sites, strict=True)]
        with torch.no_grad():
            for values, mean in zip(theta, means, strict=True):
                if rule == "mean":
                    values.copy_(mean)
                else:
                    values.grad = values - mean
        if rule == "nesterov":
            outer.step()
    return [values.detach().numpy() for values in theta]


@pytest.mark.parametrize("rule", ["mean", "nesterov"])
def test_what_is_expected_is_what_torch_comes_to(rule: str) -> None:
    assert TASK.error(by_torch(TASK, rule), rule) < 1e-5


def test_a_system_that_averages_nothing_or_something_else_is_far_off() -> None:
    alone = TASK.zeros()
    for step in range(TASK.rounds_in_all):
        TASK.disturb(alone, 0, step)
    assert TASK.error(alone, "mean") > 0.5
    assert TASK.error(TASK.zeros(), "mean") == pytest.approx(1.0)
    assert TASK.error(by_torch(TASK, "mean"), "nesterov") > 0.2
    with pytest.raises(ValueError, match="rule is 'median': one of mean, nesterov"):
        TASK.expected("median")


def test_every_value_is_disturbed_and_no_two_sites_or_rounds_alike() -> None:
    def disturbed(site: int, step: int) -> np.ndarray:
        values = TASK.zeros()
        TASK.disturb(values, site, step)
        return np.concatenate(values)

    first = disturbed(0, 0)
    assert (first != 0).all()
    assert (first == disturbed(0, 0)).all()
    assert (first != disturbed(1, 0)).mean() > 0.99
    assert (first != disturbed(0, 1)).mean() > 0.99


def test_a_round_lasts_from_the_last_ready_to_the_last_done(capsys: pytest.CaptureFixture[str]) -> None:
    print("whatever a peer says first")
    report(1, spans=[(2.0, 5.0), (6.0, 7.0)])
    report(0, spans=[(1.0, 6.0), (6.5, 6.9)])
    found = reports_in(capsys.readouterr().out)
    assert [each["site"] for each in found] == [0, 1]
    assert round_seconds(found) == [4.0, 0.5]
    assert Task.read(TASK.written) == TASK
