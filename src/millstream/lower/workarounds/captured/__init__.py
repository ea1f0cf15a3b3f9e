"""Workarounds for a graph as it was captured, before autograd makes it functional."""
