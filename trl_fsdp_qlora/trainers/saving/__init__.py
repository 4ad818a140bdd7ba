"""Checkpoints that are whole or not there, found again; what a signal does; for every trainer."""
