"""``diloco export``: write the published model as a folder that ``transformers`` loads."""

from __future__ import annotations

import re
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from diloco.launch import config as configs
from diloco.launch.arguments import settings_parser
from diloco.launch.errors import ConfigError, ExitCode, VerbError
from diloco.launch.sources import add_source, taken_from

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from diloco.launch.taken import Taken

DOES = """A model as a folder in Hugging Face's form: safetensors, config.json and tokenizer.json, whole or not at all.

  diloco export runs/nimble-otter --to otter                     the newest version that the run's folder holds
  diloco export runs/nimble-otter --version 120 --to otter-120   as far back as its snapshots and its journal go
  diloco export --syncer 127.0.0.1:7077 --to otter               what it publishes now; it says of which model
  diloco export runs/warm/train/checkpoints --to warm            what `diloco train`, or a site, has trained
  diloco export runs/nimble-otter/sites/site-a --version 120 --to otter-120    the version that a site has as its base

transformers.AutoModelForCausalLM.from_pretrained("otter") gives the same logits.  lm-evaluation-harness takes the
folder as it is (lm_eval --model hf --model_args pretrained=otter), and so does run.init_from for another run."""
SIZE_UNITS: Mapping[str, int] = MappingProxyType({"kB": 10**3, "MB": 10**6, "GB": 10**9})


def main(arguments: Sequence[str]) -> ExitCode:
    """Run the verb."""
    parser = settings_parser("export", DOES, shown=False)
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="write it there; the folder must not exist")
    add_source(parser)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of the values; default: fp32")
    parser.add_argument("--shard-size", metavar="SIZE", default="5GB", help="largest file, as in 500MB; default: 5GB")
    given = parser.parse_args(arguments)
    sources = [text for text in given.settings if "=" not in text]
    settings = [text for text in given.settings if "=" in text]
    if len(sources) != (0 if given.syncer else 1):
        raise VerbError(ExitCode.USAGE, "give one run folder, checkpoint or folder of a model, or --syncer HOST:PORT")
    if given.to is None:
        raise VerbError(ExitCode.USAGE, "--to is missing: the folder that is to be made")
    if given.to.exists():
        raise ConfigError(f"--to is {str(given.to)!r}: it exists already, and a model gets a folder of its own")
    shard_bytes = size_of(given.shard_size)
    _write(taken_from(given, sources, settings, threads=1), given, shard_bytes)
    return ExitCode.OK


def size_of(text: str) -> int:
    """Parse a size such as ``500MB`` into bytes; ConfigError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMG]B)", text)
    size = int(float(found[1]) * SIZE_UNITS[found[2]]) if found else 0
    if size < 1:
        raise ConfigError(f"--shard-size is {text!r}: a size, as in 500MB or 5GB")
    return size


def _write(taken: Taken, given: argparse.Namespace, shard_bytes: int) -> None:
    from diloco.launch import build
    from diloco.launch.field_folder import DTYPES, write_folder

    options = build.model_options(taken.config)
    tokenizer = configs.tokenizer_of(taken.config)
    try:
        size = write_folder(
            given.to, taken.parameters, options, tokenizer, dtype=DTYPES[given.dtype], shard_bytes=shard_bytes
        )
    except ValueError as error:
        raise ConfigError(f"{taken.called}: of another model: {error}") from error
    print(f"{given.to}: {taken.called}, {size:,} bytes of {given.dtype}")
