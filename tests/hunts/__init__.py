"""Hunts: searches for violations of the product's promises, each with its own command and of any length.

The default tests run a small part of each.  A hunt draws everything from its seed, prints for every violation the
command that replays it, and ends with one JSON object; ``--record`` keeps that in ``benchmarks/results/``.
"""
