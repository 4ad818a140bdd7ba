"""Functions from private parts of TRL, transformers, PEFT, vLLM and torch's FSDP, and replacements of such functions.

Other rooms use private attributes and methods only of the objects that they get: a trainer, a model, a config. They do
not replace them: `utils/replaced.py` does that, and is called here alone, with the reason beside each call. A class
that one of ours extends is imported in our class's file, such as TRL's vLLM engine in `engines/vllm/engine.py`.
`tests/compat/test_borrowed_names.py` checks that the installed libraries have the names that other rooms use.
"""
