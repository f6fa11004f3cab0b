"""``diloco export`` and ``diloco generate``, and the options of all verbs that read a model."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from diloco.config import compose as configs
from diloco.config.arguments import SYNCER, is_address, limit_threads, settings_parser
from diloco.config.errors import ConfigError, ExitCode, VerbError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from diloco.inner.evaluate import SamplingOptions
    from diloco.inner.tokenizer import Tokenizer
    from diloco.models.read import Taken


EXPORT = """Write a model as a folder in Hugging Face's form: safetensors, config.json, tokenizer.json; all or nothing.

  diloco export runs/nimble-otter --to otter                     the newest version that the run's folder holds
  diloco export runs/nimble-otter --version 120 --to otter-120   as far back as its snapshots and its journal go
  diloco export 127.0.0.1:7077 --to otter                        what it publishes now; it says of which model
  diloco export runs/warm/train/checkpoints --to warm            what `diloco train`, or a site, has trained
  diloco export runs/nimble-otter/sites/site-a --version 120 --to otter-120    the version that a site has as its base

transformers.AutoModelForCausalLM.from_pretrained("otter") gives the same logits.  lm-evaluation-harness takes the
folder as it is (lm_eval --model hf --model_args pretrained=otter), and so does run.init_from for another run."""
SIZE_UNITS: Mapping[str, int] = MappingProxyType({"kB": 10**3, "MB": 10**6, "GB": 10**9})


def export(arguments: Sequence[str]) -> ExitCode:
    """Run the verb."""
    parser = settings_parser("export", EXPORT, shown=False)
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="write it there; the folder must not exist")
    add_source(parser)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of the values; default: fp32")
    parser.add_argument("--shard-size", metavar="SIZE", default="5GB", help="largest file, as in 500MB; default: 5GB")
    given = with_syncer(parser.parse_args(arguments))
    sources = [text for text in given.settings if "=" not in text]
    settings = [text for text in given.settings if "=" in text]
    if len(sources) != (0 if given.syncer else 1):
        raise VerbError(ExitCode.USAGE, "give one run folder, checkpoint, folder of a model, or a syncer's HOST:PORT")
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
    from diloco.config import build
    from diloco.config.model_files import DTYPES, write_folder

    options = build.model_options(taken.config)
    tokenizer = configs.tokenizer_of(taken.config)
    try:
        size = write_folder(
            given.to, taken.parameters, options, tokenizer, dtype=DTYPES[given.dtype], shard_bytes=shard_bytes
        )
    except ValueError as error:
        raise ConfigError(f"{taken.called}: of another model: {error}") from error
    print(f"{given.to}: {taken.called}, {size:,} bytes of {given.dtype}")


# --- ``diloco generate`` ---------------------------------------------------------------------------------------------

GENERATE = """Goes on with a text, token by token as they are made, on this machine's CPU.

  diloco generate runs/nimble-otter "def main("                    the newest version that the run's folder holds
  diloco generate runs/warm/train/checkpoints "def main(" --temperature 0 --tokens 50
  diloco generate otter "def main(" --seed 3                       a folder in Hugging Face's form
  diloco generate 127.0.0.1:7077 "def main("                       what it publishes now

What does not fit the model's context is forgotten from its beginning, half of it at a time."""
UNFINISHED = "\ufffd"
"""The character that decoding gives for an incomplete UTF-8 sequence."""
LETTER_TOKENS_MAX = 4


def generate(arguments: Sequence[str]) -> ExitCode:
    """Run the verb."""
    parser = settings_parser("generate", GENERATE, shown=False)
    add_source(parser)
    parser.add_argument("--tokens", type=int, default=100, metavar="N", help="how many to make; default: 100")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0: the likeliest; default: 0.8")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest; 0: from all")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draw; default: 0")
    given = with_syncer(parser.parse_args(arguments))
    sources, prompt, settings = _parted(given)
    options = _options(given)
    _speak(taken_from(given, sources, settings, threads=0), prompt, options)
    return ExitCode.OK


