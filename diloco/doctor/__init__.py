"""Checks of a machine, its data folder, the path to a syncer and the syncer itself, before a run starts."""
