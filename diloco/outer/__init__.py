"""Floor 1, the mathematics: pure functions on tensors, with no clock, no network and no state of their own.

``fragments`` cuts the parameters and deals the fragments to syncers, ``pseudo_gradient`` measures a site's progress and
brings a version into a site, ``merge`` makes one pseudo-gradient of several, ``optimizer`` the outer step, ``rule``
says which of them a run has.  ``reference`` is the plainest of it in one function.
"""
