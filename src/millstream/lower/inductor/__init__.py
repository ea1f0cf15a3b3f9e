"""Our part within TorchInductor: the wrapper that it writes to, and what it does earlier, once, or not at all."""
