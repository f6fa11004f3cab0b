"""Docker: an image for each build of torch that a run needs, and a compose file of its processes on one machine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from diloco.deploy.rendering import Process, documents, filled, label, networked, package, processes
from diloco.wire.options import is_loopback

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.config.schema import RunConfig

USER = 10001
"""A user id that no machine uses, so that files in a volume belong to no other user."""
STATE = "/var/lib/diloco"
"""The working folder of a container's processes; as a volume it keeps runs/ when the container is gone."""
SETTINGS = "/etc/diloco"
"""The folder of a container's settings file."""
CPU_BASE = "python:3.11-slim-bookworm"
CUDA_BASE = "nvidia/cuda:12.8.1-runtime-ubuntu24.04"
LEFT_OUT = (
    "*",
    "!diloco",
    "!configs",
    "!pyproject.toml",
    "!constraints.txt",
    "!README.md",
    "!LICENSE",
    "**/__pycache__",
)
ALL_BUT_PACKAGE = ("*", "!constraints.txt", "!*.whl")
HEAD = """Run {run} on one machine: docker compose up --detach    (from the folder of this file; its images come first)
One process of it: docker compose up --detach {name}
Files that the settings name by a relative path (certificates, keys, tokens) belong in that folder, to user {user}."""
AMD = """AMD's GPUs belong to the group render: begin with RENDER_GID=$(getent group render | cut -d: -f3)"""
SEVERAL = "Not here, because they are several machines: {names}"


def prepared(config: RunConfig) -> tuple[dict[str, str], list[list[str]]]:
    """Return the files by name, and the commands that build the images, to be called in the files' folder."""
    syncer, site, alone = config.cluster.syncer, config.site, is_loopback(config.cluster.syncer.listen)
    inside = config
    if alone and is_loopback(site.syncer):  # Only containers of their own network reach each other.
        syncer, site = replace(syncer, insecure_non_loopback=True), replace(site, insecure_non_loopback=True)
    if not alone or is_loopback(site.syncer):  # Otherwise the sites' syncer is elsewhere, started by hand.
        inside = networked(replace(config, site=site, cluster=replace(config.cluster, syncer=syncer)), str)
    found, calls = processes(inside), []
    # Compose names a project by its folder, and two runs may be written into folders of one name.
    files = {".env": f"COMPOSE_PROJECT_NAME={label(config.run.name or '')}\n"}
    files["compose.yaml"] = _compose(found, published=not alone)
    for process in found:
        files |= process.file()
    for image, build, index in sorted({(process.image, process.build, process.index) for process in found}):
        installed = package(config, build)
        name = "Dockerfile" if image == config.launch.image else f"Dockerfile.{build}"
        values = {
            "image": image,
            "base": config.launch.base or (CUDA_BASE if build == "cuda" else CPU_BASE),
            "index": index and f"={index}",
            "package": installed.pip,
            "source": "SOURCE_TREE" if installed.tree else ".",
            "user": USER,
            "state": STATE,
        }
        left_out = "\n".join(LEFT_OUT if installed.tree else ALL_BUT_PACKAGE)
        files |= {name: filled("Dockerfile", values), f"{name}.dockerignore": f"{left_out}\n", **installed.files}
        calls.append(["docker", "build", "--tag", image, "--file", name, str(installed.tree or ".")])
    return files, calls


def _compose(found: Sequence[Process], *, published: bool) -> str:
    """Return the compose file; with ``published``, processes elsewhere reach the syncers by this machine's ports."""
    services: dict[str, Any] = {}
    for process in found:
        if process.nodes > 1:
            continue
        config, mounted = process.config, f"{SETTINGS}/{process.settings}"
        files = [f"./{name}:{STATE}/{name}:ro" for name in process.own_files()]
        service = services[process.name] = {
            "image": process.image,
            "command": process.command(mounted)[1:],
            "volumes": [f"./{process.settings}:{mounted}:ro", f"{process.name}:{STATE}", *files],
            "restart": f"on-failure:{config.launch.restarts}" if config.launch.restarts else "no",
            "stop_grace_period": f"{config.launch.leave_s}s",
        }
        if process.verb == "syncer":
            port = int(config.cluster.syncer.listen.rpartition(":")[2])
            service |= {"ports": [f"{port + config.cluster.syncer.index}:{port}"]} if published else {}
            continue
        service["shm_size"] = f"{process.memory_gib}gb"
        if process.build == "rocm":
            service |= {"devices": ["/dev/kfd", "/dev/dri"], "group_add": ["${RENDER_GID:-109}"]}
        elif process.gpus:
            devices = [{"driver": "nvidia", "count": process.gpus, "capabilities": ["gpu"]}]
            service["deploy"] = {"resources": {"reservations": {"devices": devices}}}
    lines = [HEAD.format(run=found[0].config.run.name, name=next(iter(services), "SERVICE"), user=USER)]
    lines += [AMD] if any(process.build == "rocm" for process in found) else []
    several = [process.name for process in found if process.nodes > 1]
    lines += [SEVERAL.format(names=", ".join(several))] if several else []
    made = {"services": services, "volumes": {name: {} for name in services}}
    return documents(made, head="\n".join(lines))
