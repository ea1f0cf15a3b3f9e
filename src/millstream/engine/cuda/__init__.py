"""A plan as one CUDA graph: capture, replay, and the memory that goes in and out of it."""
