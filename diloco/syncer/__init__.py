"""Floor 4: the process that holds the fragments.  ``server`` is its outside, ``core`` its one decision loop."""
