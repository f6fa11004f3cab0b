"""WAN emulation for real sockets: emulates the network between two sites for two programs on one machine.

There are two ways.  A relay of bytes works for any user on any system: ``link`` is the model (pure: options, the seeded
weather, the plan of one direction), ``relay`` moves bytes by it and hosts several links in one program.  On Linux as
root, the kernel's own TCP runs between network namespaces: ``pipe`` parses packets and is their model (pure: loss,
queue, rate, delay), ``netns`` makes namespaces and their devices and is the program between them.  ``process`` starts
and controls both programs.
"""
