"""Pools of a context: streams, events, pinned memory, and the memory that CUDA graphs share."""
