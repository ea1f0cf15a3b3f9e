"""Timelines as pictures: what is drawn, and the writers that turn it into SVG, HTML, a trace, or lines of text."""
