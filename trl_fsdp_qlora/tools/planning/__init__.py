"""The bytes of a run before it starts, by phase and part, and whether they fit."""
