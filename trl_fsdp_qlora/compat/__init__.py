"""Names borrowed from TRL, transformers, PEFT and torch that are not part of a documented interface, with checks."""
