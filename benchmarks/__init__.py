"""Benchmark suites: ``python -m benchmarks.SUITE``, see README.md beside this file."""
