"""Convolutions on a GPU: what is done to them before Inductor and after it, and kernels of our own.

Before, ``passes/``: ``channels``, ``epilogues``, ``prologues``, ``conversions`` change the graph of operators,
``products`` makes convolutions of linear layers, and ``strides`` keeps the graph's results as they were. After:
``writers`` says what computes each, ``horizontal_fusion`` and ``split_k`` make fewer or more launches of them.
``kernels/``: ``dense``, ``depthwise``, ``weights``; ``dependent_launch`` starts them, ``async_compile`` compiles them.
"""
