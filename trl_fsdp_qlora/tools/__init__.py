"""The commands behind `trl-fsdp-qlora COMMAND`; no trainer needs them."""
