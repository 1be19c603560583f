"""Tool calls in the formats of the model families: one file each, and ``table`` with all of them."""
