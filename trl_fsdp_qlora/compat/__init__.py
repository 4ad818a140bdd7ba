"""Every name borrowed from TRL, transformers, PEFT and torch, in one place, checked."""
