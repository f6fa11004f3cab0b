"""The inner optimizers, gradient clipping, and the learning rate as a pure function of progress.

Muon (Keller Jordan, https://kellerjordan.github.io/posts/muon) takes whole matrices and sharded ones.  torch's own Muon
always computes its Newton-Schulz steps in bf16, which a CPU without bf16 emulates at a fiftieth of the speed of fp32:
here the caller chooses the format.  torch's also multiplies DTensors with 11 to 16 collectives per matrix (torch 2.13),
rounds differently in every layout, and fails if there are more ranks than rows.  Here the momentum stays sharded.  The
update is gathered once, one matrix at a time; every rank computes the same steps with it, as under ddp, and keeps its
own part.

The optimizers: ``muon`` gives the 2-D matrices of the blocks to Muon and all else (embedding, head, norms) to AdamW
(arXiv 1711.05101).  ``sgd`` is plain, without momentum or decay: for tests of equivalence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, get_total_norm

from diloco.inner import require
from diloco.inner.parallel import box_of, is_cut, local, sides_cut

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.tensor import DTensor
    from torch.optim.optimizer import ParamsT

    from diloco.inner.model import Transformer
    from diloco.inner.parallel import SiteGroup

STEADY = 1e-6
"""Added to the norm before dividing by it, as in torch."""


class Muon(torch.optim.Muon):
    """Muon for DTensors and plain matrices.  Its state is that of torch's Muon: ``momentum_buffer``, sharded alike."""

    def __init__(self, matrices: ParamsT, *, dtype: torch.dtype = torch.bfloat16, **options: Any) -> None:
        """``dtype`` is that of the Newton-Schulz steps; ``options`` are those of torch's Muon but ``adjust_lr_fn``."""
        super().__init__(matrices, **options)
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do one step.  A collective of the ranks that share a matrix."""
        assert closure is None, "the trainer has its gradients already"
        for group in self.param_groups:
            momentum = group["momentum"]
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(gradient)
                buffer = state["momentum_buffer"]
                buffer.lerp_(gradient, 1 - momentum)
                update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
                matrix = whole(update) if is_cut(update) else update
                moved = orthogonalize(matrix, self._dtype, group["ns_coefficients"], group["ns_steps"], group["eps"])
                if is_cut(parameter):
                    moved = moved[box_of(parameter).slices]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                rows, columns = update.shape
                lr = group["lr"] * math.sqrt(max(1, rows / columns))  # As torch's Muon adjusts it.
                local(parameter).add_(moved, alpha=-lr)


def orthogonalize(
    matrix: Tensor, dtype: torch.dtype, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Return U V^T of ``matrix`` = U S V^T, with singular values within about .5 and 1.5 of 1, in ``dtype``.

    ``steps`` Newton-Schulz steps of the fifth order, those of Jordan's and torch's Muon.
    """
    a, b, c = coefficients
    rows, columns = matrix.shape
    x = matrix.to(dtype)
    x = x.T if rows > columns else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if rows > columns else x


def whole(value: DTensor) -> Tensor:
    """Gather all of ``value`` on every rank, as a plain tensor.  A collective."""
    from torch.distributed.tensor import Replicate  # Takes 2 s, as in ``parallel.is_cut``.

    placements = list(value.placements)
    for side in reversed(sides_cut(value)):  # Undo the last cut first.
        placements[side] = Replicate()
        value = value.redistribute(placements=placements)
    gathered: Tensor = value.to_local()
    return gathered


OPTIMIZERS = ("adamw", "muon", "sgd")
SCHEDULES = ("wsd", "cosine", "constant")


