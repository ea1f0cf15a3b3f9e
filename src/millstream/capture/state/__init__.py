"""The user's Python objects: what a step reaches, reads and changes, and its tensors as inputs of a graph."""
