"""Floor 6: from a command line to running processes.  The only package that uses Hydra, omegaconf and the environment.

``cli`` picks the verb; ``config`` composes and checks the settings; ``build`` makes the objects of the lower layers
from them with plain constructors; each verb has a module ``<verb>_main``.
"""
