"""FSDP2 + QLoRA that really shards: 4-bit bases as packed bytes, plain adapters out, checked while it runs.

Names are imported when first used, so a run without a quantized model imports neither bitsandbytes nor peft.
"""
