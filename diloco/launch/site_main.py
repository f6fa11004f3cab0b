"""``diloco site``: one site, in this process, in ranks of a torchrun that we start, or as a rank of somebody else's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from diloco.launch import config as configs
from diloco.launch.arguments import limit_threads, load_config, settings_parser
from diloco.launch.errors import ConfigError, ExitCode, VerbError
from diloco.launch.placing import towards
from diloco.launch.run_dir import held, run_dir_of
from diloco.launch.site_rank import Place, place_from_environment, run_rank
from diloco.launch.stopping import Stopping

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.launch.run_dir import SiteDir
    from diloco.launch.schema import RunConfig

DOES = """One site of a run: trains on its share of the text and exchanges updates with the syncer.

  diloco site run.name=nimble-otter site.id=site-b site.syncer=127.0.0.1:7077
  torchrun --nproc-per-node 8 -m diloco site --config site.yaml      (a rank reads a resolved file: --print-config)

The same command again goes on from the newest checkpoint.  Ctrl-C once: sends what is unsent and leaves (exit 75, or 0
when the run had finished); twice: at once.  Under your own torchrun it is 0 for both, because
torchrun takes 75 for a failure."""
LOG_TAIL_CHARS = 600


def main(arguments: Sequence[str]) -> ExitCode:
    """Run the verb."""
    given = settings_parser("site", DOES).parse_args(arguments)
    place = place_from_environment()
    if place is not None and given.config is None:
        raise VerbError(ExitCode.USAGE, "under torchrun, ranks read a resolved file: diloco site --config FILE")
    config = load_config(given)
    check_identity(config)
    limit_threads(config.site.threads, deterministic=config.inner.deterministic)
    _check(config)
    folder = run_dir_of(config).site(config.site.id)
    with ExitStack() as stack:
        if place is None or place.rank == 0:
            # Before anything in the folder is touched: it may be that of a site that runs.
            stack.enter_context(held(folder.root))
            configs.write(config, folder.config)
        code, text = (
            run_ranks(config) if place is None and config.site.nproc > 1 else run_rank(config, place or Place())
        )
    if text:
        print(text)
    return ExitCode.OK if place is not None and code is ExitCode.DRAINED else code


def check_identity(config: RunConfig) -> None:
    """A site must say which run and which site it is, and its name must be fit for the wire and for a folder."""
    if config.run.name is None:
        raise ConfigError("run.name is null: give the name that `diloco syncer` printed")
    if not configs.is_name(config.site.id):
        raise ConfigError(f"site.id is {config.site.id!r}: letters, digits, '.', '_' and '-', at most 64")
    if config.site.nproc < 1:
        raise ConfigError(f"site.nproc is {config.site.nproc}: at least 1")


def _check(config: RunConfig) -> None:
    from diloco.launch import build

    build.check(config)
    towards(config)
    build.site_share(config)
    build.site_security(config)


def run_ranks(config: RunConfig) -> tuple[ExitCode, str]:
    """Start ``site.nproc`` ranks by torchrun and wait for them; how rank 0 ended.

    torchrun is in a session of its own, so that a Ctrl-C reaches rank 0 from here, once, and nobody else.
    """
    folder = run_dir_of(config).site(config.site.id)
    for left in (folder.ending, folder.speaker):
        with suppress(FileNotFoundError):
            left.unlink()
    log = folder.root / "torchrun.log"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={config.site.nproc}"]
    command = [*torchrun, "-m", "diloco.launch.site_rank", str(folder.config)]
    with Stopping(f"{config.site.id} sends what is unsent and leaves") as stopping, log.open("ab") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "diloco.launch.tether", str(os.getpid()), *command],
            stderr=errors,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        stopping.ask(lambda: None)
        told = False
        while child.poll() is None:
            time.sleep(0.05)
            if stopping.asked and not told:
                # Again and again: it may not have written its number yet when the signal came.
                told = tell_speaker(folder, child)
    return ending_of_ranks(config.site.id, folder, child.returncode, log.read_text(errors="replace"))


def tell_speaker(folder: SiteDir, child: subprocess.Popen[bytes]) -> bool:
    """Ask rank 0 to leave; False when there is none yet."""
    try:
        os.kill(int(folder.speaker.read_text()), signal.SIGTERM)
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return child.poll() is not None
    return True


def ending_of_ranks(site_id: str, folder: SiteDir, returned: int, log: str) -> tuple[ExitCode, str]:
    """How rank 0 said that it ended; VerbError with the end of the log where it said nothing."""
    try:
        told = json.loads(folder.ending.read_text())
        code, text = ExitCode(told["code"]), str(told["text"])
    except (OSError, ValueError, KeyError):
        tail = " ".join(log[-LOG_TAIL_CHARS:].split())
        raise VerbError(
            ExitCode.FAILED,
            f"the ranks of {site_id} ended with code {returned}; {folder.root}/torchrun.log: {tail}",
        ) from None
    if code in (ExitCode.OK, ExitCode.DRAINED):
        return code, text
    raise VerbError(code, text)
