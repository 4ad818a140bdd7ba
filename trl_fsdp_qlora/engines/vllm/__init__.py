"""Completions by vLLM: what is sent to the engine, how the adapter gets there, and the check of its weights."""
