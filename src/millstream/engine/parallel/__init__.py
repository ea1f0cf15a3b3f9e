"""Steps that exchange something between processes: in segments, or as one graph where all agree."""
