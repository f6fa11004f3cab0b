"""Plan a run before it exists: bytes, link speeds, exchange intervals, and the share of time spent training.

``estimate`` computes by formula and by simulation, ``bandwidth`` simulates the links alone, and ``studies`` compares
both, and the machines of ``diloco.sim``, with published figures.
"""
