"""One tree for batches, for arguments and for results: take the leaves out, and put others in their places.

``containers`` is the table of kinds of containers, ``spec`` what remains without leaves, ``flatten`` takes apart, for
captured programs, and ``batches`` says what is a leaf to feeds.

PyTorch's own trees and optree do not serve. To them dicts with other orders of keys are alike, and so are the keys
``1`` and ``True``; attributes beside items, a container that occurs twice, and what is in objects, are unknown to them.
"""
