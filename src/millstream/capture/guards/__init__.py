"""What a captured graph takes for granted, and whether it still holds."""
