"""Floor 4: the process at a site.  ``agent`` stands between the training loop and the syncer."""
