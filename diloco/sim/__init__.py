"""The real state machines of ``diloco.sync`` under a simulated network, clock and disk, with faults drawn from a seed.

``world`` simulates time, links and disks, and has the exact numbers that stand for tensors.  ``outer_process``,
``standby_process`` and ``site_process`` carry out the machines' effects as the real shells do.  ``cluster`` connects
them and restarts dead processes.  ``plan`` draws a run from a seed, ``swarm`` runs it with one syncer or
several, and ``checkers`` and ``site_checkers`` check the invariants at every event.  ``make swarm`` runs it.

``fleet`` runs the same machines for simulated weeks, to measure goodput under the faults that a plan gives.

Not modelled: bytes (chunks, checksums, credits, resumed transfers), a disk that loses writes which it has synced, two
syncers on one disk, and ranks inside a site.
"""
