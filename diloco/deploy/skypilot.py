"""SkyPilot: a task for each site, and for the syncer, on a machine of any cloud."""

from __future__ import annotations

import shlex
from typing import Any

from diloco.deploy.rendering import RENDEZVOUS_PORT, Package, Process, documents, package

HOME = "~/diloco"
"""The working folder of a process on its machine."""
ENVIRONMENT = "~/diloco-env"
PACKAGE = "~/diloco-package"
"""The folder of the wheel and its constraints, when no source tree is installed."""
HEAD = """{what} of run {run}: {launch} {more}{file}    (from the folder of this file)
Files that the settings name by a relative path (certificates, keys, tokens) belong in that folder, and are copied."""


def files(process: Process) -> dict[str, str]:
    """Return the task, its settings and, for an installed program, constraints.txt, by name."""
    installed = package(process.config, process.build)
    return {**process.file(), f"{process.name}.sky.yaml": _task(process, installed), **installed.files}


def call(process: Process) -> list[str]:
    """Return the command that finds a machine for the task and starts it."""
    tree = package(process.config).tree
    source = ["--workdir", str(tree)] if tree else []
    return [*_launch(process), "--yes", "--detach-run", *source, f"{process.name}.sky.yaml"]


def _launch(process: Process) -> list[str]:
    """A site is a managed job, which SkyPilot starts again on a new machine; the syncer keeps its machine and disk."""
    if process.verb == "site":
        return ["sky", "jobs", "launch", "--name", process.label]
    return ["sky", "launch", "--cluster", process.label]


def _task(process: Process, installed: Package) -> str:
    launch = process.config.launch
    mounts = {f"{HOME}/{name}": name for name in [process.settings, *process.own_files()]}
    if installed.tree is None:
        beside = [*installed.files, *([installed.wheel.name] if installed.wheel else [])]
        mounts |= {f"{PACKAGE}/{name}": name for name in beside}
    resources: dict[str, Any] = {
        "cpus": f"{process.cpus}+",
        "memory": f"{process.memory_gib}+",
        "disk_size": launch.disk_gib,
        "use_spot": launch.spot and process.verb == "site",
    }
    if process.verb == "site":
        resources["job_recovery"] = {"strategy": "FAILOVER", "max_restarts_on_errors": launch.restarts}
    if process.gpus:
        resources["accelerators"] = f"{launch.accelerator}:{process.gpus}"
    if process.verb == "syncer":
        resources["ports"] = int(process.config.cluster.syncer.listen.rpartition(":")[2])
    index = process.index and f"--extra-index-url {process.index} "
    command = shlex.join(process.command(process.settings))
    if process.nodes > 1:
        first = f'"$(echo "$SKYPILOT_NODE_IPS" | head -n 1):{RENDEZVOUS_PORT}"'
        command += f' site.node_rank="$SKYPILOT_NODE_RANK" site.rendezvous={first}'
    made: dict[str, object] = {
        "name": process.label,
        "num_nodes": process.nodes,
        "resources": resources,
        "file_mounts": mounts,
        "setup": ("" if installed.tree else f"cd {PACKAGE}\n") + f"python3 -m venv {ENVIRONMENT}\n"
        f"{ENVIRONMENT}/bin/pip install {index}--constraint constraints.txt {shlex.quote(installed.pip)}\n",
        "run": f"export PATH={ENVIRONMENT.replace('~', '$HOME')}/bin:$PATH\ncd {HOME}\n"
        + "".join(f"{line}\n" for line in [*launch.setup, command]),
    }
    more = "--workdir SOURCE_TREE " if installed.tree else ""
    run, file = process.config.run.name, f"{process.name}.sky.yaml"
    head = HEAD.format(what=process.what, run=run, launch=shlex.join(_launch(process)), more=more, file=file)
    if process.nodes > 1:
        head += f"\nIts {process.nodes} machines need a shared folder, not made by this task: put run.dir into it."
    return documents(made, head=head)
