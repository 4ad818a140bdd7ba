"""On a card: this package next to stock TRL, on random weights in shapes of Qwen3, in bf16 with LoRA.

    python benchmarks/gpu_steps.py equality
    python benchmarks/gpu_steps.py steps --shape 1.7B
    python benchmarks/gpu_steps.py steps --shape 1.7B --four_bit

    equality   log-probabilities, in nats, and gradients of the same completions on this package's packed rows and on
               TRL's padded rows, each compared with padded rows in float32. Packed rows are right if they are as
               near to float32 as padded ones.
    steps      seconds and peak bytes of whole optimizer steps (generation, loss, backward, update) and of their
               passes alone, each trainer with its defaults. The first step, which compares and compiles, is left out.

Prints rows of the table of benchmarks/gpu.py: what it is, what was predicted, what was measured. Tokens are predicted
by counting, bytes by `trl-fsdp-qlora plan`. Runs on the emulated device of tests/emulated_gpu, too, where `--tiny`
rehearses it; the seconds mean nothing there.
"""

import argparse
import gc
import random
import statistics
import tempfile
import time

import torch
from datasets import Dataset
from gpu_bytes import ready
from peft import LoraConfig
from synthetic import make_batch, make_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer

GIB = 2**30
TRAINERS = {"stock": (GRPOTrainer, GRPOConfig), "ours": (EfficientGRPOTrainer, EfficientGRPOConfig)}
WORDS = 500  # of the tokenizer; a model draws from its whole vocabulary


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1} | {f"w{number}": number for number in range(2, WORDS)}
    fast = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<pad>", eos_token="<eos>")


def save_base(args, folder: str) -> None:
    with torch.device("cuda"):
        make_model(args).to(torch.bfloat16).save_pretrained(folder)


def make_trainer(name: str, folder: str, args, **settings):
    """A trainer on the saved base, with LoRA of rank 16 on every linear layer; two groups per step."""
    cls, config_cls = TRAINERS[name]
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="bfloat16"
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype="bfloat16", device_map={"": 0}, quantization_config=four_bits if args.four_bit else None
    )
    draw = random.Random(0)
    prompts = [" ".join(f"w{draw.randrange(2, WORDS)}" for _ in range(args.prompt)) for _ in range(64)]

    def rewards(completions, **columns):
        return [draw.random() for _ in completions]

    config = config_cls(
        output_dir=tempfile.mkdtemp(),
        max_steps=args.steps,
        per_device_train_batch_size=args.group,
        gradient_accumulation_steps=2,
        num_generations=args.group,
        max_completion_length=args.completion,
        bf16=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
        **settings,
    )
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    data = Dataset.from_dict({"prompt": prompts})
    return cls(model, rewards, config, data, processing_class=tokenizer(), peft_config=lora)


# --- equality --------------------------------------------------------------------------------------------------------


