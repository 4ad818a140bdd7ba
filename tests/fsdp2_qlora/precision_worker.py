"""Run by test_precision.py in two processes: bf16 FSDP2 of an unquantized base; are log-probabilities float32?"""

import sys
from pathlib import Path

from tests.distributed.fsdp_on_gloo import force_fsdp

force_fsdp()

import torch  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402

from tests.prefix_sharing.helpers import SUPPORTED, build, make_trainer  # noqa: E402
from trl_fsdp_qlora import EfficientGRPOTrainer  # noqa: E402


class Recording(EfficientGRPOTrainer):
    """Keeps the log-probabilities of every pass."""

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        values = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        self.seen.append(values[0].detach())
        return values


def main(folder: Path) -> None:
    for choice in ("off", "auto"):
        trainer = make_trainer(
            Recording, build(SUPPORTED["qwen3"]), folder, bf16=True, max_steps=1, prefix_sharing=choice
        )
        trainer.seen = []
        trainer.train()
        assert isinstance(trainer.model, FSDPModule)
        assert trainer.accelerator.state.fsdp_plugin.mixed_precision_policy.param_dtype == torch.bfloat16
        for logps in trainer.seen:
            assert logps.dtype == torch.float32, logps.dtype
            values = logps[logps != 0]
            assert len(values) and (values != values.bfloat16().float()).float().mean() > 0.9
        assert trainer.prefix_sharing.active() == (choice == "auto")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
