"""Training programs as people write them, each of another library, for ``python -m benchmarks.idle.public``."""
