"""What a context lends: streams, events, pinned memory, and the memory that CUDA graphs share."""
