"""Numbers, sizes and arrays of a step as values of its graph, and values that are known while it is traced."""
