"""Changes to how Inductor lowers operators."""
