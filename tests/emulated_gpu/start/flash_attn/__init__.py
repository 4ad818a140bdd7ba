"""Stands in for the package flash-attn on the emulated device, where its kernels cannot run."""

from tests.dense_flash import dense as flash_attn_func
from tests.dense_flash import dense_varlen as flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
flash_attn_with_kvcache = None
