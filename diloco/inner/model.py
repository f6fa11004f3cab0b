"""A decoder-only transformer in the field's usual form, and how it is computed.

``Kernels`` compute everything but matrix products.  RMSNorm, rotary positions and SwiGLU take several passes over
memory each in torch, and one in a fused kernel.  The fused loss computes loss and gradients for a part of the tokens at
a time, so the logits of all tokens never exist together.  The fused kernels are liger-kernel's, an optional dependency,
for accelerators.  The values are the same within rounding.

``ComputeOptions`` change the speed and memory use of a model, but not what it learns.  ``prepare`` sets them before the
model is sharded over ranks; parameters and their names stay the same.

The model has pre-norm blocks with RMSNorm (arXiv 1910.07467), rotary positions (arXiv 2104.09864), SwiGLU (arXiv
2002.05202), grouped-query attention (arXiv 2305.13245) and PyTorch's own scaled-dot-product attention.  It has no
biases and no dropout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from diloco.inner import require
from diloco.inner.parallel import local, put

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KINDS = ("torch", "liger")


class Kernels:
    """Operations computed by torch, on any device."""

    fused_loss: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """Mean cross-entropy of x [tokens, dim], the head's matrix and the targets [tokens]; None: not fused."""

    def normalised(self, norm: nn.RMSNorm, x: Tensor) -> Tensor:
        """Return ``norm(x)``."""
        found: Tensor = norm(x)
        return found

    def rotated(self, query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
        """Return both rotated by their positions, each [B, heads, T, head_dim]; may overwrite its arguments."""
        return rotate(query, cosines, sines), rotate(key, cosines, sines)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return silu(gate) * up; the backward pass may overwrite ``gate`` and ``up``."""
        return functional.silu(gate) * up


class LigerKernels(Kernels):
    """Operations computed by liger-kernel; ValueError if it is not installed."""

    def __init__(self) -> None:
        try:
            from liger_kernel import ops
        except ImportError as error:
            why = f"liger-kernel is not installed ({error}): pip install 'diloco[fused]'"
            raise ValueError(f"kernels is 'liger': {why}") from error
        self._ops: Any = ops

    def normalised(self, norm: nn.RMSNorm, x: Tensor) -> Tensor:
        """Return ``norm(x)`` in one pass; the sum of squares is in fp32."""
        found: Tensor = self._ops.LigerRMSNormFunction.apply(x, norm.weight, norm.eps)
        return found

    def rotated(self, query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate both in one pass, in place."""
        # The tables have each angle once; the kernel's last argument is the width of a rotated head.
        width = query.shape[-1]
        turned: tuple[Tensor, Tensor] = self._ops.LigerRopeFunction.apply(query, key, cosines, sines, None, 1, width)
        return turned

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return silu(gate) * up in one pass; the backward pass writes the gradients over gate and up."""
        found: Tensor = self._ops.LigerSiLUMulFunction.apply(gate, up)
        return found

    def fused_loss(self, x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean loss and its gradients together, a part of the tokens at a time."""
        found: Tensor = self._ops.LigerFusedLinearCrossEntropyFunction.apply(x, head, targets)[0]
        return found


def kernels_of(kind: str, device: torch.device) -> Kernels:
    """Return the kernels called ``kind``; ValueError if they are not available on ``device``."""
    if kind == "torch":
        return Kernels()
    require(device.type != "cpu", "kernels", kind, "its kernels are for accelerators, and this is a CPU: use torch")
    return LigerKernels()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn each pair (i, i + head_dim / 2) of ``x`` [B, heads, T, head_dim] by its position's angle; dtype kept.

    The fp32 tables promote the products, so the angles are never rounded to bf16.
    """
    other = x.roll(x.shape[-1] // 2, dims=-1)
    turned = x * torch.cat((cosines, cosines), dim=-1) + other * torch.cat((-sines, sines), dim=-1)
    return turned.to(x.dtype)


KEPT = ("none", "full", "selective")


@dataclass(kw_only=True, slots=True)
class ComputeOptions:
    """How to compute the model: activation checkpointing, compilation, loss chunks and kernels."""

    activation_checkpoint: str = "none"
    """``full``: keep only each block's input for the backward pass and recompute the block (arXiv 1604.06174).
    ``selective``: keep also the outputs of matrix products and attention, and recompute the rest (arXiv 2205.05198)."""
    compile: bool = False
    """Whether each block goes through ``torch.compile``."""
    loss_chunk: int = 0
    """Tokens whose logits exist at the same time; 0: all of a micro-batch."""
    kernels: str = "torch"
    """What computes RMSNorm, rotary positions, SwiGLU and the loss: ``torch``, or ``liger``'s fused kernels."""

    def __post_init__(self) -> None:
        kept = self.activation_checkpoint
        require(kept in KEPT, "activation_checkpoint", kept, f"one of {', '.join(KEPT)}")
        wanted = "full or none with compile=true, because the compiler decides what to keep of a block"
        require(kept != "selective" or not self.compile, "activation_checkpoint", kept, wanted)
        require(self.loss_chunk >= 0, "loss_chunk", self.loss_chunk, "0 (all at once) or more")
        require(self.kernels in KINDS, "kernels", self.kernels, f"one of {', '.join(KINDS)}")
        if self.kernels == "torch":
            return
        # liger rotates queries in place, and ``selective`` relies on the unrotated ones that it kept.
        require(kept != "selective", "kernels", self.kernels, "torch with activation_checkpoint=selective")
        require(not self.compile, "kernels", self.kernels, "torch with compile=true, which fuses the same operations")
        require(not self.loss_chunk, "kernels", self.kernels, "torch with loss_chunk: liger's loss is in parts anyway")


def prepare(model: Transformer, options: ComputeOptions, device: torch.device) -> None:
    """Set ``options`` on ``model``; ValueError if the machine does not support them."""
    model.loss_chunk = options.loss_chunk
    model.kernels = kernels_of(options.kernels, device)
    if options.compile:
        try:  # So that a missing compiler shows now and not in the first step.
            torch.compile(lambda x: functional.silu(x) * 2.0)(torch.ones(8, device=device))
        except Exception as error:  # compilers, and their absence, raise errors of any kind
            why = " ".join(str(error).split())
            raise ValueError(
                f"compile is true: torch.compile does not work here on {device.type}: {why[:300]}"
            ) from error
    for block in model.blocks:
        block.keeps = options.activation_checkpoint
        if options.compile:
            block.layer = torch.compile(block.layer)  # type: ignore[method-assign]


def contexts() -> Callable[[], Any]:
    """Return the contexts of ``selective``, which keep what is expensive to compute and not large."""
    aten = torch.ops.aten
    kept = [
        aten.mm.default,
        aten.bmm.default,
        aten.addmm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    ]
    return partial(create_selective_checkpoint_contexts, kept)


FFN_MULTIPLE = 32
PLAIN_LENGTH_MAX = 512
EMBEDDING_STD = 1.0
"""Scale of an untied embedding.  The first RMSNorm removes the scale, so it only sets the weight of the token itself in
the residual stream against what the blocks add: on the demo model 1.0 was .2 to 1.2 % better than 0.5."""


@dataclass(kw_only=True, slots=True)
class ModelOptions:
    """Size and shape of the transformer.  A value that cannot work raises ``ValueError`` with field and value."""

    vocab_size: int = 1024
    layers: int = 4
    dim: int = 128
    heads: int = 4
    kv_heads: int = 0
    """Key and value heads, each shared by ``heads / kv_heads`` query heads; 0 for as many as ``heads``."""
    ffn_dim: int = 0
    """Width of the SwiGLU layer; 0 for 8/3 of ``dim``, rounded up to a multiple of 32."""
    context: int = 128
    """Longest sequence in tokens."""
    tied: bool = False
    """Whether the head uses the embedding's matrix."""
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name, least in (("vocab_size", 2), ("layers", 1), ("dim", 2), ("heads", 1), ("context", 1)):
            value = getattr(self, name)
            require(value >= least, name, value, f"at least {least}")
        require(self.dim % self.heads == 0, "heads", self.heads, f"a divisor of dim={self.dim}")
        require(
            self.head_dim % 2 == 0, "heads", self.heads, f"dim/heads must be even for rotary positions, dim={self.dim}"
        )
        require(self.kv_heads >= 0, "kv_heads", self.kv_heads, "0 (as many as heads) or more")
        wanted = f"0 or a divisor of heads={self.heads}"
        require(self.heads % self.kv_heads_used == 0, "kv_heads", self.kv_heads, wanted)
        require(self.ffn_dim >= 0, "ffn_dim", self.ffn_dim, "0 (derived) or more")
        require(self.rope_theta > 1.0, "rope_theta", self.rope_theta, "above 1")
        require(self.norm_eps > 0.0, "norm_eps", self.norm_eps, "positive")

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.heads

    @property
    def kv_heads_used(self) -> int:
        """Key and value heads with the 0 resolved."""
        return self.kv_heads or self.heads

    @property
    def ffn_dim_used(self) -> int:
        """Width of the SwiGLU layer with the 0 resolved."""
        return self.ffn_dim or math.ceil(8 * self.dim / 3 / FFN_MULTIPLE) * FFN_MULTIPLE


def rotary_tables(options: ModelOptions) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, fp32 [context, head_dim / 2]: angle t * theta^(-2i / head_dim) (RoFormer, equation 15).

    The angles are computed in fp32 by the same operations as in the field's models, so that an imported or exported
    model gives the same logits there and here.  More precise angles changed them by 7e-5 after 512 tokens.
    """
    pair = torch.arange(0, options.head_dim, 2).float()
    angles = torch.outer(torch.arange(options.context).float(), 1.0 / options.rope_theta ** (pair / options.head_dim))
    return angles.cos(), angles.sin()


def plain_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal softmax(q k^T / sqrt(head_dim)) v, not fused; [B, heads, T, head_dim], fewer key heads allowed."""
    if key.shape[1] != query.shape[1]:
        shared = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    length = query.shape[2]
    future = torch.full((length, length), -math.inf, dtype=query.dtype, device=query.device).triu_(1)
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2) + future
    return torch.softmax(scores, dim=-1) @ value


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention by the faster of two equivalent ways; [B, heads, T, head_dim], fewer key heads allowed.

    It is PyTorch's fused attention, except for bf16 on a CPU and sequences of up to 512 tokens.  There the backward
    pass of its flash kernel is 6 times slower than the formula written out (15.4 against 2.5 ms at 16 x 4 x 128 x 32,
    one thread, torch 2.13): the whole step of the demo model takes 60 ms instead of 109.
    """
    if query.device.type == "cpu" and query.dtype == torch.bfloat16 and query.shape[2] <= PLAIN_LENGTH_MAX:
        with torch.autocast("cpu", enabled=False):
            return plain_attention(query, key, value)
    grouped = key.shape[1] != query.shape[1]
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)


class Linear(nn.Linear):
    """torch's layer; ``Transformer.fill`` writes its initial values."""

    def reset_parameters(self) -> None:
        """Draw nothing: on the meta device, drawing makes torch import modules for a second."""


