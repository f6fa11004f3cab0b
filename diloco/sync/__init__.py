"""Floor 0: who, when, with what weight.

Two machines without clock, socket or tensor: ``OuterSync`` (the syncer's) and ``LearnerSync`` (a site's).  Both take
events and an instant and return effects; ``diloco/sync/events.py`` and ``effects.py`` are the whole vocabulary.
``Replication`` and ``Leadership`` say what the leading syncer may publish.  The same machines run under gRPC, under the
simulator's heap of timestamps, and in a replay of the journal.
"""
