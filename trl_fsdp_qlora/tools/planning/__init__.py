"""The bytes of a run before it starts, and their comparison with measured bytes."""
