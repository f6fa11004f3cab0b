"""Slurm: a batch script for each site, and for the syncer where it is to run there too."""

from __future__ import annotations

import shlex
from math import ceil

from diloco.deploy.rendering import Process, filled


def files(process: Process) -> dict[str, str]:
    """Return the script and its settings, by name."""
    return {**process.file(), f"{process.name}.sbatch": _script(process)}


def call(process: Process) -> list[str]:
    """Return the command that submits the job."""
    return ["sbatch", f"{process.name}.sbatch"]


def _script(process: Process) -> str:
    """Return a script that runs `diloco site` on each machine, which starts the ranks there itself.

    That of machine 0 is the script's own child, as on a site of one machine: it receives the signal to leave, and
    tells the others.
    """
    launch = process.config.launch
    command, others = shlex.join(process.command(process.settings)), ""
    if process.nodes > 1:
        # The others' command loops, because Slurm does not restart a killed task.
        place = 'site.node_rank="$((SLURM_PROCID + 1))" site.rendezvous="$SITE_RENDEZVOUS"'
        again = f'while true; do {command} {place}; code=$?; [ "$code" -gt 128 ] || exit "$code"; done'
        others = filled("others", {"nodes": process.nodes - 1, "cpus": process.cpus, "command": again})
        command += ' site.node_rank=0 site.rendezvous="$SITE_RENDEZVOUS"'
    more = [
        *([f"#SBATCH --gpus-per-node={process.gpus}"] if process.gpus else []),
        *([f"#SBATCH --partition={launch.partition}"] if launch.partition else []),
        *([f"#SBATCH --account={launch.account}"] if launch.account else []),
    ]
    values = {
        "what": process.what,
        "run": process.config.run.name,
        "file": f"{process.name}.sbatch",
        "config": process.settings,
        "name": process.label,
        "cpus": process.cpus,
        "memory_gib": process.memory_gib,
        "minutes": ceil(launch.hours * 60),
        "leave_s": launch.leave_s,
        "more": "\n".join([*more, ""]),
        "nodes": process.nodes,
        "setup": "".join(f"{line}\n" for line in launch.setup),
        "others": others,
        "command": command,
    }
    return filled("sbatch", values)
