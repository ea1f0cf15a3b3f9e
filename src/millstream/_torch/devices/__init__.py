"""Devices: streams, random generators beside captures, PyTorch's profiler, and whether there is a GPU."""
