"""The checked-in generated code is what the oldest supported compiler makes of protos/."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VERSION = "1.76.0"


def compiler() -> str | None:
    """A Python that has the compiler in the right version: this one's, or that of ``make protos``."""
    ask = "from importlib.metadata import version; print(version('grpcio-tools'))"
    for python in (sys.executable, str(ROOT / ".venv-protos" / "bin" / "python")):
        if Path(python).exists():
            said = subprocess.run([python, "-c", ask], capture_output=True, text=True, timeout=60, check=False)
            if said.stdout.strip() == VERSION:
                return python
    return None


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    python = compiler()
    if python is None:
        pytest.skip(f"grpcio-tools {VERSION} is not installed: `make protos` brings it")
    protos = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "protos").rglob("*.proto"))
    flags = ["--proto_path=protos", *(f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out", "grpc_python_out"))]
    subprocess.run([python, "-m", "grpc_tools.protoc", *flags, *protos], cwd=ROOT, check=True, timeout=120)
    made = {path.relative_to(tmp_path): path.read_text("utf-8") for path in tmp_path.rglob("*_pb2*")}
    kept = {path.relative_to(ROOT): path.read_text("utf-8") for path in (ROOT / "diloco/wire/v1").glob("*_pb2*")}
    assert sorted(made) == sorted(kept)
    for path, text in made.items():
        assert kept[path] == text, f"{path} is not what protos/ says: run `make protos`"
