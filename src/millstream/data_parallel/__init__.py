"""Data parallelism: what is reduced in which buckets, and how processes agree on it."""