class Embedding(nn.Embedding):
    """torch's layer; ``Transformer.fill`` writes its initial values."""

    def reset_parameters(self) -> None:
        """Draw nothing, as in :class:`Linear`."""


class Attention(nn.Module):
    """Causal self-attention with rotary positions and, if asked, fewer key and value heads than query heads."""

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.head_dim = options.head_dim
        kv_dim = options.kv_heads_used * options.head_dim
        self.query = Linear(options.dim, options.dim, bias=False)
        self.key = Linear(options.dim, kv_dim, bias=False)
        self.value = Linear(options.dim, kv_dim, bias=False)
        self.output = Linear(options.dim, options.dim, bias=False)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor, *, kernels: Kernels) -> Tensor:
        """Map [B, T, dim] to [B, T, dim]."""
        query, key, value = self.split(x)
        query, key = kernels.rotated(query, key, cosines, sines)
        return self.join(causal_attention(query, key, value))

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value of ``x`` [B, T, dim], each [B, heads, T, head_dim]."""
        parts = (self.query(x), self.key(x), self.value(x))
        query, key, value = [part.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2) for part in parts]
        return query, key, value

    def join(self, mixed: Tensor) -> Tensor:
        """Map the attended values [B, heads, T, head_dim] to [B, T, dim]."""
        projected: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return projected


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate x) * up x)."""

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.gate = Linear(options.dim, options.ffn_dim_used, bias=False)
        self.up = Linear(options.dim, options.ffn_dim_used, bias=False)
        self.down = Linear(options.ffn_dim_used, options.dim, bias=False)

    def forward(self, x: Tensor, *, kernels: Kernels) -> Tensor:
        """Map [..., dim] to [..., dim]."""
        mapped: Tensor = self.down(kernels.gated(self.gate(x), self.up(x)))
        return mapped


