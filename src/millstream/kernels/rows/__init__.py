"""Kernels for a few rows, as one token of a text: products at the speed of memory, and attention split over keys."""
