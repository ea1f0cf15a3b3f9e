"""What a step is refused for, before it runs and while it does."""
