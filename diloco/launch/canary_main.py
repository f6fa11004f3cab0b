"""``diloco canary``: check this machine for silent data corruption by repeating recorded steps."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.launch.arguments import OneLineParser, limit_threads
from diloco.launch.canary import digest_after, recorded, repeatable
from diloco.launch.errors import ConfigError, ExitCode
from diloco.launch.site_rank import in_words

if TYPE_CHECKING:
    from collections.abc import Sequence

DOES = """Re-runs a few inner steps from a site's recorded state, twice, and compares the bits: a machine that corrupts
data silently is found this way and no other.

  diloco canary runs/nimble-otter/sites/site-a
  diloco canary runs/nimble-otter/sites/site-a/checkpoints/step-0000000050 --expect DIGEST

With --expect it runs once and compares with what another machine has printed.  Only machines of one kind (processor or
accelerator, torch, number of threads) round alike: between others a difference means nothing.  Exit 1: different."""


def main(arguments: Sequence[str]) -> ExitCode:
    """Run the verb."""
    parser = OneLineParser(prog="diloco canary", description=DOES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", metavar="CHECKPOINT|SITE_FOLDER", type=Path)
    parser.add_argument("--steps", type=int, default=4, help="inner steps to do again (default 4)")
    parser.add_argument("--expect", metavar="DIGEST", help="compare with this instead of a second run here")
    parser.add_argument("--nice", type=int, default=0, help="give other processes so much precedence, 0 to 19")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(arguments)
    if given.steps < 1:
        raise ConfigError(f"--steps is {given.steps}: at least 1")
    if given.expect is not None and not re.fullmatch(r"[0-9a-f]{64}", given.expect):
        raise ConfigError(f"--expect is {given.expect[:80]!r}: 64 hexadecimal digits, as a canary prints them")
    if not 0 <= given.nice <= 19:
        raise ConfigError(f"--nice is {given.nice}: from 0 to 19")
    os.nice(given.nice)
    with in_words():
        found, wanted, where = _compared(given.target, given.steps, given.expect)
    same = found == wanted
    told = {"same": same, "digest": found, "other": wanted, "steps": given.steps, **where}
    print(json.dumps(told) if given.json else _lines(told, given.expect is not None), flush=True)
    return ExitCode.OK if same else ExitCode.FAILED


def _compared(target: Path, steps: int, expect: str | None) -> tuple[str, str, dict[str, object]]:
    """Return the digest found here, the digest that it must equal, and facts about the checkpoint and the device."""
    place = recorded(target)
    config = repeatable(place.config)
    limit_threads(config.site.threads, deterministic=True)

    import torch

    if config.site.threads:
        torch.set_num_threads(config.site.threads)
    first, step = digest_after(config, place.checkpoint, steps)
    other = expect or digest_after(config, place.checkpoint, steps)[0]
    cuda = torch.cuda.is_available() and config.site.device != "cpu"
    device = torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {torch.get_num_threads()} threads"
    kind = {"device": device, "torch": torch.__version__}
    return first, other, {"checkpoint": str(place.checkpoint), "step": step, **kind}


def _lines(told: dict[str, object], expected: bool) -> str:
    verdict = "same" if told["same"] else "DIFFERENT: this machine, or the other one, does not compute what it should"
    other = "expected" if expected else "again"
    return (
        f"{told['checkpoint']}: {told['steps']} steps from step {told['step']} on {told['device']}, "
        f"torch {told['torch']}\n{'digest':<8} {told['digest']}\n{other:<8} {told['other']}\n{verdict}"
    )
