"""vLLM draws the next generation batch while this one is trained on."""
