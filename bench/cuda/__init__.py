"""Benchmarks on a CUDA device, in one table: ``python -m bench.cuda``."""