def _parted(given: argparse.Namespace) -> tuple[list[str], str, list[str]]:
    """Return the source (if given), the prompt and the settings; the last word is the prompt, whatever it contains."""
    words: list[str] = given.settings
    wanted = 1 if given.syncer else 2
    if given.syncer:
        *settings, prompt = words or [""]
        sources: list[str] = []
    else:
        sources, settings, prompt = words[:1], words[1:-1], words[-1] if len(words) > 1 else ""
    if len(words) < wanted or not all("=" in text for text in settings):
        what = (
            "a syncer's HOST:PORT and a prompt" if given.syncer else "a run, a checkpoint or a model's folder, a prompt"
        )
        raise VerbError(ExitCode.USAGE, f'give {what}, in quotes and last, as in diloco generate runs/latest "def f("')
    return sources, prompt, settings


def _options(given: argparse.Namespace) -> SamplingOptions:
    from diloco.inner.evaluate import SamplingOptions

    try:
        return SamplingOptions(tokens=given.tokens, temperature=given.temperature, top_k=given.top_k, seed=given.seed)
    except ValueError as error:
        raise ConfigError(f"--{str(error).replace('top_k', 'top-k')}") from error


def _speak(taken: Taken, prompt: str, options: SamplingOptions) -> None:
    from diloco.inner.evaluate import generate

    tokenizer, model = configs.tokenizer_of(taken.config), taken.model()
    sys.stdout.write(prompt)
    try:
        for text in texts(generate(model, _begun(prompt, tokenizer), options, tokenizer.end_of_file), tokenizer):
            sys.stdout.write(text)
            sys.stdout.flush()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    print()


def _begun(prompt: str, tokenizer: Tokenizer) -> list[int]:
    """Return the prompt's tokens; for an empty prompt the end-of-file token, after which a new text begins."""
    if prompt or tokenizer.end_of_file is None:
        return [int(token) for token in tokenizer.encode_batch([prompt])[0]]
    return [tokenizer.end_of_file]


def texts(tokens: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the text that ``tokens`` add, as soon as each character is complete.

    Tokens are decoded together with the ones before, because a token decoded alone may lack its leading space.
    """
    before: list[int] = []
    held: list[int] = []
    for token in tokens:
        held.append(token)
        text = tokenizer.decode([*before, *held])
        if text.endswith(UNFINISHED) and len(held) < LETTER_TOKENS_MAX:
            continue
        yield text[len(tokenizer.decode(before)) :]
        before, held = held, []
    if held:
        yield tokenizer.decode([*before, *held])[len(tokenizer.decode(before)) :]


# --- The options of verbs that read a model --------------------------------------------------------------------------


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add ``--syncer`` and ``--version`` to ``parser``."""
    parser.add_argument("--syncer", metavar="HOST:PORT", help="as HOST:PORT alone: what it publishes now")
    parser.add_argument("--version", metavar="N", default="newest", help="of every fragment; default: the newest")


def with_syncer(given: argparse.Namespace) -> argparse.Namespace:
    """Return ``given`` with a first argument HOST:PORT, or ``site.syncer=``, as its ``syncer``."""
    if given.syncer is None and given.settings and is_address(first := given.settings[0].removeprefix(SYNCER)):
        given.syncer, given.settings = first, given.settings[1:]
    return given


def version_of(text: str) -> int | None:
    """Return the version that ``--version`` names, None for the newest; ConfigError for anything else."""
    if text == "newest":
        return None
    if not text.isascii() or not text.isdecimal():
        raise ConfigError(f"--version is {text!r}: a number from 0 on, or newest")
    return int(text)


def taken_from(given: argparse.Namespace, sources: Sequence[str], settings: Sequence[str], threads: int) -> Taken:
    """Return the model at ``sources[0]``, or at ``--syncer``; limits this process to ``threads`` from here on."""
    version = version_of(given.version)
    limit_threads(threads)
    if not given.syncer:
        from diloco.models.read import take

        return take(sources[0], settings, given.config, version)
    if version is not None:
        raise ConfigError(f"--version is {version}: a syncer hands out its newest alone; a run's folder has others")
    from diloco.config.syncer_settings import of_client

    config = configs.read(given.config, settings) if given.config else of_client(given.syncer, settings)
    from diloco.models.read import take_from_syncer

    return take_from_syncer(given.syncer, config)
