"""What libraries do again in every training of a process, a quarter of a tiny one: done once, for tests and ranks.

Imported before transformers, PEFT and TRL, which take these names from their modules.
"""

import functools
import importlib.metadata
import os

import jinja2

# For every unwrapped model accelerate reads whether DeepSpeed is installed. A model card reads five versions.
importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
importlib.metadata.version = functools.cache(importlib.metadata.version)
# A model card compiles its template whenever it is written.
jinja2.Environment.compile = functools.lru_cache(jinja2.Environment.compile)
# A checkpoint waits for the disk. No test ends the power.
os.fsync = lambda _: None
