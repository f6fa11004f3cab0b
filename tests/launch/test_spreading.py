from __future__ import annotations

import sys

import pytest

from diloco.inner.parallel import SiteGroup
from diloco.launch import build, build_syncer, spreading
from diloco.launch.errors import ConfigError
from diloco.launch.spreading import check_kernels, check_spreading, spread
from tests.launch.test_build import small


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["site.parallel=zero"], "site.parallel is 'zero': one of ddp, fsdp, hsdp, tp, tp+fsdp"),
        (["site.parallel=hsdp", "site.nproc=4"], "site.shard_ranks is 0: to be said for hsdp"),
        (["site.parallel=hsdp", "site.shard_ranks=3", "site.nproc=4"], "site.shard_ranks is 3: a divisor of 4"),
        (["site.parallel=tp", "site.nproc=4"], "site.tensor_ranks is 4: a divisor of the model's heads=2"),
        (
            ["site.parallel=tp", "site.nproc=2", "inner.compile=true"],
            "inner.compile is true: not with site.parallel=tp,",
        ),
        (["site.parallel=tp", "site.nproc=2", "inner.kernels=liger"], "inner.kernels is 'liger': torch with site.para"),
        (["site.parallel=tp+fsdp", "site.tensor_ranks=2"], "site.tensor_ranks is 2: a divisor of the site's 1 rank"),
        (
            ["site.parallel=hsdp", "site.nodes=2", "site.rendezvous=a:1"],
            "site.shard_ranks is 1: at least 2; copies alone are ddp",
        ),
        (
            ["site.parallel=tp", "site.nodes=2", "site.nproc=1", "site.rendezvous=a:1"],
            r"site.tensor_ranks is 2: a divisor of the 1 rank\(s\) of one machine",
        ),
        (["cluster.sites.a.parallel=tp", "cluster.sites.a.nproc=3"], "cluster.sites.a.tensor_ranks is 3: a divisor of"),
    ],
)
def test_what_does_not_come_out_even_is_refused_before_anything_starts(settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match="^" + words.replace("+", r"\+")):
        build_syncer.check(small(*settings))


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("site.peak_tflops=0", "site.peak_tflops is 0.0: positive and finite, or null"),
        ("inner.activation_checkpoint=some", "inner.activation_checkpoint is 'some': one of none, full, selective"),
        ("inner.loss_chunk=-1", "inner.loss_chunk is -1: 0"),
        ("inner.kernels=cuda", "inner.kernels is 'cuda': one of torch, liger"),
    ],
)
def test_how_it_is_computed_is_refused_in_words(setting: str, words: str) -> None:
    with pytest.raises(ConfigError, match="^" + words):
        build_syncer.check(small(setting))


def test_a_machine_that_cannot_compile_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small("inner.compile=true", "site.peak_tflops=989")
    build_syncer.check(config)
    assert build.trainer_options(config).peak_tflops == 989

    def lacking(function: object) -> object:
        raise RuntimeError("no compiler")

    monkeypatch.setattr("torch.compile", lacking)
    with pytest.raises(
        ConfigError, match=r"^inner\.compile is true: torch\.compile does not work here on cpu: no comp"
    ):
        spread(config, build.build_model(config), SiteGroup(device="cpu"))


def test_kernels_for_an_accelerator_are_refused_on_a_cpu() -> None:
    config = small("inner.kernels=liger")
    build_syncer.check(config)  # A site may be started elsewhere.
    words = r"^inner\.kernels is 'liger': its kernels are for accelerators, and this is"
    with pytest.raises(ConfigError, match=words):
        spread(config, build.build_model(config), SiteGroup(device="cpu"))
    config.site.device = "cpu"
    with pytest.raises(ConfigError, match=words):
        check_kernels(config)
    config.site.device = "tpu"
    with pytest.raises(ConfigError, match=r"^site\.device is 'tpu': one of auto, cpu, cuda"):
        check_kernels(config)
    config.inner.kernels = "torch"
    check_kernels(config)  # What nobody asks for may be missing.


def test_kernels_that_are_not_installed_are_refused_where_there_is_an_accelerator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ConfigError, match=r"^inner\.kernels is 'liger': liger-kernel is not there"):
        check_kernels(small("inner.kernels=liger"))


def test_what_fits_is_taken() -> None:
    for settings in ([], ["site.parallel=tp+fsdp", "site.tensor_ranks=2", "site.nproc=4"], ["site.parallel=fsdp"]):
        config = small(*settings)
        check_spreading(config, build.model_options(config))
    several = ["site.nodes=3", "site.nproc=2", "site.parallel=hsdp"]
    assert spreading._options(small(*several).site).sizes(6) == (3, 2, 1), "a copy for each machine"
    assert spreading._options(small(*several, "site.shard_ranks=6").site).sizes(6) == (1, 6, 1)
    config = small("site.parallel=fsdp")
    model = build.build_model(config)
    assert spread(config, model, SiteGroup(device="cpu")).module is model
    config.site.shard_ranks = -1
    with pytest.raises(ConfigError, match=r"site\.shard_ranks is -1"):
        spread(config, model, SiteGroup(device="cpu"))
