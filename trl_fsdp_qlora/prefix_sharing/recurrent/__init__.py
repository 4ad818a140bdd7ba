"""Recurrent layers on a packed row.

`kinds.py` has the table of the kinds, and each kind a file: which layers are of it, how they compute a packed row, and
what they keep. `layers.py` puts that on a model and takes it off. A layer that is not in the table lets its model run
as in stock TRL.
"""
