"""Completions by vLLM: the engine, the adapter's way into it, one copy of the base."""
