"""Floor 1, the mathematics: pure functions on tensors, with no clock, no network and no state of their own.

``fragments`` cuts the parameters, ``pseudo_gradient`` measures a site's progress, ``merge`` takes the weighted mean,
``optimizer`` the outer step, ``adopt`` brings a version into a site.  ``reference`` is all of it in one function.
"""
