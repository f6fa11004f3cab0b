"""What cannot be is refused before anything begins, by the name of its field."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from diloco.inner.evaluate import SamplingOptions
from diloco.inner.holding import ParallelOptions, check_cut
from diloco.inner.model import ComputeOptions, ModelOptions
from diloco.inner.optimizer import InnerOptions
from diloco.inner.parallel import SiteGroup
from diloco.inner.trainer import TrainerOptions
from tests.inner.conftest import options

two_ranks = partial(SiteGroup, world=2, device="cpu")
text = partial(options, path="somewhere")


@pytest.mark.parametrize(
    ("made", "wrong"),
    [
        (ModelOptions, {"vocab_size": 1, "layers": 0, "dim": 0, "heads": 3, "kv_heads": 3, "ffn_dim": -1}),
        (ModelOptions, {"heads": 128, "context": 0, "rope_theta": 0.5, "norm_eps": 0.0}),
        (ComputeOptions, {"activation_checkpoint": "some", "loss_chunk": -1, "kernels": "triton"}),
        (InnerOptions, {"optimizer": "adam", "schedule": "linear", "lr": 0.0, "muon_lr": -1.0, "clip": math.inf}),
        (InnerOptions, {"muon_momentum": 1.0, "betas": [0.9, 1.0], "weight_decay": -0.1, "warmup_steps": -1}),
        (InnerOptions, {"betas": [0.9], "batch_sequences": 0, "accumulation": 0, "decay_share": 0.0, "lr_floor": 1.5}),
        (TrainerOptions, {"precision": "fp8", "checkpoint_steps": -1, "checkpoints_kept": 0, "checkpoint_wait_s": 0.0}),
        (TrainerOptions, {"nonfinite_max": 0, "slowdown": 0.5, "peak_tflops": -1.0}),
        (TrainerOptions, {"slowdown": math.inf, "peak_tflops": math.nan}),
        (SamplingOptions, {"tokens": 0, "temperature": -0.1, "top_k": -1, "seed": -1}),
        (SamplingOptions, {"temperature": math.inf}),
        (SiteGroup, {"world": 0, "rank": 1, "device": "tpu", "timeout_s": 0.0}),
        (two_ranks, {"rank": 2, "master_port": 0}),
        (text, {"kind": "csv", "tokenizer": "gpt2", "shard_tokens": 1, "lock_wait_s": 0.0, "path": "", "field": ""}),
        (text, {"split": "", "validation_split": "train", "documents_max": -1, "dtype": "float32"}),
    ],
)
def test_each_option_that_cannot_be_is_named(made: Callable[..., object], wrong: dict[str, Any]) -> None:
    for field, value in wrong.items():
        with pytest.raises(ValueError, match="^" + re.escape(f"{field} is {value!r}: ")):
            made(**{field: value})


def fit_four_ranks(**told: Any) -> None:
    """A layout, and what else is said of the model."""
    layout = {key: value for key, value in told.items() if key in ParallelOptions.__dataclass_fields__}
    ParallelOptions(**layout).sizes(4)
    model = {key: value for key, value in told.items() if key not in layout}
    check_cut(ModelOptions(**{"dim": 32, "heads": 4, **model}), 4)


@pytest.mark.parametrize(
    ("made", "told", "words"),
    [
        (ComputeOptions, {"activation_checkpoint": "selective", "compile": True}, "nt is 'selective': full or none"),
        (ComputeOptions, {"kernels": "liger", "activation_checkpoint": "selective"}, "'liger': torch with activation"),
        (ComputeOptions, {"kernels": "liger", "compile": True}, "kernels is 'liger': torch with compile=true"),
        (ComputeOptions, {"kernels": "liger", "loss_chunk": 8}, "kernels is 'liger': torch with loss_chunk"),
        (text, {"kind": "stdlib"}, "path is 'somewhere': kind=stdlib reads"),
        (options, {"path": "", "kind": "stdlib", "pattern": "*.md"}, "pattern is '*.md': kind=stdlib reads"),
        (fit_four_ranks, {"parallel": "zero"}, "parallel is 'zero': one of ddp, fsdp"),
        (fit_four_ranks, {"shard_ranks": 2}, "shard_ranks is 2: only under fsdp, hsdp, tp+fsdp"),
        (fit_four_ranks, {"parallel": "fsdp", "tensor_ranks": 2}, "tensor_ranks is 2: only under tp, tp+fsdp"),
        (fit_four_ranks, {"parallel": "tp", "tensor_ranks": -1}, "tensor_ranks is -1: 0 (derived) or more"),
        (fit_four_ranks, {"parallel": "hsdp"}, "shard_ranks is 0: at least 1 for hsdp"),
        (fit_four_ranks, {"parallel": "tp+fsdp"}, "tensor_ranks is 0: at least 1 for tp+fsdp"),
        (fit_four_ranks, {"parallel": "tp", "tensor_ranks": 3}, "tensor_ranks is 3: a divisor of the site's 4 rank(s)"),
        (fit_four_ranks, {"parallel": "tp", "tensor_ranks": 2}, "tensor_ranks is 2: all 4 ranks, or tp+fsdp"),
        (fit_four_ranks, {"parallel": "hsdp", "shard_ranks": 3}, "shard_ranks is 3: a divisor of 4"),
        (fit_four_ranks, {"parallel": "hsdp", "shard_ranks": 1}, "shard_ranks is 1: at least 2; copies alone are ddp"),
        (fit_four_ranks, {"parallel": "fsdp", "shard_ranks": 2}, "shard_ranks is 2: all 4 ranks, or hsdp for copies"),
        (fit_four_ranks, {"heads": 6, "dim": 24}, "tensor_ranks is 4: a divisor of the model's heads=6"),
        (fit_four_ranks, {"kv_heads": 2}, "tensor_ranks is 4: a divisor of the model's kv_heads=2"),
        (fit_four_ranks, {"ffn_dim": 34}, "tensor_ranks is 4: a divisor of the model's ffn_dim=34"),
    ],
)
def test_options_that_do_not_go_together_are_named(
    made: Callable[..., object], told: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        made(**told)
