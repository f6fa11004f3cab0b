"""What runs: a whole run on one machine, a site and its ranks, and what a process sets up for itself."""