class Block(nn.Module):
    """One pre-norm layer."""

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(options.dim, eps=options.norm_eps)
        self.attention = Attention(options)
        self.feed_forward_norm = nn.RMSNorm(options.dim, eps=options.norm_eps)
        self.feed_forward = FeedForward(options)
        self.keeps = "none"
        """The block's ``ComputeOptions.activation_checkpoint``."""

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor, kernels: Kernels) -> Tensor:
        """Map [B, T, dim] to [B, T, dim]."""
        given = (x, cosines, sines, kernels)
        if self.keeps == "none" or not torch.is_grad_enabled():
            return self.layer(*given)
        # Nothing here is random, so no random state needs to be preserved.
        again = partial(checkpoint, self.layer, *given, use_reentrant=False, preserve_rng_state=False)
        made: Tensor = again(context_fn=contexts()) if self.keeps == "selective" else again()
        return made

    def layer(self, x: Tensor, cosines: Tensor, sines: Tensor, kernels: Kernels) -> Tensor:
        """Compute the block: attention, then feed-forward, each added to the residual stream."""
        x = x + self.attention(kernels.normalised(self.attention_norm, x), cosines, sines, kernels=kernels)
        mixed: Tensor = x + self.feed_forward(kernels.normalised(self.feed_forward_norm, x), kernels=kernels)
        return mixed


