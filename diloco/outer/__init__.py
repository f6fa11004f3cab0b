"""Floor 1, the mathematics: pure functions on tensors, without clock, network or state.

``fragments`` partitions the parameters and assigns the fragments to syncers, ``pseudo_gradient`` measures a site's
progress and applies a version at a site, ``merge`` merges several pseudo-gradients into one, ``optimizer`` has the
outer step and the outer rule of a run.  ``reference`` is plain DiLoCo in one function.
"""
