"""Completions by transformers: prompts prefilled once, finished rows dropped, caches kept over turns."""
