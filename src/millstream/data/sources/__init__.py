"""What a feed asks: a loader, at any position, with its random state."""
