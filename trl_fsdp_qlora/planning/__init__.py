"""Bytes and seconds of a run before it starts, and beside what was then measured."""
