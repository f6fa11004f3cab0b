"""Laboratories for tests, and what their cells may have come to."""

from __future__ import annotations

from pathlib import Path

from diloco.lab.experiment import Found

SMALL = (
    "data=stdlib_bytes", "model.layers=1", "model.dim=16", "model.heads=2", "model.context=16",
    "inner.batch_sequences=2", "inner.precision=fp32", "inner.warmup_steps=0", "inner.schedule=constant",
    "outer.inner_steps=3", "codec=fp32", "data.validation_sequences=16",
)  # fmt: skip


def written(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def rows(*names: str) -> str:
    return f"settings: [run.tokens=1000, {', '.join(SMALL)}]\nrows:\n" + "".join(f"  {name}: {{}}\n" for name in names)


def found(row: str, seed: int, loss: float) -> Found:
    return Found(row=row, seed=seed, loss=loss, tokens=1000, seconds=10.0, bytes_up=5, took_s=1.0, versions=3)