@dataclass(kw_only=True, slots=True)
class InnerOptions:
    """What one inner step does.  A value that cannot work raises ``ValueError`` with field and value."""

    optimizer: str = "adamw"
    lr: float = 0.003
    """Peak learning rate of AdamW and SGD; under ``muon`` that of the embedding, the head and the norms."""
    muon_lr: float = 0.02
    muon_momentum: float = 0.95
    muon_weight_decay: float = 0.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Decoupled decay of AdamW's matrices; vectors (norms) have none."""
    clip: float = 1.0
    """Largest global norm of the gradient; 0 for no bound."""
    batch_sequences: int = 16
    """Sequences in one micro-batch of one rank."""
    accumulation: int = 1
    """Micro-batches in one inner step."""
    warmup_steps: int = 20
    """Steps of this site over which the learning rate rises from 0 to its peak."""
    schedule: str = "wsd"
    """``wsd``: flat, then linear to ``lr_floor`` over the last ``decay_share``.  ``cosine``: to ``lr_floor``."""
    decay_share: float = 0.4
    lr_floor: float = 0.0
    """Share of the peak learning rate at progress 1."""

    def __post_init__(self) -> None:
        require(self.optimizer in OPTIMIZERS, "optimizer", self.optimizer, f"one of {', '.join(OPTIMIZERS)}")
        require(self.schedule in SCHEDULES, "schedule", self.schedule, f"one of {', '.join(SCHEDULES)}")
        for name in ("lr", "muon_lr", "eps"):
            value = getattr(self, name)
            require(math.isfinite(value) and value > 0, name, value, "positive and finite")
        for name in ("weight_decay", "muon_weight_decay", "clip"):
            value = getattr(self, name)
            require(math.isfinite(value) and value >= 0, name, value, "finite and not negative")
        require(0 <= self.muon_momentum < 1, "muon_momentum", self.muon_momentum, "0 or more and below 1")
        good = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        require(good, "betas", self.betas, "two numbers, each 0 or more and below 1")
        require(self.batch_sequences >= 1, "batch_sequences", self.batch_sequences, "at least 1")
        require(self.accumulation >= 1, "accumulation", self.accumulation, "at least 1")
        require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "not negative")
        require(0 < self.decay_share <= 1, "decay_share", self.decay_share, "above 0 and at most 1")
        require(0 <= self.lr_floor <= 1, "lr_floor", self.lr_floor, "0 to 1")


def lr_factor(options: InnerOptions, progress: float, step: int) -> float:
    """Return the share of the peak learning rate for the step after ``step`` finished ones, at ``progress`` of the run.

    ``progress`` is the finished share of the run's tokens (0 to 1, clamped), never a site's own step count, so that
    fast and slow sites anneal together; only the warm-up counts own steps.  Pure; ValueError if it is not finite.
    """
    require(math.isfinite(progress), "progress", progress, "a finite share of the run")
    at = min(max(progress, 0.0), 1.0)
    warmup = min(1.0, (step + 1) / options.warmup_steps) if options.warmup_steps else 1.0
    shape = 1.0
    if options.schedule == "wsd":
        shape = min(1.0, (1.0 - at) / options.decay_share)
    elif options.schedule == "cosine":
        shape = 0.5 * (1.0 + math.cos(math.pi * at))
    return warmup * (options.lr_floor + (1.0 - options.lr_floor) * shape)


