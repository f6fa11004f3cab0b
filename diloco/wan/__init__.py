"""WAN emulation for real sockets: what lies between two sites, put between two programs on one machine.

Two ways.  For any user on any system, a relay of bytes: ``link`` is the model (pure: options, the seeded weather, the
plan of one direction), ``connection`` moves bytes by it, ``relay`` is one link with its controls and the program that
hosts several, ``process`` starts that program and speaks to it.  On Linux as root, the kernel's own TCP between
network namespaces: ``packets`` reads what it sends, ``pipe`` is the model (pure: loss, queue, rate, delay),
``namespaces`` makes the places and their devices, ``delayer`` is the program between them, ``netns`` starts it and
speaks to it.  ``child`` is how either program is spoken to.
"""
