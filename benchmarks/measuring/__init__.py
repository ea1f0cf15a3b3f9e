"""How sides are measured, compared and reported: what every suite uses."""
