"""A version that is made of one of the syncer above: the blend, the down-link, and what stays."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from diloco.codec.base import bytes_of, digest
from diloco.codec.registry import make_codec
from diloco.codec.site_pass import follow, publish
from diloco.outer.optimizer import OuterOptimizerOptions, OuterRule, OuterState
from diloco.outer.pseudo_gradient import blend
from diloco.sync.effects import TakeVersion
from diloco.syncer import snapshots
from diloco.syncer.outer_step import OuterResult, run_outer_step
from diloco.syncer.snapshots import FragmentValues, Written, pack, tensor_file, unpack
from diloco.syncer.spool import Spool, SpoolError

RULE = OuterRule(OuterOptimizerOptions(kind="heavy_ball", lr=1.0, momentum=0.5))


def dice(seed: int, numel: int = 300) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def held() -> FragmentValues:
    published = dice(2)
    memory = OuterState(3, {"momentum": dice(3)})
    return FragmentValues(7, dice(1), published, memory, digest(published), reference=dice(4))


def take(folder: Path, above: Tensor, share: float, codec: str, values: FragmentValues) -> OuterResult | None:
    spool = Spool(folder / "spool")
    payload = spool.put_above(0, bytes_of(above), digest(above))
    command = TakeVersion(0, values.version + 1, share, payload, digest(above))
    return run_outer_step(command, values, spool, RULE, codec)


@pytest.mark.parametrize("codec", ["fp32", "int8", "int4:32+zstd1"])
def test_it_is_the_blend_and_everybody_who_follows_holds_what_is_published(tmp_path: Path, codec: str) -> None:
    values, above = held(), dice(5)
    found = take(tmp_path, above, 0.25, codec, values)
    assert found is not None
    made = found.values
    assert torch.equal(made.theta, blend(values.theta, above, 0.75))
    assert torch.allclose(made.theta, 0.75 * values.theta + 0.25 * above)
    _, published = publish(made.theta, values.published, make_codec(codec))
    assert torch.equal(made.published, published)
    assert torch.equal(follow(values.published, found.downlink, make_codec(codec)), made.published)
    assert made.digest == digest(made.published)
    assert found.downlink_digest.startswith(made.digest.partition(":")[0])
    assert made.version == 8
    assert made.optimizer is values.optimizer, "the momentum is kept"
    assert made.reference is made.theta


def test_all_of_it_is_taken_to_the_bit(tmp_path: Path) -> None:
    above = dice(5)
    found = take(tmp_path, above, 1.0, "int8", held())
    assert found is not None
    assert torch.equal(found.values.theta, above)


def test_what_would_not_be_finite_is_not_taken(tmp_path: Path) -> None:
    far = torch.full((300,), 3e38)
    values = FragmentValues(0, -far, -far, OuterState(), "")
    assert take(tmp_path, far, 0.25, "fp32", values) is None
    assert take(tmp_path, far, 1.0, "int8", values) is None, "too far from what was published"


def test_values_that_are_not_what_was_kept_are_refused(tmp_path: Path) -> None:
    spool, above = Spool(tmp_path / "spool"), dice(5)
    payload = spool.put_above(0, bytes_of(above), digest(above))
    (tmp_path / "spool" / payload).write_bytes(bytes_of(dice(6)))
    with pytest.raises(SpoolError, match="damaged"):
        run_outer_step(TakeVersion(0, 8, 0.25, payload, digest(above)), held(), spool, RULE, "fp32")


def test_the_reference_is_in_the_snapshot_and_goes_on_through_outer_steps() -> None:
    values = held()
    packed = b"".join(bytes(part) for part in pack(values))
    again = unpack(packed).reference
    assert again is not None
    assert values.reference is not None
    assert torch.equal(again, values.reference)
    before = FragmentValues(7, values.theta, values.published, values.optimizer, values.digest)
    assert unpack(b"".join(bytes(part) for part in pack(before))).reference is None


# --- What is written piece by piece is the file that the library would have written, and is no copy of the values ----

TENSORS = {"b": torch.arange(6.0).view(2, 3), "a": torch.ones(5), "c": torch.tensor(2.5)}
FACTS = {"version": "7"}


@pytest.mark.parametrize("piece_bytes", [7, 1 << 20])
def test_it_is_what_the_library_writes(piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "PIECE_BYTES", piece_bytes)
    data = b"".join(tensor_file(TENSORS, FACTS))
    assert data == save(TENSORS, metadata=FACTS)
    assert all(torch.equal(values, TENSORS[name]) for name, values in load(data).items())
    assert b"".join(tensor_file(TENSORS)) == save(TENSORS)


def test_bf16_is_written_too() -> None:
    tensors = {name: values.bfloat16() for name, values in TENSORS.items()}
    assert b"".join(tensor_file(tensors)) == save(tensors)
    with pytest.raises(AssertionError, match=r"w is torch\.int8"):
        list(tensor_file({"w": torch.ones(1, dtype=torch.int8)}))


def test_the_pieces_are_views() -> None:
    values = torch.zeros(4)
    _, piece = tensor_file({"w": values})
    values[0] = 1.0
    assert bytes(piece[:4]) == b"\0\0\x80?"


def test_what_shares_memory_is_in_the_file_twice() -> None:
    values = torch.arange(4.0)
    found = load(b"".join(tensor_file({"one": values, "two": values})))
    assert torch.equal(found["one"], found["two"])


def test_what_was_handed_on_is_counted_and_hashed() -> None:
    written = Written([b"abc", memoryview(b"de")])
    assert b"".join(written) == b"abcde"
    assert written.facts() == {"bytes": 5, "sha256": hashlib.sha256(b"abcde").hexdigest()}
