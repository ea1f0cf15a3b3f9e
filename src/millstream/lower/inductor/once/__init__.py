"""Kernels, and parts of them, that are equal but for the names of buffers: generated once."""
