"""Recurrent layers on a packed row."""
