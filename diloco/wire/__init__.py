"""The network between sites and the syncer: the only home of gRPC and protobuf.

Read in this order: ``messages`` (what is said, as plain dataclasses), ``service`` (what the syncer's shell must offer),
``chunks`` (how a payload travels), ``handlers`` and ``server`` (the syncer's end), ``client`` (a site's end),
``security`` (who may speak).  ``convert`` stands between the dataclasses and the generated messages of ``v1``.
Nothing above this floor sees a protobuf message, a gRPC status or a channel.
"""
