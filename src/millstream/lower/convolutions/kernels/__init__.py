"""Kernels of our own for convolutions: when each is used, how it is launched, and its Triton code."""
