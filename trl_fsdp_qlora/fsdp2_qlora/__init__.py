"""FSDP2 + QLoRA that really shards: 4-bit weights are sharded as packed bytes, and saved adapters are plain files.

`trainer.py` has the mixin for trainers and imports PEFT; bitsandbytes is imported with the first quantized model.
"""
