"""The commands of `trl-fsdp-qlora`: each takes its words and returns an exit status."""
