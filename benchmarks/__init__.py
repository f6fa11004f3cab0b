"""Benchmarks, one module per question; run as ``python -m benchmarks.bench_<question>`` from the repository root."""
