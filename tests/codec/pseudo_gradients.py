"""A real pseudo-gradient: what a tiny model moves in some steps, as the learner would measure it."""

from __future__ import annotations

import torch


def trained(steps: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (before, after) of a small network that learns to add, as flat fp32."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(8, 64), (64,), (64, 64), (64,), (64, 1), (1,)]
    weights = [torch.randn(shape, generator=generator) * shape[0] ** -0.5 for shape in shapes]
    before = torch.cat([each.reshape(-1) for each in weights])
    parameters = [each.clone().requires_grad_() for each in weights]
    for _ in range(steps):
        x = torch.randn(32, 8, generator=generator)
        hidden = x
        for layer in range(3):
            hidden = hidden @ parameters[2 * layer] + parameters[2 * layer + 1]
            hidden = torch.relu(hidden) if layer < 2 else hidden
        loss = (hidden.squeeze(-1) - x.sum(dim=1)).square().mean()
        for each, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            each.data.sub_(gradient, alpha=1e-2)
    return before, torch.cat([each.detach().reshape(-1) for each in parameters])
