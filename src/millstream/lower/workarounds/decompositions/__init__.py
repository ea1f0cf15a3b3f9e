"""Operators that Inductor gets wrong, computed by other operators."""
