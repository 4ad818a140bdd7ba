"""Recurrent layers on a packed row.

`known_layers.py` has the table of the layers that are known, `level_by_level.py` how they compute a packed row and
what they keep. `layers.py` puts that on a model and takes it off.
"""
