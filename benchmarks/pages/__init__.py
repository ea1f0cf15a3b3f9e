"""Programs that make the pictures and texts of the documentation; nothing is measured."""
