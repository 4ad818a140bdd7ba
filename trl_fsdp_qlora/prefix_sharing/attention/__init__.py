"""Attention layers on a packed row.

`backends.py` has the table of the backends, and each backend a file: what it cannot compute, and how it computes the
rest. `layers.py` puts them on a model, on top of the model's own implementation (`implementation.py`), and takes them
off. `call.py` is what a backend gets.
"""