class InnerOptimizers:
    """One or two torch optimizers that step as one.  They keep references to the parameters and no copies.

    The state is a flat set of tensors by parameter name, so that it needs no pickle: torch keeps all of it in tensors.
    Hyperparameters are not part of it: after a resume, the options of the new start apply.
    """

    def __init__(self, parts: Mapping[str, torch.optim.Optimizer], options: InnerOptions) -> None:
        """``parts`` were made with named parameters."""
        self.options, self._parts = options, parts
        self._peaks = [float(group["lr"]) for group in self._groups]
        self._parameters = [parameter for group in self._groups for parameter in group["params"]]
        self._is_sharded = any(is_cut(parameter) for parameter in self._parameters)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers, which are other objects once a state was loaded."""
        return [group for optimizer in self._parts.values() for group in optimizer.param_groups]

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for optimizer in self._parts.values():
            optimizer.zero_grad(set_to_none=True)

    def clip(self, group: SiteGroup | None = None) -> float:
        """Scale the gradients to a global 2-norm of at most ``options.clip``, and return the norm before.

        If parameters are sharded it is one collective of ``group`` in any layout: every rank contributes the squares
        of its parts, divided by the number of ranks that hold the same part.  The norm is the same on every rank.
        """
        bound = self.options.clip or math.inf
        if group is None or not self._is_sharded:
            return float(clip_grad_norm_(self._parameters, bound))
        by_holders: dict[int, list[Tensor]] = {}
        for gradient in (each.grad for each in self._parameters if each.grad is not None):
            holders = group.world
            for side, placement in enumerate(gradient.placements if is_cut(gradient) else ()):
                assert not placement.is_partial(), "a gradient is summed by the time that it is clipped"
                holders //= 1 if placement.is_replicate() else gradient.device_mesh.size(side)
            by_holders.setdefault(holders, []).append(local(gradient))
        mine = sum(float(get_total_norm(parts)) ** 2 / holders for holders, parts in by_holders.items())
        norm = math.sqrt(group.all_reduce_sum([mine])[0])
        factor = min(1.0, bound / (norm + STEADY))
        with torch.no_grad():
            for parts in by_holders.values():
                torch._foreach_mul_(parts, factor)
        return norm

    def step(self) -> None:
        """Apply the gradients."""
        for optimizer in self._parts.values():
            optimizer.step()

    def set_lr_factor(self, factor: float) -> float:
        """Set every learning rate to ``factor`` times its peak, and return that of the first optimizer.

        That is Muon's under ``muon``, else AdamW's or SGD's.
        """
        for group, peak in zip(self._groups, self._peaks, strict=True):
            group["lr"] = peak * factor
        return self._peaks[0] * factor

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state's tensors (references, not copies), named ``part/parameter/field``."""
        found: dict[str, Tensor] = {}
        for part, optimizer in self._parts.items():
            names = _names(optimizer)
            for index, fields in optimizer.state_dict()["state"].items():
                found |= {f"{part}/{names[index]}/{key}": value for key, value in fields.items()}
        return found

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the state of ``state_dict``.  ValueError names a part or parameter that these optimizers do not have."""
        states: dict[str, dict[int, dict[str, object]]] = {part: {} for part in self._parts}
        for path, value in tensors.items():
            part, _, rest = path.partition("/")
            name, _, key = rest.rpartition("/")
            require(part in self._parts, "optimizer state", path, f"one of {', '.join(self._parts)} first")
            names = _names(self._parts[part])
            require(name in names, "optimizer state", path, f"a parameter that {part} steps")
            states[part].setdefault(names.index(name), {})[key] = value
        for part, optimizer in self._parts.items():
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": states[part], "param_groups": groups})


def _names(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the parameters' names, in the order in which torch numbers their states."""
    return [name for group in optimizer.param_groups for name in group["param_names"]]


def build_optimizers(model: Transformer, options: InnerOptions, precision: str = "fp32") -> InnerOptimizers:
    """Build optimizers over ``model``, with every parameter in exactly one of them.

    ``model`` is the plain module, not its DDP wrapper, after ``Spread`` has sharded it.  ``precision`` is the format of
    Muon's own products, "bf16" or "fp32".  It must be the same on all ranks of a site: see ``resolve_precision``.
    """
    left = dict(model.named_parameters())
    if options.optimizer == "sgd":
        return InnerOptimizers({"sgd": torch.optim.SGD(left.items(), lr=options.lr)}, options)
    parts: dict[str, torch.optim.Optimizer] = {}
    if options.optimizer == "muon":
        hidden = [name for name, parameter in left.items() if name.startswith("blocks.") and parameter.ndim == 2]
        parts["muon"] = Muon(
            [(name, left.pop(name)) for name in hidden],
            dtype=torch.bfloat16 if precision == "bf16" else torch.float32,
            lr=options.muon_lr,
            momentum=options.muon_momentum,
            weight_decay=options.muon_weight_decay,
        )
    matrices = [each for each in left.items() if each[1].ndim >= 2]
    vectors = [each for each in left.items() if each[1].ndim < 2]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    betas = (options.betas[0], options.betas[1])
    parts["adamw"] = torch.optim.AdamW(groups, lr=options.lr, betas=betas, eps=options.eps, fused=True)
    return InnerOptimizers(parts, options)
