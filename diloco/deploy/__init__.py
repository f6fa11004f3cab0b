"""Files for machines that a cluster manager allocates (Docker, Kubernetes, Slurm, SkyPilot), and certificates."""
