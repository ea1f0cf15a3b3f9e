"""A plan on several threads of this process."""