class Transformer(nn.Module):
    """The whole model.  The same ``options`` and ``seed`` give the same fp32 parameters on every machine.

    Initial values come from the model's own generator on the CPU, so that building a model neither reads nor changes
    PyTorch's global random state.
    """

    cosines: Tensor
    sines: Tensor

    def __init__(self, options: ModelOptions, seed: int = 0) -> None:
        super().__init__()
        self.options = options
        self.kernels = Kernels()
        """They compute all operations but matrix products."""
        self.loss_chunk = 0
        """Tokens whose logits exist at the same time; 0 for all."""
        self.embedding = Embedding(options.vocab_size, options.dim)
        self.blocks = cast("Sequence[Block]", nn.ModuleList(Block(options) for _ in range(options.layers)))
        self.norm = nn.RMSNorm(options.dim, eps=options.norm_eps)
        self.head = Linear(options.dim, options.vocab_size, bias=False)
        if options.tied:
            self.head.weight = self.embedding.weight
        for name in ("cosines", "sines"):
            self.register_buffer(name, torch.empty(options.context, options.head_dim // 2), persistent=False)
        self.seed = seed
        if not self.cosines.is_meta:
            self.fill()

    @torch.no_grad()
    def fill(self) -> None:
        """Write the initial values drawn from ``seed``; of a sharded parameter, this rank's part of them.

        Matrices are normal with std 1/sqrt(fan in), divided by sqrt(2 layers) if they write to the residual stream.
        An untied head starts ten times smaller, so that the first loss is close to ln(vocab_size).  Each parameter is
        drawn whole, on the CPU, in order, so the values do not depend on the sharding.
        """
        generator = torch.Generator().manual_seed(self.seed)
        residual = 1.0 / math.sqrt(2 * self.options.layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                local(parameter).fill_(1.0)
                continue
            std = 1.0 / math.sqrt(parameter.shape[1])
            if name.endswith(("attention.output.weight", "feed_forward.down.weight")):
                std *= residual
            elif name == "head.weight":
                std *= 0.1
            elif name == "embedding.weight":
                std = 1.0 / self.options.dim if self.options.tied else EMBEDDING_STD
            put(parameter, torch.empty(parameter.shape).normal_(0.0, std, generator=generator))
        for buffer, table in zip((self.cosines, self.sines), rotary_tables(self.options), strict=True):
            buffer.copy_(table)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits [B, T, vocab_size] for ``tokens`` int64 [B, T], T at most ``context``; ValueError if longer.

        With ``targets`` int64 [B, T] return the mean loss.  It is computed here because a sharded head is gathered only
        during this call.
        """
        length = tokens.shape[1]
        require(length <= self.options.context, "sequence length", length, f"at most context={self.options.context}")
        x = self.embedding(tokens)
        cosines, sines = self.cosines[:length], self.sines[:length]
        for block in self.blocks:
            x = block(x, cosines, sines, self.kernels)
        x = self.kernels.normalised(self.norm, x)
        if targets is not None and self.kernels.fused_loss is not None:
            return self.kernels.fused_loss(x.flatten(0, 1), self.head.weight, targets.flatten())
        if targets is not None and self.loss_chunk:
            return chunked_loss(self.head, x, targets, self.loss_chunk)
        logits: Tensor = self.head(x)
        return logits if targets is None else next_token_loss(logits, targets)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy, nats per token, fp32 scalar; ``logits`` [B, T, V], ``targets`` int64 [B, T]."""
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def chunked_loss(head: nn.Module, x: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """Return ``next_token_loss`` of ``head(x)``, ``x`` [B, T, dim], with the logits of ``chunk`` tokens at a time.

    The backward pass computes each chunk's logits again, so those of all tokens never exist together.  That costs one
    more product with the head's matrix and saves V times T values in fp32.
    """
    total = torch.zeros((), dtype=torch.float32, device=x.device)
    parts, all_wanted = torch.split(x.flatten(0, 1), chunk), torch.split(targets.flatten(), chunk)
    for part, wanted in zip(parts, all_wanted, strict=True):
        total = total + checkpoint(_summed_loss, head, part, wanted, use_reentrant=False, preserve_rng_state=False)
    return total / targets.numel()


def _summed_loss(head: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(head(x).float(), targets, reduction="sum")


def flops_per_token(options: ModelOptions, sequence_length: int | None = None) -> int:
    """Return the FLOPs of one training step per token: 6 N + 12 L d T (PaLM, arXiv 2204.02311, appendix B).

    N counts the matrices that multiply (the head, not the embedding); the attention term is not halved for causality.
    """
    length = sequence_length or options.context
    kv_dim = options.kv_heads_used * options.head_dim
    block = 2 * options.dim * options.dim + 2 * options.dim * kv_dim + 3 * options.dim * options.ffn_dim_used
    multiplied = options.layers * block + options.dim * options.vocab_size
    return 6 * multiplied + 12 * options.layers * options.dim * length
