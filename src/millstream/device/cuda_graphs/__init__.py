"""CUDA graphs: capturing them, and what is asked of and changed in a captured one through the driver."""
