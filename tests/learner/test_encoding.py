"""The same update wherever it is encoded: the bytes, what they decode to, and what is refused."""

from __future__ import annotations

import pytest
import torch

from diloco.codec.base import Buffers, NonFiniteError, digest
from diloco.codec.merging import RANGE_VALUES
from diloco.codec.registry import make_codec, values_of
from diloco.learner.seal import Encoded, Encoder
from diloco.learner.tensors import HOST, Carried, Place, SealInputs
from diloco.outer.pseudo_gradient import pseudo_gradient
from tests.learner.elsewhere import Elsewhere

ON_THE_DEVICE = ("int4", "int8:16", "int4:32+zstd1", "e3m0", "int2", "sign", "topk:256x16")
CODECS = ("fp32", "bf16", "bf16+zstd1", *ON_THE_DEVICE)


def inputs(num_sent: int, scale: float = 1e-3, seed: int = 0) -> SealInputs:
    random = torch.Generator().manual_seed(seed)
    base, step, *sent = torch.randn(2 + num_sent, 333, generator=random).unbind()
    return SealInputs(base, [base - step * scale], [each * scale / 10 for each in sent])


def assert_equal(one: Encoded, other: Encoded) -> None:
    assert bytes(one.payload) == bytes(other.payload)
    assert one.digest == other.digest == digest(values_of(other.sent).cpu())
    assert torch.equal(values_of(one.sent).cpu(), values_of(other.sent).cpu())
    assert one.norm == pytest.approx(other.norm, rel=1e-5)


@pytest.mark.parametrize("codec", CODECS)
def test_an_update_is_the_same_here_and_there(codec: str, interpreter: None) -> None:
    here, there = Encoder(make_codec(codec), Place(HOST)), Encoder(make_codec(codec), Elsewhere())
    assert str(here) == "host"
    assert str(there) == ("cpu, Triton" if codec in ON_THE_DEVICE else str(there))
    for num_sent in (0, 2, 3):
        assert_equal(there.encode(inputs(num_sent)), here.encode(inputs(num_sent)))


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int4"])
def test_what_one_update_was_outlives_the_next(codec: str, interpreter: None) -> None:
    """The buffers are used again."""
    there = Encoder(make_codec(codec), Elsewhere())
    first = there.encode(inputs(0))
    kept = Encoded(bytes(first.payload), values_of(first.sent).clone(), first.norm, first.digest)
    there.encode(inputs(1, seed=5))
    assert_equal(first, kept)


@pytest.mark.parametrize("codec", CODECS)
def test_a_fragment_of_many_ranges_is_encoded_as_by_the_definition(codec: str) -> None:
    numel, random = 2 * RANGE_VALUES + 777, torch.Generator().manual_seed(3)
    base, local, sent = (torch.randn(numel, generator=random) for _ in range(3))
    measured = pseudo_gradient(base, local, [sent])
    found = Encoder(make_codec(codec), Place(HOST), Buffers(2)).encode(SealInputs(base, [local], [sent]))
    assert bytes(found.payload) == make_codec(codec).encode(measured)
    assert torch.equal(values_of(found.sent), make_codec(codec).decode(found.payload, numel))
    assert found.digest == digest(values_of(found.sent))
    assert found.norm == pytest.approx(float(values_of(found.sent).double().norm()))


def test_it_says_why_it_does_not_encode_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(Encoder(make_codec("bf16+zstd1"), Elsewhere())) == "host, values from cpu: bf16 has no kernel there"
    monkeypatch.setattr("diloco.learner.seal.find_spec", lambda name: None)
    without = Encoder(make_codec("int4"), Elsewhere())
    assert "Triton is not installed" in str(without)
    assert_equal(without.encode(inputs(1)), Encoder(make_codec("int4"), Place(HOST)).encode(inputs(1)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, which interprets, warns of what is refused
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int4"])
def test_what_is_not_finite_is_refused_there_too(codec: str, interpreter: None) -> None:
    there, ruined = Encoder(make_codec(codec), Elsewhere()), inputs(0)
    ruined.local[7] = torch.nan
    with pytest.raises(NonFiniteError):
        there.encode(ruined)
    assert_equal(there.encode(inputs(0)), Encoder(make_codec(codec), Place(HOST)).encode(inputs(0)))


@pytest.mark.gpu
@pytest.mark.parametrize("codec", CODECS)
def test_on_the_accelerator(codec: str, kernel_device: torch.device) -> None:
    place = Place(kernel_device)
    made = inputs(2)
    there = SealInputs(
        made.reference.to(kernel_device),
        [made.local.to(kernel_device)],
        [values_of(each).to(kernel_device) for each in made.in_flight],
    )
    assert_equal(Encoder(make_codec(codec), place).encode(there), Encoder(make_codec(codec), Place(HOST)).encode(made))


@pytest.mark.parametrize("codec", ["bf16", "int4", "sign", "topk:256x4"])
def test_what_is_fed_back_is_the_same_here_and_there(codec: str, interpreter: None) -> None:
    residual = torch.randn(333, generator=torch.Generator().manual_seed(9)) * 1e-3
    both = [Encoder(make_codec(codec), place) for place in (Place(HOST), Elsewhere())]
    assert (str(both[1]) == "cpu, Triton") == (codec != "bf16")
    fresh = inputs(1).pseudo_gradient()
    for carried in (residual, None):
        made = [inputs(1) for _ in both]  # An encoder uses them up.
        for each in made:
            each.carried = Carried(carried, 0.9)
        here, there = (encoder.encode(each) for encoder, each in zip(both, made, strict=True))
        assert here.payload == there.payload
        assert torch.equal(values_of(here.sent), values_of(there.sent))
        to_send = fresh if carried is None else fresh + carried * 0.9
        assert here.payload == make_codec(codec).encode(to_send)
        for encoded in (here, there):
            assert encoded.fed is not None
            assert torch.equal(encoded.fed.fresh, fresh)
            assert torch.equal(encoded.fed.term, fresh - values_of(here.sent))
            assert torch.equal(encoded.fed.residual, to_send - values_of(here.sent))
    assert both[0].encode(inputs(1)).fed is None
