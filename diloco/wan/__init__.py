"""WAN emulation for real sockets: emulates the network between two sites for two programs on one machine.

There are two ways.  A relay of bytes works for any user on any system: ``link`` is the model (pure: options, the seeded
weather, the plan of one direction), ``connection`` moves bytes by it, ``relay`` is one link with its controls and the
program that hosts several, ``process`` starts and controls that program.  On Linux as root, the kernel's own TCP runs
between network namespaces: ``packets`` parses the kernel's packets, ``pipe`` is the model (pure: loss, queue, rate,
delay), ``namespaces`` makes namespaces and their devices, ``delayer`` is the program between them, ``netns`` starts and
controls it.  ``child`` is the control protocol of both programs.
"""
