"""Benchmark suites: ``python -m benchmarks.SUITE``, see README.md beside this file."""

import os

os.environ.setdefault("MILLSTREAM_TUNE", "first")  # what is timed is compiled by then
