"""A rank of these tests: python rank.py URL OUT CHANGES, CHANGES are a config's, as JSON.

With `"checkpoint": FOLDER` the model is that of the sharding tests, in 4 bits with `"quantized": true`. With
`"streamed": NUMBER` the data are a stream of so many prompts.
"""

import json
import sys
from pathlib import Path

from tests.distributed.fsdp_on_gloo import force_fsdp, without_deepspeeds_operator

force_fsdp()

import torch  # noqa: E402
from datasets import IterableDataset  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from trl.generation import vllm_client, vllm_generation  # noqa: E402

from tests import tiny  # noqa: E402
from tests.engines.vllm.runs import figures, on_quantized  # noqa: E402
from tests.engines.vllm.whole_engine import is_sharded  # noqa: E402
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer  # noqa: E402


def main(url: str, out: str, changes: str) -> None:
    vllm_client.is_vllm_available = vllm_generation.is_vllm_available = lambda: True
    without_deepspeeds_operator()
    settings = json.loads(changes)
    checkpoint = settings.pop("checkpoint", None)
    quantized = settings.pop("quantized", False)
    streamed = settings.pop("streamed", None)
    trained = []

    def reward(prompts, completions, **_):
        if trainer.model.training:
            trained.append(prompts)
        return tiny.digit_share(completions)

    torch.manual_seed(0)
    settings = {
        "use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_timeout": 10.0, **settings,
    }  # fmt: skip
    if checkpoint is None:
        if streamed is not None:
            rows = tiny.prompts(streamed).to_list()
            settings["dataset"] = IterableDataset.from_generator(lambda: iter(rows))
        trainer = tiny.trainer(
            EfficientGRPOTrainer, EfficientGRPOConfig, out, peft_config=tiny.lora(), reward=reward, **settings
        )
    else:
        trainer = on_quantized(checkpoint, out, quantized, reward=reward, **settings)
    rank = trainer.accelerator.process_index
    result = Path(out) / f"rank{rank}.json"
    try:
        trainer.train(resume_from_checkpoint="auto")
    except (Exception, KeyboardInterrupt) as error:
        result.write_text(json.dumps({"error": f"{type(error).__name__}: {error}", "step": trainer.state.global_step}))
        raise
    weights = [value for value in trainer.model.parameters() if value.requires_grad]
    sharded = [is_sharded(value) for value in weights]
    weights = [value.full_tensor() if isinstance(value, DTensor) else value for value in weights]
    written = {"trained": trained, "weights": torch.cat([value.detach().flatten() for value in weights]).tolist()}
    written["sharded"] = all(sharded)
    for name in ("loss", "sampling/staleness", "reward"):
        written[name] = figures(trainer, name)
    result.write_text(json.dumps(written))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
