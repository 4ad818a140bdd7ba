"""Bytes and seconds of a run before it starts, and compared with what was measured."""
