"""Kernels of our own, for convolutions on a GPU, and what is done to the graph for them: before Inductor and after it.

A folder each: ``conv2d``, ``depthwise``, ``weights``. Before Inductor, each changes the graph of operators for its
kernel, and ``channels_last`` keeps the graph's results as they were. After: ``writers`` says what computes each node,
``horizontal_fusion`` and ``conv2d/split_k`` make fewer or more launches of them. ``launches`` compiles and starts them.
"""
