"""Undocumented names borrowed from TRL, transformers, PEFT, vLLM and torch, with checks that they still fit."""
