"""Branches on a tensor's value: traced both ways and merged, or held to what a flag of the state says."""
