"""Merging an adapter, publishing it, and checking that it loads."""
