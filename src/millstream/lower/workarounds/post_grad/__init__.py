"""Workarounds for graphs that write their inputs, after autograd: what is read too late."""
