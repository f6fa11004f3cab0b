"""SkyPilot: a task for each site, and for the syncer, on a machine of any cloud."""

from __future__ import annotations

import shlex
from typing import Any

from diloco.deploy.rendering import RENDEZVOUS_PORT, File, Process, documents, package

HOME = "~/diloco"
"""The working folder of a process on its machine."""
ENVIRONMENT = "~/diloco-env"
PACKAGE = "~/diloco-package"
"""The folder of the wheel and its constraints, when no source tree is installed."""
HEAD = """{what} of run {run}: sky launch --cluster {name} {more}{file}    (from the folder of this file)
Files that the settings name by a relative path (certificates, keys, tokens) belong in that folder, and are copied."""


def files(process: Process) -> list[File]:
    """Return the task, its settings and, for an installed program, constraints.txt."""
    return [process.file(), File(task(process), _task(process)), *package(process.config).files]


def call(process: Process) -> list[str]:
    """Return the command that finds a machine for the task and starts it."""
    tree = package(process.config).tree
    source = ["--workdir", str(tree)] if tree else []
    return ["sky", "launch", "--yes", "--detach-run", "--cluster", process.label, *source, task(process)]


def task(process: Process) -> str:
    """Return the name of the task's file for sky."""
    return f"{process.name}.sky.yaml"


def _task(process: Process) -> str:
    launch, needs, installed = process.config.launch, process.needs, package(process.config)
    site, syncer = process.config.site, process.config.cluster.syncer
    if process.verb == "site":
        named = [site.tls_ca, site.tls_cert, site.tls_key, site.token_file]
    else:
        named = [syncer.tls_ca, syncer.tls_cert, syncer.tls_key]
        named += [syncer.tokens_file, syncer.permissions, syncer.revoked_file]
    # Files that the settings name by a relative path are beside them, and must be copied to the machine.
    own = [name for name in named if name and name != "system" and not name.startswith(("/", "~"))]
    mounts = {f"{HOME}/{name}": name for name in [process.settings, *own]}
    if installed.tree is None:
        beside = [file.name for file in installed.files] + ([installed.wheel.name] if installed.wheel else [])
        mounts |= {f"{PACKAGE}/{name}": name for name in beside}
    resources: dict[str, Any] = {
        "cpus": f"{needs.cpus}+",
        "memory": f"{needs.memory_gib}+",
        "disk_size": needs.disk_gib,
        "use_spot": launch.spot and process.verb == "site",
        "job_recovery": {"strategy": "FAILOVER", "max_restarts_on_errors": launch.restarts},
    }
    if needs.gpus:
        resources["accelerators"] = f"{launch.accelerator}:{needs.gpus}"
    if process.verb == "syncer":
        resources["ports"] = int(syncer.listen.rpartition(":")[2])
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
        f"{ENVIRONMENT}/bin/pip install --constraint constraints.txt {shlex.quote(installed.pip)}\n",
        "run": f"export PATH={ENVIRONMENT.replace('~', '$HOME')}/bin:$PATH\ncd {HOME}\n"
        + "".join(f"{line}\n" for line in [*launch.setup, command]),
    }
    more = "--workdir SOURCE_TREE " if installed.tree else ""
    head = HEAD.format(
        what=process.what, run=process.config.run.name, name=process.label, more=more, file=task(process)
    )
    if process.nodes > 1:
        head += f"\nIts {process.nodes} machines need a shared folder, not made by this task: put run.dir into it."
    return documents(made, head=head)
