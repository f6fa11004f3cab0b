"""Floor 4: the process at a site.  ``agent`` connects the training loop with the syncer."""
