"""Where the milliseconds of a decoded token go: stock `generate` beside this package's loop, part by part.

    python benchmarks/decoding_step.py --model SMOLLM2 --data SVAMP.json [--prompts 2] [--group 8] [--tokens 48]
                                       [--threads 2] [--rounds 5] [--out benchmarks/results]

The same prompts, completions of exactly `--tokens` tokens, sampled, a LoRA adapter on every linear layer. Functions of torch,
transformers and this package are wrapped in clocks that run one at a time: a part's seconds are without those of the parts
within it, so the parts add up to the whole. Rounds alternate, and the figures are medians in milliseconds per decoding step (a
token of every row); the prefill is divided by the steps too. Run it with nothing beside it.
"""

import argparse
import contextlib
import functools
import platform
import statistics
import time
from collections import defaultdict
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear as LoraLinear
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.cache_utils import DynamicLayer
from transformers.generation import GenerationMixin

from trl_fsdp_qlora.checkpoints.disk import write_json
from trl_fsdp_qlora.recipe.datasets import read_problems
from trl_fsdp_qlora.rollout import decoding
from trl_fsdp_qlora.rollout.cache import RoomyLayer
from trl_fsdp_qlora.rollout.completions import complete
from trl_fsdp_qlora.rollout.shared_prompts import SharedPrompts


class Parts:
    """Seconds by part, each without those of the parts within it."""

    def __init__(self):
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0

    @contextlib.contextmanager
    def part(self, name: str):
        # What a prefill calls belongs to the prefill.
        name = "prefill" if "prefill" in self._open else name
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def _turn(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    def wrap(self, stack: contextlib.ExitStack, owner, attribute: str, name: str) -> None:
        """Time every call of `owner.attribute` as part `name` until `stack` closes."""
        inherited = attribute not in vars(owner)
        original = getattr(owner, attribute)

        @functools.wraps(original)
        def timed(*args, **kwargs):
            with self.part(name):
                return original(*args, **kwargs)

        setattr(owner, attribute, timed)
        stack.callback(delattr, owner, attribute) if inherited else stack.callback(setattr, owner, attribute, original)

    def wrap_forward(self, stack: contextlib.ExitStack, owner: type) -> None:
        """Time a model's forwards, those of more than one token as the prefill."""
        original = owner.forward

        @functools.wraps(original)
        def timed(module, *args, **kwargs):
            tokens = kwargs.get("input_ids", args[0] if args else None).shape[1]
            with self.part("prefill" if tokens > 1 else "rest of the forward"):
                return original(module, *args, **kwargs)

        owner.forward = timed
        stack.callback(setattr, owner, "forward", original)


def measure(model, ids: list[list[int]], config: GenerationConfig, compact: bool) -> dict[str, float]:
    """Milliseconds per decoding step of each part, and their sum as `total`."""
    parts = Parts()
    causal_lm = model.get_base_model()
    with contextlib.ExitStack() as stack:
        parts.wrap_forward(stack, type(causal_lm))
        for layer in (LoraLinear, torch.nn.Linear):
            parts.wrap(stack, layer, "__call__", "linear layers")
        modeling = __import__(type(causal_lm).__module__, fromlist=["create_causal_mask"])
        parts.wrap(stack, modeling, "create_causal_mask", "masks")
        parts.wrap(stack, torch.nn.functional, "scaled_dot_product_attention", "attention")
        parts.wrap(stack, SharedPrompts, "attend", "attention")
        for layer in (DynamicLayer, RoomyLayer):
            parts.wrap(stack, layer, "update", "cache")
        for owner, name in ((torch, "multinomial"), (torch, "softmax"), (torch.nn.functional, "softmax")):
            parts.wrap(stack, owner, name, "sampling")
        parts.wrap(stack, decoding, "draw", "sampling")
        parts.wrap(stack, LogitsProcessorList, "__call__", "processors")
        parts.wrap(stack, StoppingCriteriaList, "__call__", "stopping")
        for owner, name in (
            (GenerationMixin, "prepare_inputs_for_generation"),
            (GenerationMixin, "_update_model_kwargs_for_generation"),
            (SharedPrompts, "next_inputs"),
        ):
            parts.wrap(stack, owner, name, "inputs")
        with parts.part("rest of the loop"):
            complete(model, ids, config, compact=compact)
    steps = config.max_new_tokens - 1
    per_step = {name: 1000 * seconds / steps for name, seconds in parts.seconds.items()}
    return {**per_step, "total": sum(per_step.values())}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.0)).eval()
    asked = [problem["question"] for problem in read_problems(args.data)[: args.prompts]]
    ids = [tokenizer(question).input_ids for question in asked for _ in range(args.group)]
    # No token ends a completion.
    config = GenerationConfig(
        eos_token_id=[model.config.vocab_size], max_new_tokens=args.tokens, do_sample=True, top_k=0, pad_token_id=0
    )
    found = {"stock": [], "this package": []}
    for i in range(-1, args.rounds):
        for name in sorted(found, reverse=i % 2 == 0):
            figures = measure(model, ids, config, compact=name != "stock")
            if i >= 0:
                found[name].append(figures)
        print(f"round {i + 1} of {args.rounds}", flush=True)
    medians = {
        name: {part: statistics.median(run.get(part, 0.0) for run in runs) for part in runs[0]}
        for name, runs in found.items()
    }
    for part in sorted(medians["stock"], key=lambda part: -medians["stock"][part]):
        print(f"{part:20} {medians['stock'][part]:8.2f} {medians['this package'].get(part, 0.0):8.2f} ms")
    settings = {**{k: v for k, v in vars(args).items() if isinstance(v, int)}, "rows": len(ids)}
    result = {**settings, "torch": torch.__version__, "machine": platform.machine(), "ms_per_step": medians}
    write_json(args.out / "decoding_step.json", result)


if __name__ == "__main__":
    main()
