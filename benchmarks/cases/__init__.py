"""What is measured: networks, cases, and programs whose sizes change."""
