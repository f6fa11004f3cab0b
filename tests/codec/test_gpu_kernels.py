"""The kernels as they are compiled for an accelerator: no instruction whose result is not that of the definition.

What they compute is tested through ``diloco.codec.gpu``.  Compiling needs Triton and no accelerator.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tidy_rules import ROOT

# Compiled in a process of its own, because here the interpreter has taken the place of the compiler.  It has neither a
# network nor a codec library, as the benchmark of the kernels may find it on a bare accelerator.
COMPILE = """
import sys
sys.modules.update(dict.fromkeys(['zstandard', 'grpc', 'google.protobuf', 'hydra']))
import benchmarks.bench_gpu_codec
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from diloco.codec import gpu_kernels
from diloco.codec.blocks import E3m0Codec, Int2Codec, Int4Codec, Int8Codec, SignCodec
from diloco.codec.gpu import block_constants

TYPES = {"scales": "*i16", "levels": "*i16", "indices": "*i16", "fields": "*u8", "codes": "*u8", "fault": "*i32"}
TYPES |= {"numel": "i64", "first_program": "i32"}
ENCODING = dict(num_less=3, has_decoded=True)


def show(name, kernel, masked, types=None, **constants):
    constants["masked"] = masked
    types = TYPES | (types or {})
    signature = {each: "constexpr" if each in constants else types.get(each, "*fp32") for each in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    built = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "enable_fp_fusion": False})
    print("KERNEL", name, len(built.asm["cubin"]))
    print(built.asm["ptx"])


for codec, masked in (
    (Int4Codec("int4", 32), False),
    (Int8Codec("int8", 48), True),
    (SignCodec("sign", 128), False),
    (Int2Codec("int2", 128), False),
    (E3m0Codec("e3m0", 128), True),
):
    types = {"codes": "*u8", "scales": "*u8" if codec.name == "e3m0" else "*i16"}
    constants = block_constants(codec, 1024)
    show(f"encode-{codec.name}", gpu_kernels.encode_blocks, masked, types, **constants, **ENCODING)
show("encode-topk", gpu_kernels.encode_sparse, False, k=16, block=256, rows=1, **ENCODING)
"""
DIVIDING = {"encode-int4", "encode-int8"}
KERNELS = DIVIDING | {"encode-sign", "encode-int2", "encode-e3m0", "encode-topk"}


@pytest.mark.slow
def test_nothing_is_flushed_contracted_or_approximated(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="the kernels need the extra `gpu`")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    script = tmp_path / "compile_kernels.py"
    script.write_text(COMPILE)  # A file, because Triton reads the source of what it compiles.
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    found = set()
    for part in done.stdout.split("KERNEL ")[1:]:
        heading, _, assembly = part.partition("\n")
        name, size = heading.split()
        found.add(name)
        assert int(size) > 0, "no machine code"
        for instruction in (".ftz", "fma.rn", "div.full", "div.approx", "rcp.", "ex2.", "lg2."):
            assert instruction not in assembly, f"{name} uses {instruction}"
        assert ("div.rn.f32" in assembly) == (name in DIVIDING), name
        assert "sub.rn.f32" in assembly or "sub.f32" in assembly, name
    assert found == KERNELS
