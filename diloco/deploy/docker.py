"""A Dockerfile: one image for every part of a run, without privileges, everything in it pinned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.deploy.rendering import File, check, filled, package, uses_cuda

if TYPE_CHECKING:
    from diloco.config.schema import RunConfig

USER = 10001
"""A user id that no machine uses, so that files in a volume belong to no other user."""
STATE = "/var/lib/diloco"
"""The working folder of a container's processes; as a volume it keeps runs/ when the container is gone."""
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


def call(config: RunConfig) -> list[str]:
    """Return the command that builds the image, to be called in the folder of the files."""
    where = package(config).tree or "."
    return ["docker", "build", "--tag", config.launch.image, "--file", "Dockerfile", str(where)]


def files(config: RunConfig) -> list[File]:
    """Return the Dockerfile, its .dockerignore and, for an installed program, constraints.txt."""
    check(config)
    launch, installed = config.launch, package(config)
    values = {
        "image": launch.image,
        "base": launch.base or (CUDA_BASE if uses_cuda(config) else CPU_BASE),
        "package": installed.pip,
        "source": "SOURCE_TREE" if installed.tree else ".",
        "user": USER,
        "state": STATE,
    }
    return [
        File("Dockerfile", filled("Dockerfile", values)),
        File("Dockerfile.dockerignore", "\n".join(LEFT_OUT if installed.tree else ALL_BUT_PACKAGE) + "\n"),
        *installed.files,
    ]
