"""What a syncer is told before it starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from diloco.codec.entropy import UNPACK_BYTES_MAX
from diloco.codec.merging import RANGE_VALUES
from diloco.outer.merge import MergeOptions
from diloco.outer.optimizer import outer_rule
from diloco.syncer.options import PAGES_BYTES, RANGES, TAKING, SyncerOptions, memory_bytes_max
from diloco.wire.options import ServerOptions
from tests.hunts.crowd import merged
from tests.hunts.reporting import Hunt
from tests.syncer.building import LAYOUT, RUN, Events, new_syncer, serving


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("up_codecs", ["int5"]),
        ("down_codec", "int5"),
        ("snapshot_every", 0),
        ("downlinks_kept", 0),
        ("downlinks_kept", 1025),
        ("heartbeat_s", 0.0),
        ("linger_s", -1.0),
        ("threads", -1),
    ],
)
def test_an_option_that_cannot_work_is_refused_with_its_value(field: str, value: object) -> None:
    words = repr(value[0] if isinstance(value, list) else value).replace(".", r"\.")
    with pytest.raises(ValueError, match=words):
        SyncerOptions(folder="x", **{field: value})  # type: ignore[arg-type]


# --- The bound of a syncer's memory ----------------------------------------------------------------------------------

NUMEL = LAYOUT.numel
LARGEST = max(fragment.numel for fragment in LAYOUT.fragments)
NETWORK = ServerOptions(run_id=RUN, sites_max=3)
FOLD = RANGES * 4 * RANGE_VALUES + 3 * PAGES_BYTES


def bound(folder: Path, momentum: float = 0.9, kind: str = "", merge: str = "mean", **options: object) -> int:
    kind = kind or ("nesterov" if momentum else "sgd")
    given = {"threads": 1, "up_codecs": ["fp32"], **options}
    syncer = new_syncer(
        folder,
        Events().emit,
        optimizer={"kind": kind, "momentum": momentum},
        **given,  # type: ignore[arg-type]
    )
    rule = outer_rule(syncer.plan.rule.optimizer, MergeOptions(kind=merge), LAYOUT)
    return memory_bytes_max(syncer.options, replace(syncer.plan, rule=rule), NETWORK)


def test_it_is_the_state_two_versions_the_fold_and_what_arrives(tmp_path: Path) -> None:
    arriving = NETWORK.memory_bytes_max(4 * LARGEST, NETWORK.push_credits)
    plain, momentum = bound(tmp_path, 0.0), bound(tmp_path)
    assert plain == 4 * NUMEL + 2 * 4 * LARGEST + FOLD + arriving
    assert momentum == 8 * NUMEL + 2 * 8 * LARGEST + FOLD + arriving
    links = 2 * 2 * NUMEL
    small = {"down_codec": "bf16", "downlinks_kept": 2}
    assert bound(tmp_path, **small) == 12 * NUMEL + links + 2 * (12 + 2) * LARGEST + FOLD + arriving
    assert bound(tmp_path, **{**small, "downlinks_kept": 9}) == bound(tmp_path, **small) + 8 * NUMEL - links
    # An optimizer and a merge cost what they keep, threads and an entropy stage what they hold.
    assert bound(tmp_path, kind="adamw") - plain == 2 * 4 * NUMEL + 2 * 2 * 4 * LARGEST
    assert bound(tmp_path, merge="clip") - momentum == 4 * LARGEST + 3 * 4 * RANGE_VALUES
    assert bound(tmp_path, threads=3) - momentum == 2 * FOLD
    packed = bound(tmp_path, up_codecs=["fp32+zstd"])
    unpacking = (1 + NETWORK.checks_max) * UNPACK_BYTES_MAX
    assert unpacking <= packed - momentum < unpacking + 1000
    assert bound(tmp_path, threads=3, up_codecs=["fp32+zstd"]) - packed == 2 * (FOLD + UNPACK_BYTES_MAX)


def test_a_region_has_room_for_the_one_above(tmp_path: Path) -> None:
    syncer = new_syncer(tmp_path, Events().emit)
    alone, two, five = (memory_bytes_max(syncer.options, syncer.plan, syncer.network, each) for each in (0, 2, 5))
    assert two - alone == 20 * NUMEL + 4 * TAKING * LARGEST
    assert five - two == 12 * NUMEL


def test_it_is_said_at_the_start(tmp_path: Path) -> None:
    events = Events()
    with serving(tmp_path, events) as syncer:
        wanted = memory_bytes_max(syncer.options, syncer.plan, syncer.network)
        status = syncer.api.status()
    assert events.of("syncer_started")[0]["memory_bytes_max"] == wanted == status["memory_bytes_max"]
    assert wanted < memory_bytes_max(syncer.options, syncer.plan, replace(syncer.network, sites_max=999))


@pytest.mark.slow
def test_a_syncer_that_merges_what_16_sites_push_at_once_stays_under_it(tmp_path: Path) -> None:
    hunt = Hunt("crowd", None)
    found = merged(hunt, tmp_path, 16, 32)
    assert hunt.violations == [], found
    assert found["versions"] == 2
    state = 7 * 32  # Momentum, what is published, a new version of all three, and two down-links of 8 MiB.
    assert int(str(found["taken_mib"])) < state + int(str(found["decoded_mib"])) // 2, found
