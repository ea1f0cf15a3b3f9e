"""``ms.step``: which graph a call replays, when one is captured, and what runs as plain Python."""
