"""Depthwise convolutions of small images: our kernel, and what stands in front of them."""
