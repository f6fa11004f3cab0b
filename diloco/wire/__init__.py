"""The network between sites and the syncer: the only home of gRPC and protobuf.

Read in this order: ``messages`` (what is said, as plain dataclasses with their bounds), ``service`` (what the syncer's
shell must offer), ``chunks`` (how a payload travels), ``door``, ``handlers`` and ``server`` (the syncer's end),
``channel``, ``pushing``, ``pulling`` and ``client`` (a site's end), ``options`` and ``identity`` (TLS, tokens, and who
may do what).  ``convert`` and ``convert_bulk`` stand between the dataclasses and the generated messages of ``v1``,
``replication`` is between a syncer and its standby, and ``checkup`` is for ``diloco doctor``.  Nothing above this floor
sees a protobuf message, a gRPC status or a channel.
"""
