"""Accuracy on problems with exact answers: greedy pass@1, sampled pass@k, majority@k; on every rank.

    accelerate launch --config_file accelerate_configs/ddp_cpu.yaml recipes/evaluate.py \
        --model runs/small-base --adapter runs/quickstart --dataset addition --max_new_tokens 6 --samples 4

Prints n and the 95% Wilson interval, and writes a JSON file where `--output` names one.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import PartialState
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from trl_fsdp_qlora.publishing.card import hardware, software
from trl_fsdp_qlora.recipe.arguments import ScriptArguments, parse_recipe
from trl_fsdp_qlora.recipe.data import load_data
from trl_fsdp_qlora.recipe.evaluation import evaluate
from trl_fsdp_qlora.recipe.script import run_main, say
from trl_fsdp_qlora.run.checkpoints import write_json


@dataclass
class EvaluateArguments:
    """What to measure, beside the data of `ScriptArguments`.

    Args:
        model: base model, Hub id or folder.
        adapter: PEFT adapter on top of it; none measures the base.
        revision: of the base model.
        dtype: of the weights, e.g. float32 or bfloat16; the checkpoint's own where it is not set.
        load_in_4bit: quantize the base as a QLoRA run does; its adapter was trained on that base, not on the whole one.
        bnb_4bit_quant_type: as in the recipe.
        use_bnb_nested_quant: as in the recipe.
        max_new_tokens: length limit of a completion.
        batch_size: completions a batch, per rank.
        samples: k of pass@k and majority@k; 0 for greedy decoding only.
        temperature: of the samples.
        top_p: of the samples.
        seed: of the samples.
        output: JSON file to write.
    """

    model: str = field(metadata={"help": "base model, Hub id or folder"})
    adapter: str | None = None
    revision: str = "main"
    dtype: str | None = None
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "nf4"
    use_bnb_nested_quant: bool = False
    max_new_tokens: int = 256
    batch_size: int = 64
    samples: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    output: str | None = None


def main() -> None:
    script, args = parse_recipe((ScriptArguments, EvaluateArguments))
    state = PartialState()
    _, test = load_data(script)
    tokenizer = AutoTokenizer.from_pretrained(args.model, revision=args.revision)
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
    model = AutoModelForCausalLM.from_pretrained(args.model, revision=args.revision, dtype=dtype, **quantization)
    if args.adapter:
        model = PeftModel.from_pretrained(model, args.adapter)
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
        Path(args.output).parent.mkdir(parents=True, exist_ok=True)
        write_json(Path(args.output), {**about, **result.as_dict(), "hardware": hardware(), "software": software()})


if __name__ == "__main__":
    run_main(main)
