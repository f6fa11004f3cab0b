"""Other systems doing the same outer round, each in a virtual environment of its own (see ``bench_peers``)."""
