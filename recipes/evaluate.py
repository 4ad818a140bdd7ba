"""Accuracy on problems with exact answers: greedy pass@1 and sampled pass@k, on every rank.

    trl-fsdp-qlora evaluate --adapter runs/quickstart --accuracy_samples 4

From the folder of a run it takes everything that the run measured with: base, data, prompt, length, dtype. Any option
overrides that, and without such a folder `--model_name_or_path` and `--dataset` give it all. Options are called as in
recipes/grpo.py. A function of yours (data, an environment, tools) is named on the command line or in `--config`: code
that a folder names is never run.

Prints n and the 95% Wilson interval, and writes a JSON file if `--output` names one.
"""

from trl_fsdp_qlora.tools.run.one_line import importing

with importing():
    import json
    import os
    import shlex
    import sys
    from contextlib import nullcontext
    from dataclasses import dataclass, field
    from pathlib import Path
    from typing import Any

    import torch
    from accelerate import PartialState
    from transformers import BitsAndBytesConfig

    from trl_fsdp_qlora.fsdp2_qlora.loading import experts_in_4bit, keep_plain_kernel
    from trl_fsdp_qlora.tools.evaluation.accuracy import evaluate
    from trl_fsdp_qlora.tools.evaluation.measurement import Measurement
    from trl_fsdp_qlora.tools.publishing.adapted_base import (
        load_model,
        processor_source,
    )
    from trl_fsdp_qlora.tools.recipe import checks
    from trl_fsdp_qlora.tools.recipe.arguments import ConfigError, ScriptArguments, option, parse_recipe
    from trl_fsdp_qlora.tools.recipe.problems import load_held_out
    from trl_fsdp_qlora.tools.recipe.record import OF_THE_DATA, as_words, code_in, settings_in
    from trl_fsdp_qlora.tools.recipe.rendering import load_processing
    from trl_fsdp_qlora.tools.recipe.script import run_main, say
    from trl_fsdp_qlora.tools.run.one_line import pop_options
    from trl_fsdp_qlora.trainers.reporting.card import hardware, software
    from trl_fsdp_qlora.utils.files import write_json
    from trl_fsdp_qlora.utils.threads import fit_threads


@dataclass
class EvaluateArguments:
    """The model to measure and how it is measured; its data is `ScriptArguments`'s."""

    model_name_or_path: str | None = option(None, "Model, Hub id or folder; by default the adapter's own base.")
    adapter: str | None = option(None, "PEFT adapter, folder or Hub id; none measures the model.")
    model_revision: str = option("main", "Revision of the model.")
    dtype: str | None = field(
        default=None,
        metadata={
            "help": "Type of the weights; by default the checkpoint's own.",
            "choices": ["auto", "bfloat16", "float16", "float32"],
        },
    )
    load_in_4bit: bool = option(
        False, "Quantize the base as a QLoRA run does; its adapter was trained on that base, not on the whole one."
    )
    bnb_4bit_quant_type: str = option("nf4", "Quantization type of the 4-bit base, as in the recipe.")
    use_bnb_nested_quant: bool = option(False, "Nested (double) quantization of the 4-bit base, as in the recipe.")
    max_completion_length: int = option(256, "Length limit of a completion.")
    temperature: float = option(1.0, "Temperature of the samples.")
    top_p: float = option(1.0, "Nucleus (top-p) share that the samples are drawn from.")
    seed: int = option(0, "Seed of the samples.")
    use_cpu: bool = option(False, "Measure on the CPU although there is a GPU.")
    bf16: bool = option(False, "Compute in bfloat16 mixed precision, as a run with `bf16` measures.")
    max_tool_calling_iterations: int | None = option(None, "Turns of an episode that may follow calls of tools.")
    chat_template_kwargs: dict | str | None = field(default=None, metadata={"help": "As in the recipe."})
    tool_timeout: float | None = field(default=300.0, metadata={"help": "As in the recipe, for episodes."})
    output: str | None = option(None, "JSON file to write.")

    def __post_init__(self):
        if isinstance(self.chat_template_kwargs, str):
            self.chat_template_kwargs = json.loads(self.chat_template_kwargs)


