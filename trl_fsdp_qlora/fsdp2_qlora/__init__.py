"""FSDP2 + QLoRA that really shards: 4-bit weights are sharded as packed bytes, and saved adapters are plain files.

Names are imported when first used, so a run without a quantized model imports neither bitsandbytes nor peft.
"""
