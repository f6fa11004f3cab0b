"""Find a model, in a run, a checkpoint, a syncer or a folder, and evaluate it."""
