"""Floor 1, the mathematics: pure functions on tensors, with no clock, no network and no state of their own.

``fragments`` cuts the parameters, ``pseudo_gradient`` measures a site's progress, ``merge`` makes one of several,
``optimizer`` the outer step, ``rule`` says which of them a run has, ``adopt`` brings a version into a site.
``reference`` is the plainest of it in one function.
"""
