"""Where buffers lie and when: allocations, frees, one arena."""
