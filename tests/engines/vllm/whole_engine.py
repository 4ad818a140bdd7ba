"""An engine for trainers of any sharding without vLLM: a whole model of the rank's own, under the adapter it
was sent.
"""

from types import SimpleNamespace

import torch
from peft import PeftModel, load_peft_weights, set_peft_model_state_dict
from torch.distributed.tensor import DTensor

from trl_fsdp_qlora.engines.vllm.adapter_sync import AdapterVersions
from trl_fsdp_qlora.engines.vllm.engine import AdapterEngine


class WholeEngine(AdapterEngine):
    """Reads each version from its folder, as vLLM does; completions are of random tokens, scored by its own whole
    `policy`.
    """

    vllm_client = SimpleNamespace(base_url="http://stand-in", get_server_info=dict)  # nothing is sent to it
    end = 1  # what min_tokens bans; none of the random tokens

    def __init__(self, policy: PeftModel, **options):
        self.policy = policy.eval()
        ours = {"base": "whole", "max_lora_rank": 8}
        super().__init__(**ours, processing_class=None, mode="server", **options)

    def _init_vllm(self) -> None:
        """There is nothing to start."""

    def _load(self, version, folder) -> None:
        loaded = set_peft_model_state_dict(self.policy, load_peft_weights(folder, device="cpu"))
        assert not loaded.unexpected_keys

    @torch.no_grad()
    def generate(self, prompts, images, num_generations, profiler=None):
        generator = torch.Generator().manual_seed(self.version * 100 + self.accelerator.process_index)
        completions = []
        logps = []
        for prompt in prompts:
            length = int(torch.randint(3, 13, (), generator=generator))
            completion = torch.randint(3, min(40, self.policy.config.vocab_size), (length,), generator=generator)
            row = torch.cat([torch.tensor(prompt), completion])[None]
            logits = self.policy(row).logits[0, len(prompt) - 1 : -1]
            logits[: self.generation_kwargs.get("min_tokens", 0), self.end] = -torch.inf
            scores = logits.log_softmax(-1)
            completions.append(completion.tolist())
            logps.append(scores.gather(1, completion[:, None]).tolist())
        return prompts, completions, logps, None


def start_whole(policy: PeftModel):
    """In the place of `start_engine`."""

    def start(args, own_base, *, model, accelerator, **options):
        options = {name: options[name] for name in ("generation_kwargs", "temperature")}
        versions = AdapterVersions("whole", args.output_dir)
        return WholeEngine(policy, versions=versions, model=model, accelerator=accelerator, **options)

    return start


def is_sharded(parameter: torch.nn.Parameter) -> bool:
    return isinstance(parameter, DTensor) or hasattr(parameter, "ds_id")


def whole_bytes(parameter: torch.nn.Parameter) -> int:
    """Of the parameter, also if a rank has a shard: a DTensor has its whole shape, ZeRO-3 keeps it under a name of its
    own.
    """
    return getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()
