"""Process groups: collectives as operators of a graph, PyTorch's data-parallel wrappers, and a group of one process."""
