"""What a traced step leaves: changes of Python objects, tensors, and the graph."""
