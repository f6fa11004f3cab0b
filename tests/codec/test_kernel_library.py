"""Which version of the kernels a process runs: what it is told to, what it can, and a line that says why."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

import diloco
from diloco.cli import lab
from diloco.cli.main import main
from diloco.codec import kernel_library
from diloco.codec.base import kernels
from diloco.codec.kernel_library import (
    LEVELS,
    DecodeJob,
    DigestState,
    EncodeJob,
    FollowJob,
    Format,
    MeasureJob,
    OuterJob,
    Pieces,
    SealJob,
    TakeJob,
    Update,
    choice,
    description,
    force,
    level_name,
)
from diloco.config.errors import ConfigError
from diloco.runs import site_rank


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """The tests after these run what the environment says."""
    kernel_library._loaded.cache_clear()
    yield
    kernel_library._loaded.cache_clear()
    force(os.environ.get(kernel_library.VARIABLE, ""))


@pytest.fixture
def best() -> int:
    """The best level of this machine."""
    force("")
    kernels = choice().kernels
    if kernels is None:
        pytest.skip(description())
    return kernels.level


def test_the_best_level_runs_where_none_is_forced_and_every_lesser_one_can_be(best: int) -> None:
    wanted = {"": (best, f"native ({LEVELS[best]}, the best that this CPU has)")}
    wanted |= {LEVELS[at]: (at, f"native ({LEVELS[at]}, forced by DILOCO_KERNELS)") for at in range(best + 1)}
    for name, (level, words) in wanted.items():
        assert force(name) == ""
        fast = kernels()
        assert fast is not None
        assert (description(), level_name(), fast.level) == (words, LEVELS[level], level)
    assert force("plain") == ""
    assert kernels() is None
    assert (description(), level_name()) == ("plain (forced by DILOCO_KERNELS)", "plain")


@pytest.mark.parametrize(
    ("level", "name", "words"),
    [
        (1, "avx512", "this CPU lacks it, and has plain, baseline, avx2"),
        (0, "AVX9", "no such level; this CPU has plain, baseline"),
    ],
)
def test_a_level_that_cannot_be_is_one_line_and_plain_torch(
    best: int, monkeypatch: pytest.MonkeyPatch, level: int, name: str, words: str
) -> None:
    library = kernel_library._loaded()
    assert not isinstance(library, str)
    monkeypatch.setattr(library, "diloco_level", lambda: level)  # The best one of this CPU.
    assert force(name) == f"kernels: plain (DILOCO_KERNELS={name}: {words})"
    assert kernels() is None
    assert force("baseline") == ""


def test_an_install_without_a_compiler_runs_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_library, "find_spec", lambda name: None)
    assert force("") == ""
    assert description() == "plain (the package was built without a C++ compiler)"
    assert kernels() is None
    line = "kernels: plain (the package was built without a C++ compiler; DILOCO_KERNELS=avx2)"
    assert force("avx2") == line


def found_at(patch: pytest.MonkeyPatch, path: Path) -> None:
    """Have the library be looked for there."""
    spec = ModuleSpec("kernels", None, origin=str(path))
    patch.setattr(kernel_library, "find_spec", lambda name: spec)
    kernel_library._loaded.cache_clear()
    force("")


def test_a_library_that_cannot_be_loaded_or_is_another_is_not_used(
    best: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = kernel_library._loaded()
    with monkeypatch.context() as patched:
        patched.setattr("ctypes.CDLL", lambda path: library)
        patched.setattr(library, "diloco_interface", lambda: 3)
        kernel_library._loaded.cache_clear()
        force("")
        assert description().startswith("plain (the library is of interface 3, ")
    (tmp_path / "kernels.so").write_bytes(b"not a library")
    found_at(monkeypatch, tmp_path / "kernels.so")
    assert description().startswith("plain (the library cannot be loaded: ")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
def test_a_library_that_was_compiled_for_another_cpu_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No CPU that is sold today has what bdver2 had: the first of its instructions would end the process."""
    if platform.machine() != "x86_64":
        pytest.skip("-march=bdver2 is for x86-64")
    folder, source, library = Path(diloco.__file__).parent / "codec/kernels", tmp_path / "k.cpp", tmp_path / "k.so"
    (tmp_path / "level.h").touch()  # Without what computes, it is compiled in a moment.
    source.write_text((folder / "kernels.cpp").read_text().partition("EXPORT int32_t diloco_encode(")[0])
    command = ["g++", "-shared", "-fPIC", "-O0", "-std=c++17", "-march=bdver2", f"-I{folder}", str(source)]
    command += ["-o", str(library)]
    subprocess.run(command, check=True, timeout=120)
    found_at(monkeypatch, library)
    assert description().startswith("plain (the library was compiled for another CPU: ")
    assert kernels() is None


def test_a_loop_of_its_own_a_rank_and_a_worker_force_it_too(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    logged: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DILOCO_KERNELS", "avx9")
    with pytest.raises(ValueError, match="optimizer"):
        diloco.join(torch.nn.Linear(1, 1), [], syncer="127.0.0.1:9", site="fra")
    assert "DILOCO_KERNELS=avx9" in "".join(logged)
    for module in (site_rank, lab):
        monkeypatch.setattr(module, "die_with_parent", lambda parent: None)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError):
        site_rank.main([str(tmp_path / "config.yaml")])
    assert "DILOCO_KERNELS=avx9" in capsys.readouterr().err
    lab._begin_worker(1, "plain")
    assert description() == "plain (forced by DILOCO_KERNELS)"


def test_a_command_forces_the_level_of_the_environment_and_tells_of_one_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``doctor`` says which version runs; the fault is a line of its own on standard error."""
    monkeypatch.setenv("DILOCO_KERNELS", "avx9")
    main(["doctor"])
    told = capsys.readouterr()
    [line] = [line for line in told.err.splitlines() if "kernels" in line]
    assert line.startswith("diloco doctor: kernels: plain (")
    assert "DILOCO_KERNELS=avx9" in line
    [line] = [line for line in told.out.splitlines() if "kernels" in line]
    assert line.endswith("-> unset DILOCO_KERNELS: an update takes several times as long without")


def test_both_sides_of_the_interface_mean_the_same_structures(best: int) -> None:
    told = (
        *(Format, EncodeJob, DecodeJob, MeasureJob, Update, OuterJob, DigestState, Pieces),
        *(SealJob, FollowJob, TakeJob),
    )  # In the order in which the library tells their sizes.
    size = kernel_library._loaded().diloco_size
    size.restype = ctypes.c_int64
    assert [size(index) for index in range(len(told) + 1)] == [*map(ctypes.sizeof, told), -1]
