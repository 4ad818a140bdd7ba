"""Accuracy on problems with exact answers: greedy pass@1, sampled pass@k, majority@k; on every rank.

    accelerate launch --config_file accelerate_configs/ddp_cpu.yaml recipes/evaluate.py \
        --model runs/small-base --adapter runs/quickstart --dataset addition --max_new_tokens 6 --samples 4

Prints n and the 95% Wilson interval, and writes a JSON file where `--output` names one.
"""

import trl_fsdp_qlora.run.importing  # noqa: F401  # before the libraries: Ctrl-C while they load is one word

# isort: split

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import BitsAndBytesConfig

from trl_fsdp_qlora.checkpoints.disk import disk_errors, write_json
from trl_fsdp_qlora.fsdp2_qlora.loading import experts_in_4bit
from trl_fsdp_qlora.publishing.card import hardware, software
from trl_fsdp_qlora.publishing.loading import LoadError, load_base, with_adapter
from trl_fsdp_qlora.recipe.arguments import ConfigError, ScriptArguments, option, parse_recipe
from trl_fsdp_qlora.recipe.checks import check_adapter, check_counts, check_installed, check_script, load_tokenizer
from trl_fsdp_qlora.recipe.data import load_held_out
from trl_fsdp_qlora.recipe.evaluation import evaluate
from trl_fsdp_qlora.recipe.script import run_main, say


@dataclass
class EvaluateArguments:
    """What to measure, beside the data of `ScriptArguments`."""

    model: str = field(metadata={"help": "Base model, Hub id or folder."})
    adapter: str | None = option(None, "PEFT adapter on top of it; none measures the base.")
    revision: str = option("main", "Revision of the base model.")
    dtype: str | None = field(
        default=None,
        metadata={
            "help": "Type of the weights; the checkpoint's own where it is not set.",
            "choices": ["bfloat16", "float16", "float32"],
        },
    )
    load_in_4bit: bool = option(
        False, "Quantize the base as a QLoRA run does; its adapter was trained on that base, not on the whole one."
    )
    bnb_4bit_quant_type: str = option("nf4", "Quantization type of the 4-bit base, as in the recipe.")
    use_bnb_nested_quant: bool = option(False, "Nested (double) quantization of the 4-bit base, as in the recipe.")
    max_new_tokens: int = option(256, "Length limit of a completion.")
    batch_size: int = option(64, "Completions per batch, per rank.")
    samples: int = option(0, "k of pass@k and majority@k; 0 for greedy decoding only.")
    temperature: float = option(1.0, "Temperature of the samples.")
    top_p: float = option(1.0, "Nucleus (top-p) share that the samples are drawn from.")
    seed: int = option(0, "Seed of the samples.")
    output: str | None = option(None, "JSON file to write.")


def checked_tokenizer(script: ScriptArguments, args: EvaluateArguments):
    """The model's tokenizer, when all that can be told to be wrong before the weights are loaded has been looked at."""
    check_script(script)
    check_counts(args, {"max_new_tokens": (1, "try 256"), "batch_size": (1, "try 64"), "samples": (0, "0 is greedy")})
    if args.temperature <= 0 or not 0 < args.top_p <= 1:
        raise ConfigError(f"temperature={args.temperature} must be positive and top_p={args.top_p} in (0, 1]")
    if args.load_in_4bit:
        check_installed("bitsandbytes", "load_in_4bit: true")
    tokenizer = load_tokenizer(args.model, args.revision, script.chat, "model")
    if args.adapter:
        check_adapter(args.adapter)
    if args.output:
        check_output(Path(args.output))
    return tokenizer


def check_output(path: Path) -> None:
    """Refuse a file that cannot be written, before anything is measured."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output={str(path)!r} cannot be written: {error.strerror}") from None
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"output={str(path)!r} is a folder, or in one that cannot be written; name a JSON file")


def main() -> None:
    script, args = parse_recipe((ScriptArguments, EvaluateArguments))
    state = PartialState()
    tokenizer = checked_tokenizer(script, args)
    test = load_held_out(script)
    dtype = getattr(torch, args.dtype) if args.dtype else "auto"
    quantization = {}
    if args.load_in_4bit:
        quantization["device_map"] = {"": state.device}
        quantization["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=args.bnb_4bit_quant_type,
            bnb_4bit_use_double_quant=args.use_bnb_nested_quant,
            bnb_4bit_compute_dtype=None if dtype == "auto" else dtype,
        )
    with experts_in_4bit():
        model = load_base(args.model, revision=args.revision, dtype=dtype, **quantization)
    if args.adapter:
        model = with_adapter(model, args.adapter, args.model)
    result = evaluate(
        model if args.load_in_4bit else model.to(state.device),
        tokenizer,
        test,
        max_new_tokens=args.max_new_tokens,
        batch_size=args.batch_size,
        samples=args.samples,
        temperature=args.temperature,
        top_p=args.top_p,
        answer_format=script.answer_format,
        seed=args.seed,
    )
    say(str(result))
    if args.output and state.is_main_process:
        about = {"model": args.model, "adapter": args.adapter, "dataset": script.dataset, "seed": args.seed}
        with disk_errors(Path(args.output).parent):
            write_json(
                Path(args.output), {**about, **result.as_dict(), "hardware": hardware(), "software": software()}
            )


if __name__ == "__main__":
    run_main(main, LoadError)
