"""A step run once on fake tensors and recorded as one flat graph of aten operators."""
