"""Train one model across data centres joined by slow, failing links.

Floors, from the bottom; a module imports only from floors below its own:

- ``sync``     who, when, with what weight: two state machines without I/O, without a clock, without torch
- ``outer``    the mathematics between sites: fragments, pseudo-gradients, merging, the outer step, adopting
- ``inner``    a plain trainer for one site, which knows nothing of the other floors
- ``codec``    tensors to bytes and back
- ``wire``     messages, streams, client and service: the only home of gRPC
- ``syncer``   the process that holds the fragments
- ``learner``  the process at a site
- ``sim``      the same state machines under a simulated network and clock
- ``wan``      a far network between processes of one machine
- ``launch``   configuration and command line: the only home of Hydra and the environment
"""

__version__ = "0.1.0"
