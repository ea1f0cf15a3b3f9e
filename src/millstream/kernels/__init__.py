"""Kernels of our own on a GPU, and what is done to the graph for them: before Inductor and after it.

``registry`` lists the families, which the rest of the library knows them by; ``family`` says what one is. A folder
each: ``conv2d``, ``depthwise``, ``weights`` and, for products and attention, ``rows``. ``cudnn`` binds the convolutions
of cuDNN, ``horizontal_fusion`` makes fewer launches of all. ``channels_last``, ``nodes`` and ``launches`` are what they
share.
"""
