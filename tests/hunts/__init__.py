"""Hunts: searches for what must not happen, each with a command of its own and as long as one lets it run.

The tests of the default run take a share of each.  A hunt draws everything from its seed, prints for every violation
the command that replays it, and ends with one JSON object; with ``--record`` that is kept in ``benchmarks/results/``.
"""
