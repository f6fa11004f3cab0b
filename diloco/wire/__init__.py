"""The network between sites and the syncer: the only home of gRPC and protobuf.

Read in this order: ``messages`` (the messages, as dataclasses with their bounds), ``convert`` (messages to bytes and
back), ``chunks`` (payloads in pieces), ``door``, ``handlers`` (with the API that the syncer's shell must implement) and
``server`` (the syncer's end), ``channel``, ``pulling`` and ``client`` (the end of a site, an operator or a standby),
``options`` and ``identity`` (TLS, tokens, permissions).  ``checkup`` is for ``diloco doctor``.  No package above this
one sees a protobuf message, a gRPC status or a channel.
"""
