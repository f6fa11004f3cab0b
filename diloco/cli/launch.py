"""``diloco launch``: run on machines that a cluster manager allocates: write the files for it, and call its tool."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.config.arguments import load_config, parted, settings_parser
from diloco.config.compose import enough_sites
from diloco.config.errors import ConfigError, ExitCode, VerbError
from diloco.config.run_dir import name_run, run_dir_of
from diloco.durable import write_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from diloco.config.schema import RunConfig

TOOLS: Mapping[str, str] = {"docker": "docker", "slurm": "sbatch", "kubernetes": "kubectl", "skypilot": "sky"}
"""The command-line tool for each kind of launch."""


def main(arguments: Sequence[str]) -> ExitCode:
    """Run on machines that a cluster manager allocates.  For the syncer and each of cluster.sites it writes the
    files that the manager's tool needs, from the same settings as every verb; each process reads its own resolved file.

      diloco launch docker --dry-run                         images and a compose file, printed
      diloco launch slurm --dry-run --to jobs run.name=first site.syncer=syncer.example.org:7077 site=h100x8
      diloco launch kubernetes --dry-run --to manifests run.name=first launch.namespace=training
      diloco launch skypilot --to tasks run.name=first site.syncer=203.0.113.7:7077

    Without --dry-run it shows the commands of the tool (docker, sbatch, kubectl or sky), asks, and runs them.  Delete
    the files of processes that are not to run there: a run may have sites in many places.
    """
    parser = settings_parser("launch", main.__doc__)
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="write there; default: below the run's folder")
    parser.add_argument("--dry-run", action="store_true", help="only write the files, or print them without --to")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    given = parser.parse_args(arguments)
    words, given.settings = parted(given.settings)
    if len(words) != 1 or words[0] not in TOOLS:
        what = f", not {' '.join(words)}" if words else ""
        raise ConfigError(f"give one of {', '.join(TOOLS)}{what}")
    kind = words[0]
    config = load_config(given)
    name_run(config)
    if not given.dry_run and shutil.which(TOOLS[kind]) is None:
        why = f"{TOOLS[kind]} is not installed here: --dry-run writes the files anyway"
        raise VerbError(ExitCode.FAILED, why)
    files, calls, wheel = prepared(kind, config)
    if given.dry_run and given.to is None:
        for name, text in files.items():
            print(f"# --- {name} ---\n{text}")
        return ExitCode.OK
    folder = given.to or run_dir_of(config).root / "launch" / kind
    write(folder, files)
    if wheel is not None:
        shutil.copy(wheel, folder)
    print(f"{folder}: {', '.join(files)}")
    return ExitCode.OK if given.dry_run else _call(calls, folder, asks=not given.yes)


def prepared(kind: str, config: RunConfig) -> tuple[dict[str, str], list[list[str]], Path | None]:
    """Return the files that launch ``config``'s run, the commands that submit them, to be called in the files' folder,
    and the package to copy beside them, if any; ConfigError where it cannot be launched."""
    from diloco.config import build_syncer
    from diloco.deploy import docker, kubernetes, skypilot, slurm
    from diloco.deploy.rendering import has_syncer, package, processes

    build_syncer.check(config)
    enough_sites(config)
    if kind == "docker":
        return *docker.prepared(config), package(config).wheel
    way = {"slurm": slurm, "kubernetes": kubernetes, "skypilot": skypilot}[kind]
    found = kubernetes.prepared(config) if kind == "kubernetes" else processes(config)
    if kind != "kubernetes" and not has_syncer(config):
        listens = f"cluster.syncer.listen is {config.cluster.syncer.listen!r}"
        print(f"note: no files for the syncer, since other machines cannot reach it: {listens}", file=sys.stderr)
    files = {name: text for each in found for name, text in way.files(each).items()}
    return files, [way.call(each) for each in found], package(config).wheel if kind == "skypilot" else None


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Write ``files``, texts by name, into ``folder``; ConfigError where a different file of the same name exists."""
    for name, text in files.items():
        path = folder / name
        if path.exists() and path.read_text("utf-8", "replace") != text:
            raise ConfigError(f"{path} exists with other content: remove it, or give another --to")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_file(folder / name, text.encode())


def _call(found: Sequence[Sequence[str]], folder: Path, *, asks: bool) -> ExitCode:
    """Show the commands, ask, and run them; stop at the first that fails."""
    print(f"in {folder}:")
    for words in found:
        print(f"  {shlex.join(words)}", flush=True)
    if asks:
        if not sys.stdin.isatty():
            raise ConfigError("there is no terminal to ask on: --yes runs the commands without asking")
        if input("run these commands? [y/N] ").strip().lower() not in ("y", "yes"):
            print("no command was run")
            return ExitCode.OK
    for words in found:
        code = subprocess.run(words, cwd=folder, check=False).returncode
        if code != 0:
            raise VerbError(ExitCode.FAILED, f"{shlex.join(words)} ended with code {code}; no later command was run")
    return ExitCode.OK
