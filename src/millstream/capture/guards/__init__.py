"""Assumptions of a captured graph, and the checks that they still hold."""
