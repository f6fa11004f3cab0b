"""The real machines of ``diloco.sync`` under a simulated network, clock and disk, with faults drawn from a seed.

``world`` is time, links and disks, ``values`` the exact numbers that stand for tensors, ``outer_process`` and
``site_process`` carry out the machines' effects as the real shells do, ``cluster`` holds them together and starts again
what has died, ``plan`` draws a run from a seed, ``swarm`` runs it, and ``checkers`` and ``site_checkers`` say what must
hold at every event.  ``python -m diloco.sim --help`` runs it.

For figures instead of faults: ``fleet`` runs the same machines for weeks, ``bandwidth`` the links alone, ``studies``
compares both with what was published, and ``planning`` and ``expected`` ask them about a run that there is not yet.

Not modelled: bytes (chunks, checksums, credits, resumed transfers), a disk that loses or damages what it has
acknowledged, two syncers on one disk, and ranks inside a site.
"""
