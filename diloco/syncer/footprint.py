"""What a syncer takes in memory at most, beside what the program itself takes at rest.

With n values in all and m in the largest fragment, T threads, M sites in a round, and fp32 everywhere:

    state        4 n (theta) + 4 n for each tensor that the outer optimizer keeps (``TENSORS_KEPT``) + 4 n (what is
                 published, unless that is theta itself)
    down-links   for each fragment its latest ones: ``downlinks_kept``, and no more than 8 bytes for each of its values;
                 none where a version is sent whole
    new versions ``VERSIONS_MAX`` times the state of the largest fragment and its down-link
    the fold     for each thread ``RANGES`` ranges of values, and for each update of the round ``PAGES`` of its payload,
                 which lies on the disk, and where there is room for that is unpacked there; each thread unpacks one
    the merge    where it is not the mean: the largest fragment once more, and for each thread a range of every site
    reception    ``ServerOptions.memory_bytes_max``
    a region     of every fragment what it measures from, the version above and the updates that go up, as many as may
                 be in flight there and a last one, and of the largest fragment ``TAKING`` times its values while a
                 version above is fetched, kept and taken

Not in it: versions that are kept because somebody still reads them.  A snapshot lets go of each fragment as it is
written, so that is what got a newer version since it began; a pull of a whole fragment keeps that until it is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.codec.entropy import UNPACK_BYTES_MAX
from diloco.codec.fused import RANGE_VALUES
from diloco.codec.registry import make_codec
from diloco.outer.optimizer import TENSORS_KEPT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.syncer.options import RunPlan, SyncerOptions
    from diloco.wire.options import ServerOptions

VERSIONS_MAX = 2
"""New ones under way at once: one is made while the one before it is written down."""
RANGES = 16
"""Of values, that a thread has at once where it computes on torch; of the kernels' tiles there is no more than one."""
TAKING = 8
PAGES_BYTES = 2 * (2 << 20)
"""The kernel brings the neighbours of what is looked at along, up to 2 MiB; a payload is looked at in two places."""


def spare_max(plan: RunPlan) -> int:
    """Pieces of memory that may lie idle between two versions (``codec.buffers``): the tensors and the down-link of
    one, which was replaced.  The next takes them, so that they are among those of the new versions."""
    return 3 + len(TENSORS_KEPT[plan.rule.optimizer.kind])


def state_bytes_max(numels: Sequence[int], outer_kind: str, down_codec: str, downlinks_kept: int) -> int:
    """What grows with the model: the state, its down-links, and the new versions."""
    down = make_codec(down_codec)
    copies = 1 + len(TENSORS_KEPT[outer_kind]) + (not down.lossless)
    largest = max(numels)
    sent = 0 if down.lossless else down.payload_bytes_max(largest)
    links = [min(downlinks_kept * down.payload_bytes_max(numel), 8 * numel) for numel in numels]
    state = 4 * copies * sum(numels) + (0 if down.lossless else sum(links))
    return state + VERSIONS_MAX * (4 * copies * largest + sent)


def memory_bytes_max(options: SyncerOptions, plan: RunPlan, network: ServerOptions, updates_above: int = 0) -> int:
    """The sum of all that, with as many sites in a round as may join, each with one update; ``updates_above`` may be in
    flight of a region, 0 where it is none."""
    numels = [fragment.numel for fragment in plan.layout.fragments]
    ups = [make_codec(name) for name in options.up_codecs]
    largest, sites = max(numels), plan.outer.sites_max
    state = state_bytes_max(numels, plan.rule.optimizer.kind, options.down_codec, options.downlinks_kept)
    unpacking = UNPACK_BYTES_MAX if any(codec.plain is not codec for codec in ups) else 0
    fold = options.threads_used * (RANGES * 4 * RANGE_VALUES + sites * PAGES_BYTES + unpacking)
    if plan.rule.segments:
        fold += 4 * largest + options.threads_used * sites * 4 * RANGE_VALUES
    payload = max(codec.payload_bytes_max(largest) for codec in ups)
    above = 4 * ((3 + updates_above) * sum(numels) + TAKING * largest) if updates_above else 0
    return state + above + fold + network.memory_bytes_max(payload, network.push_credits, unpacking)