def settings_of_run() -> tuple[str, dict[str, Any]]:
    """The named folder of a run, and the settings with which it measured; nothing if there is no such folder."""
    options, _ = pop_options(sys.argv[1:], ("--adapter", "--model_name_or_path", "--dataset"))
    adapter = options.get("--adapter")
    dataset = options.get("--dataset")
    if adapter is not None:  # a mistyped folder gives no settings, and the error would be about the missing dataset
        checks.check_adapter(adapter)
    for folder in filter(None, (adapter, options.get("--model_name_or_path"))):
        settings = settings_in(folder)
        if dataset is not None and os.path.abspath(dataset) != os.path.abspath(settings.get("dataset", "")):
            settings = {name: value for name, value in settings.items() if name not in OF_THE_DATA}
        if settings:
            return folder, settings
    named = adapter or options.get("--model_name_or_path")
    if named and dataset is None and "--config" not in " ".join(sys.argv):
        raise ConfigError(
            f"{named} is of no recipe's run, whose folder would name its data: add --dataset, and --held_out, "
            "--system_prompt, --prompt_template as it was trained with"
        )
    return "", {}


def check_code(folder: str, code: dict[str, Any], given: dict[str, Any]) -> None:
    """Refuse the `code` that the settings in `folder` name, by field, if the user has `given` no value to a field.

    Anyone may have written the folder.
    """
    unnamed = {name: value for name, value in code.items() if given[name] is None}
    if unnamed:
        raise ConfigError(
            f"{folder} names code ({', '.join(unnamed)}), and code is run only if you name it yourself; if it is "
            f"yours, add {shlex.join(as_words(unnamed))}"
        )


def load_measured_model(args: EvaluateArguments, device: torch.device) -> torch.nn.Module:
    """The model with its adapter on `device`, in the type and quantization of `args`."""
    dtype = "auto" if args.dtype in (None, "auto") else getattr(torch, args.dtype)
    quantization = {}
    if args.load_in_4bit:
        quantization["device_map"] = {"": device}
        quantization["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=args.bnb_4bit_quant_type,
            bnb_4bit_use_double_quant=args.use_bnb_nested_quant,
            bnb_4bit_compute_dtype=None if dtype == "auto" else dtype,
        )
    with experts_in_4bit():
        model = load_model(
            args.model_name_or_path, args.adapter, revision=args.model_revision, dtype=dtype, **quantization
        )
    keep_plain_kernel(model)  # as in the run whose accuracy is measured again
    if not args.load_in_4bit:
        model.to(device)
    fit_threads(model)
    return model


def measurement_of(script: ScriptArguments, args: EvaluateArguments, of_user: checks.UserCode) -> Measurement:
    """What the command line asks for."""
    return Measurement(
        max_new_tokens=args.max_completion_length,
        batch_size=script.accuracy_batch_size,
        samples=script.accuracy_samples,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
        answer_format=script.answer_format,
        template_options=args.chat_template_kwargs or {},
        agent=of_user.agent,
        max_tool_turns=args.max_tool_calling_iterations,
        judge=of_user.judge,
    )


def main() -> None:
    folder, settings = settings_of_run()
    code = code_in(settings)
    defaults = settings | dict.fromkeys(code)
    script, args = parse_recipe((ScriptArguments, EvaluateArguments), defaults=defaults)
    check_code(folder, code, vars(script) | vars(args))
    state = PartialState(cpu=args.use_cpu)
    of_user = checks.user_code(script, vars(args))
    if args.load_in_4bit:
        checks.check_installed("bitsandbytes", "load_in_4bit: true")
    if args.adapter:
        base = checks.check_adapter(args.adapter).base_model_name_or_path
        args.model_name_or_path = args.model_name_or_path or base
    if args.output:  # before anything is measured
        Path(args.output).parent.mkdir(parents=True, exist_ok=True)
        if Path(args.output).is_dir():
            raise ConfigError(f"output={args.output!r} is a folder; name a JSON file")
    tokenizer = checks.load_tokenizer(args.model_name_or_path, args.model_revision, script.chat, adapter=args.adapter)
    test = load_held_out(script)
    if "images" in test.column_names:
        source = processor_source(args.adapter, args.model_name_or_path, args.model_revision)
        tokenizer = load_processing(*source, images=True)
    if of_user.agent is not None:
        tokenizer = of_user.tool_format(tokenizer)
        checks.check_tool_template(tokenizer, args.model_name_or_path)
    model = load_measured_model(args, state.device)
    with torch.autocast(state.device.type, torch.bfloat16) if args.bf16 else nullcontext():
        result = evaluate(
            model,
            tokenizer,
            test,
            measurement_of(script, args, of_user),
            description="evaluate",
        )
    say(str(result))
    if args.output and state.is_main_process:
        content = {
            "model": args.model_name_or_path,
            "adapter": args.adapter,
            "dataset": script.dataset,
            "seed": args.seed,
            **result.as_dict(),
            "hardware": hardware(),
            "software": software(),
        }
        write_json(Path(args.output), content)
        say(f"the figures are in {args.output}")


if __name__ == "__main__":
    run_main(main)
