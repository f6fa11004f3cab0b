"""Other systems that do the same outer round, each in its own virtual environment (see ``bench_peers``)."""
