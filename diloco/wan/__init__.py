"""WAN emulation for real sockets: emulates the network between two sites for two programs on one machine.

There are two emulations.  The first relays bytes, for any user on any system: ``link`` is its model (pure: options,
seeded weather, the timing of one direction), ``relay`` moves the bytes and hosts several links in one program.  The
second, for root on Linux, runs the kernel's own TCP between network namespaces: ``pipe`` parses packets and is the
model (pure: loss, queue, rate, delay), ``netns`` makes the namespaces and their devices and is the program between
them.  ``process`` starts and controls both programs.
"""
