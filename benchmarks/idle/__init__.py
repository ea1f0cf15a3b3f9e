"""Suite ``idle``: what ``millstream profile`` finds, what it costs, and what others say of the same records."""