def scored(name: str, folder: str, args, in_float32: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of one ragged batch, and the adapter's gradient after `compute_loss`."""
    trainer = make_trainer(name, folder, args)
    if in_float32:
        trainer.model.float()
        trainer.accelerator.state._mixed_precision = "no"
    generator = torch.Generator().manual_seed(0)
    for key, parameter in trainer.model.named_parameters():
        if "lora_B" in key:  # zeros, under which half of the gradients would be zero
            parameter.data.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    model = ready(trainer)
    batch = make_batch(args.vocabulary, args.prompt, args.completion, args.group, "ragged", "cuda", seed=0)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    with torch.no_grad():
        values = trainer._get_per_token_logps_and_entropies(model, ids, mask, batch["completion_ids"].shape[1])[0]
    trainer.accelerator.backward(trainer.compute_loss(model, dict(batch)))
    if name == "ours" and not trainer.sharing.status.packs:
        raise RuntimeError(f"prompts were not shared: {trainer.sharing.describe()}")
    gradients = [p.grad.float().flatten() for p in trainer.model.parameters() if p.grad is not None]
    return values.float()[batch["completion_mask"].bool()], torch.cat(gradients)


def equality(args) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_base(args, folder)
        exact, exact_gradient = scored("stock", folder, args, in_float32=True)
        distances = {}
        for name in TRAINERS:
            values, gradient = scored(name, folder, args, in_float32=False)
            apart = (values - exact).abs()
            along = torch.nn.functional.cosine_similarity(gradient, exact_gradient, 0).item()
            distances[name] = apart.mean().item(), apart.max().item(), along
            gc.collect()
            torch.cuda.empty_cache()
    stock, ours = distances["stock"], distances["ours"]
    what = f"log-probabilities, bf16 next to float32, {args.shape}, nats: mean, largest"
    measured = f"padded {stock[0]:.2g}, {stock[1]:.2g}; packed {ours[0]:.2g}, {ours[1]:.2g}"
    print(f"| {what} | packed as near as padded | {measured} |")
    print(f"| gradients: cosine with float32's | the same | padded {stock[2]:.6f}; packed {ours[2]:.6f} |", flush=True)


# --- whole steps -----------------------------------------------------------------------------------------------------


class Clock(TrainerCallback):
    """Seconds between the ends of steps, and of `compute_loss` with the backward in each step."""

    def __init__(self, trainer):
        self.steps, self.passes = [], []
        self._ended = self._of_passes = 0.0
        trainer.compute_loss = self._timed(trainer.compute_loss)
        trainer.accelerator.backward = self._timed(trainer.accelerator.backward)
        trainer.add_callback(self)

    @staticmethod
    def now() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    def _timed(self, function):
        def timed(*args, **kwargs):
            started = self.now()
            result = function(*args, **kwargs)
            self._of_passes += self.now() - started
            return result

        return timed

    def on_step_end(self, args, state, control, **kwargs):
        ended = self.now()
        if self._ended:  # from the second step on
            self.steps.append(ended - self._ended)
            self.passes.append(self._of_passes)
        self._ended, self._of_passes = ended, 0.0


def trained(name: str, folder: str, args) -> tuple[float, float, int]:
    """Medians of a step's and its passes' seconds, and peak bytes."""
    trainer = make_trainer(name, folder, args)
    clock = Clock(trainer)
    torch.cuda.reset_peak_memory_stats()
    trainer.train()
    if name == "ours" and not trainer.sharing.status.packs:
        raise RuntimeError(f"prompts were not shared: {trainer.sharing.describe()}")
    return statistics.median(clock.steps), statistics.median(clock.passes), torch.cuda.max_memory_allocated()


def planned(folder: str, args, **changes) -> float:
    """GiB that the plan has for the run, less the CUDA context, which is not the allocator's."""
    from trl_fsdp_qlora.tools.planning.plan import plan_recipe

    fields = {
        "model_name_or_path": folder,
        "dataset": "none",
        "per_device_train_batch_size": args.group,
        "gradient_accumulation_steps": 2,
        "num_generations": args.group,
        "max_completion_length": args.completion,
        "bf16": "true",
        "dtype": "bfloat16",
        "use_peft": "true",
        "lora_r": 16,
        "load_in_4bit": str(args.four_bit).lower(),
        "use_bnb_nested_quant": "true",
        **changes,
    }
    words = [word for key, value in fields.items() for word in (f"--{key}", str(value))]
    plan = plan_recipe(words, EfficientGRPOConfig, hardware="80GB", prompt_tokens=args.prompt)
    return (plan.peak - plan.phases[plan.limiting].get("process", 0)) / GIB


def steps(args) -> None:
    prompt, completion, group = args.prompt, args.completion, args.group
    fewer = group * (prompt + completion) / (prompt + group * completion)
    with tempfile.TemporaryDirectory() as folder:
        save_base(args, folder)
        tokenizer().save_pretrained(folder)
        expected = {
            "stock": planned(folder, args, prefix_sharing="off", mlp_tokens_per_tile="off"),
            "ours": planned(folder, args),
        }
        measured = {}
        for name in TRAINERS:
            measured[name] = trained(name, folder, args)
            gc.collect()
            torch.cuda.empty_cache()
    what = f"Qwen3-{args.shape} {'QLoRA' if args.four_bit else 'LoRA'}, 2 × {prompt}/{completion}/{group}"
    (step, passes, peak), (our_step, our_passes, our_peak) = measured["stock"], measured["ours"]
    print(f"| step of {what}, s | | {step:.3f} → {our_step:.3f} ({step / our_step:.2f}×) |")
    times = f"{passes:.3f} → {our_passes:.3f} ({passes / our_passes:.2f}×)"
    print(f"| passes of {what}, s | {fewer:.2f} times fewer tokens | {times} |")
    predicted = f"{expected['stock']:.1f} → {expected['ours']:.1f}"
    print(f"| peak of {what}, GiB | {predicted} (plan) | {peak / GIB:.2f} → {our_peak / GIB:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["equality", "steps"])
    parser.add_argument("--shape", default="0.6B", choices=["0.6B", "1.7B"], help="of Qwen3")
    parser.add_argument("--four_bit", action="store_true", help="the base in nf4")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--completion", type=int, default=128)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tiny", action="store_true", help="a rehearsal in small sizes")
    args = parser.parse_args()
    args.device, args.vocabulary = "cuda", 151936
    if args.tiny:
        args.shape, args.vocabulary, args.prompt, args.completion, args.group, args.steps = "tiny", 512, 8, 3, 2, 2
    {"equality": equality, "steps": steps}[args.part](args)


if __name__ == "__main__":
    main()
