"""A torchtitan job as a site of a run: nothing but its command line.  Needs GPUs and `pip install 'diloco[titan]'`.

A config of torchtitan's is a site's when it is asked for through diloco.titan, in the form MODULE.CONFIG:

    torchrun --nproc-per-node 8 -m torchtitan.train --module diloco.titan --config llama3.llama3_8b \
        --diloco.syncer HOST:7077 --diloco.site fra

The rest of this file is a config that needs no download: torchtitan's smallest Llama, on this Python's own sources:

    titan="torchrun --standalone -m torchtitan.train --module diloco.titan --config examples.torchtitan_site.tiny"
    $titan --diloco.version0 v0.safetensors
    diloco syncer run.name=titan run.tokens=400e3 outer=diloco outer.quorum=2 outer.inner_steps=20 \
        model.kind=file run.init_from=v0.safetensors cluster.syncer.listen=127.0.0.1:7077
    $titan --diloco.syncer 127.0.0.1:7077 --diloco.site fra --dataloader.index 0 --dataloader.num_sites 2
    $titan --diloco.syncer 127.0.0.1:7077 --diloco.site iad --dataloader.index 1 --dataloader.num_sites 2

Parallelism is torchtitan's affair (`--parallelism.pipeline_parallel_degree 2`), and may be another at every site."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import TrainingConfig
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from examples.plain_loop import batch, text


class Text(BaseDataLoader):
    """This Python's own sources; no two sites read the same.  Your data set goes here, or torchtitan's."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        index: int = 0
        num_sites: int = 1

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **told: Any) -> None:
        self.data = text(config.index * dp_world_size + dp_rank, config.num_sites * dp_world_size)
        self.size, self.length, self.cursor = told["local_batch_size"], told["seq_len"], 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            inputs, targets = batch(self.data, self.cursor, self.size, self.length)
            self.cursor += 1
            yield {"input": inputs, "positions": torch.arange(inputs.shape[1]).expand(inputs.shape)}, targets

    def state_dict(self) -> dict[str, int]:
        return {"cursor": self.cursor}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.cursor = state["cursor"]


class Nothing(BaseTokenizer):
    """The text is tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config): ...

    def __init__(self, config: Config, *, tokenizer_path: str) -> None: ...

    encode = decode = get_vocab_size = None


def tiny() -> Trainer.Config:
    config = llama3_debugmodel()
    config.dataloader, config.tokenizer = Text.Config(), Nothing.Config()
    config.training = TrainingConfig(local_batch_size=16, seq_len=64, steps=1000)
    config.optimizer = default_adamw(lr=3e-3)
    return config
