"""Completions by vLLM: the engine, and the adapter's way into it."""
