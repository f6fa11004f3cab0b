"""What can be set of `diloco launch`: a section of ``schema``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class LaunchSection:
    """What `diloco launch` writes around the processes: machines, images, time."""

    image: str = "diloco:latest"
    """The container image: what docker builds, and Kubernetes runs."""
    base: str | None = None
    """The image that it is built on, one with apt; null: a slim Python, or a CUDA runtime where site.device=cuda."""
    gpus: int | None = None
    """Accelerators of each machine of a site; null: site.nproc where site.device=cuda, else none."""
    accelerator: str = "H100"
    """Which, for SkyPilot."""
    cpus: int | None = None
    """Of each machine of a site; null: one for each thread of each rank there, and one more."""
    memory_gib: int = 16
    disk_gib: int = 100
    """Where checkpoints, journal and snapshots are kept."""
    hours: float = 24.0
    """How long a Slurm job may run; after that it is queued again."""
    leave_s: int = 120
    """How long before it is killed a process is asked to leave in order."""
    restarts: int = 10
    """How often a site that has failed is started again."""
    partition: str = ""
    """Of Slurm."""
    account: str = ""
    """Of Slurm."""
    spot: bool = False
    """Whether SkyPilot may take machines that can be taken away, for sites."""
    namespace: str = "default"
    """Of Kubernetes."""
    storage_class: str = ""
    """Of Kubernetes' volumes; empty: the cluster's own choice."""
    secrets: bool = True
    """Mutual TLS in Kubernetes by what `diloco certs` made, as Secrets RUN-syncer and RUN-SITE; false: what the tls
    settings say."""
