"""Floor 6: from a command line to running processes.  The only home of Hydra, omegaconf and the environment.

``cli`` picks the verb; ``config`` says what can be set and composes it; ``build`` turns it into the objects of the
floors below with plain constructors; one module ``<verb>_main`` for each verb.
"""
