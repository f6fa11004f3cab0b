"""WAN emulation for real sockets: emulates the network between two sites for two programs on one machine.

It relays bytes, for any user on any system: ``link`` is the model (pure: options, seeded weather, the timing of one
direction), ``relay`` moves the bytes and hosts several links in one program, and ``process`` starts and controls it.
"""
