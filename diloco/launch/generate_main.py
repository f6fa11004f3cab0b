"""``diloco generate``: continue a text with a model, to look at its output."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from diloco.launch import config as configs
from diloco.launch.arguments import settings_parser
from diloco.launch.errors import ConfigError, ExitCode, VerbError
from diloco.launch.sources import add_source, taken_from

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Sequence

    from diloco.inner.evaluate import SamplingOptions
    from diloco.inner.tokenizer import Tokenizer
    from diloco.launch.taken import Taken

DOES = """Goes on with a text, token by token as they are made, on this machine's CPU.

  diloco generate runs/nimble-otter "def main("                    the newest version that the run's folder holds
  diloco generate runs/warm/train/checkpoints "def main(" --temperature 0 --tokens 50
  diloco generate otter "def main(" --seed 3                       a folder in Hugging Face's form
  diloco generate --syncer 127.0.0.1:7077 "def main("              what it publishes now

What does not fit the model's context is forgotten from its beginning, half of it at a time."""
UNFINISHED = "\ufffd"
"""The character that decoding gives for an incomplete UTF-8 sequence."""
LETTER_TOKENS_MAX = 4


def main(arguments: Sequence[str]) -> ExitCode:
    """Run the verb."""
    parser = settings_parser("generate", DOES, shown=False)
    add_source(parser)
    parser.add_argument("--tokens", type=int, default=100, metavar="N", help="how many to make; default: 100")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0: the likeliest; default: 0.8")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest; 0: from all")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draw; default: 0")
    given = parser.parse_args(arguments)
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
            "--syncer HOST:PORT and a prompt" if given.syncer else "a run, a checkpoint or a model's folder, a prompt"
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
