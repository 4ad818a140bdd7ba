"""Attention layers on a packed row: `layers.py` puts them on a model, and each backend has a file."""
