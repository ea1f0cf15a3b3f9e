"""Host effects: what a step does besides tensor operations, recorded while tracing and run after every replay."""
