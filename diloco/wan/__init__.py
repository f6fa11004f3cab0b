"""WAN emulation for real sockets: what lies between two sites, put between two programs on one machine.

``link`` is the model (pure: options, the seeded weather, the plan of one direction), ``connection`` moves bytes
by it, ``relay`` is one link with its controls and the program that hosts several, ``process`` starts that
program and speaks to it.
"""
