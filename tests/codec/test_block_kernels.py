"""The kernels as they are compiled for an accelerator: no instruction whose result is not that of the definition.

What they compute is tested through ``diloco.codec.device``.  Compiling needs Triton and no accelerator.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.codec import device
from diloco.codec.blocks import BlockCodec
from tests.tidy_rules import ROOT

# Compiled in a process of its own, because here the interpreter has taken the compiler's place.
COMPILE = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from diloco.codec import block_kernels
from diloco.codec.device import DeviceCodec, Launch
from diloco.codec.registry import make_codec

TYPES = {"scales": "*i16", "fault": "*i32", "numel": "i64", "first_program": "i32", "decay": "fp32"}
encode = dict(has_local=True, num_sent=2, has_residual=True, has_decoded=True)
decode = dict(follows=True, rebases=True, num_merged=2)
for kernel, chosen in ((block_kernels.encode, encode), (block_kernels.decode, decode)):
    for name, masked in (("int4:32", False), ("int8:48", True)):
        codec = DeviceCodec(make_codec(name), Launch(1024, 4))
        constants = {**codec._constants(), **chosen, "held_from": codec._held_from(), "masked": masked}
        constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
        types = TYPES | {"codes": "*i8" if codec.codec.bits == 8 else "*u8"}
        signature = {each: "constexpr" if each in constants else types.get(each, "*fp32") for each in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        built = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "enable_fp_fusion": False})
        print("KERNEL", kernel.__name__, name, len(built.asm["cubin"]))
        print(built.asm["ptx"])
"""


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The assembly of each kernel, by its name and codec."""
    pytest.importorskip("triton", reason="the kernels need the extra `gpu`")
    cache = str(tmp_path_factory.mktemp("triton"))
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": cache, "PYTHONPATH": str(ROOT)}
    script = Path(cache) / "compile_kernels.py"
    script.write_text(COMPILE)  # A file, because Triton reads the source of what it compiles.
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for part in done.stdout.split("KERNEL ")[1:]:
        heading, _, text = part.partition("\n")
        name, codec, size = heading.split()
        assert int(size) > 0, "no machine code"
        found[f"{name} {codec}"] = text
    return found


def test_every_kernel_compiles(assembly: dict[str, str]) -> None:
    assert set(assembly) == {"encode int4:32", "encode int8:48", "decode int4:32", "decode int8:48"}


def test_nothing_is_flushed_contracted_or_approximated(assembly: dict[str, str]) -> None:
    for name, text in assembly.items():
        for instruction in (".ftz", "fma.rn", "div.full", "div.approx", "rcp.", "ex2.", "lg2."):
            assert instruction not in text, f"{name} uses {instruction}"
        assert ("div.rn.f32" in text) == name.startswith("encode"), name
        assert "sub.rn.f32" in text or "sub.f32" in text, name


def test_faults_are_the_bits_of_device() -> None:
    """Different bits, so that one kernel's word never hides another's."""
    bits = (device.NON_FINITE, device.BAD_SCALE, device.BAD_CODE, device.BAD_FILLING, device.TOO_LARGE)
    assert sum(bits) == 2 ** len(bits) - 1
    assert BlockCodec("int4:4", bits=4, block=4).code_max == 7, "the kernels tell int4 from int8 by it"
