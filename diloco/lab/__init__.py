"""Comparing outer rules: rows of settings, each trained under virtual time; a run compared with its simulation."""
