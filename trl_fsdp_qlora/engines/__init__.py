"""Who draws completions: transformers' loop with shared prefill, or vLLM with the adapter alone."""
