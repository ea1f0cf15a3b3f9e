"""Calls that run as plain Python: how, for how long, and why."""
