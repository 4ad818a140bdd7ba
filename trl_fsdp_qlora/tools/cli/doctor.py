"""usage: trl-fsdp-qlora doctor [--config FILE.yaml] [--accelerate_config NAME] [--num_processes N] [--json] [any
field]

Lists what would fail, or silently do the wrong thing, before it does. Looks at this machine and at what is installed;
with --config (or fields) also at the run that they describe: the accelerate config against the model, vLLM, the
adapter, the tokenizer, the data and the rewards; then it rehearses one step with a small random model. No GPU is
needed and no weight is loaded. The exit status is 1 if there is an error.
"""

# The checks of a run are the run's own (`recipe/checks.py`, `fsdp2_qlora/launch_checks.py`, `vllm/sync_choice.py`).
# Each is called by itself, so that one finding does not hide the next.

import asyncio
import contextlib
import inspect
import io
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from ...errors import UserError
from ...trainers.methods import METHODS
from ...utils.plain import counted, name_of
from ...utils.resources import accelerate_config
from .one_line import pop_options
from .scripts import (
    LAUNCHER,
    config_of,
    default_config,
    method_of,
    refuse_other_trainers,
    script_of,
    with_recipe,
)

_OPTIONAL = ("bitsandbytes", "deepspeed", "vllm", "math-verify", "matplotlib")
LEVELS = ("error", "warning", "ok")


class Finding(NamedTuple):
    """A result of a check: `level` is one of [`LEVELS`]; `text` has the value, the reason and the line to change."""

    level: str
    check: str
    text: str


def doctor(words: list[str]) -> int:
    """Print the findings, worst first; returns 1 if one is an error."""
    if {"--help", "-h"} & set(words):
        print(__doc__)
        return 0
    warnings.simplefilter("ignore")  # the libraries warn about each other, which is no finding
    findings: list[Finding] = []
    try:
        launcher, rest = pop_options([word for word in words if word != "--json"], LAUNCHER)
        rest = with_recipe(rest)
        with contextlib.redirect_stdout(sys.stderr):  # messages that libraries log on import are no findings
            findings += machine()
            findings += run(launcher, rest) if rest else ()
    except ImportError as error:  # the package refuses the installed versions: the findings so far have the reason
        findings.append(Finding("error", "imports", str(error)))
    findings = [Finding(level, check, " ".join(text.split())) for level, check, text in findings]
    findings.sort(key=lambda finding: LEVELS.index(finding.level))
    errors = sum(finding.level == "error" for finding in findings)
    warned = sum(finding.level == "warning" for finding in findings)
    if "--json" in words:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        print("\n".join(f"{finding.level:<8} {finding.check}: {finding.text}" for finding in findings))
        print(f"{counted(errors, 'error')}, {counted(warned, 'warning')}")
    return 1 if errors else 0


# --- this machine ----------------------------------------------------------------------------------------------------


def machine() -> Iterator[Finding]:
    """Findings that need no recipe."""
    import torch

    from ...trainers.run.card import software

    optional = [f"{name} {version(name)}" for name in _OPTIONAL if find_spec(name.replace("-", "_"))]
    yield Finding("ok", "versions", ", ".join([software(), *optional]))
    driver = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    count = range(torch.cuda.device_count())
    gpus = [(torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in count]
    yield from devices(torch.__version__, torch.version.cuda or torch.version.hip, driver, gpus)
    if gpus:
        names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        yield allocator(",".join(os.environ[name] for name in names if name in os.environ))
    if find_spec("bitsandbytes") is not None:
        try:
            import bitsandbytes  # noqa: F401
        except Exception as error:  # whatever its native library raises would also end a run with a 4-bit base
            yield Finding("error", "bitsandbytes", f"cannot be imported: {type(error).__name__}: {error}")
    if Path("/dev/shm").is_dir() and shutil.disk_usage("/dev/shm").free < 2**30:  # a container's default is 64 MiB
        reason = "less than 1 GiB is free, and NCCL and data loaders use it: docker run --shm-size=8g"
        yield Finding("warning", "/dev/shm", reason)


def devices(build: str, cuda: str | None, driver: bool, gpus: Sequence[tuple[str, tuple]]) -> Iterator[Finding]:
    """Compare torch's build with an NVIDIA driver and the GPUs that torch sees.

    `build` is torch's version, `cuda` its CUDA version (`None` for a CPU build), `driver` whether a driver is
    installed, and `gpus` the `(name, compute capability)` of each GPU. GPUs are compared with bfloat16, TRL's default.
    """
    if driver and cuda is None:
        reason = f"this machine has an NVIDIA driver, but torch {build} is a build for CPUs: every run is on the CPU"
        yield Finding("error", "torch", f"{reason}: install the one for your CUDA version (pytorch.org/get-started)")
    elif driver and not gpus:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        reason = (
            f"torch {build} sees no GPU: the driver is older than CUDA {cuda}, or CUDA_VISIBLE_DEVICES={hidden!r} "
            "hides them"
        )
        yield Finding("error", "torch", reason)
    for name, capability in gpus:
        gpu = f"{name} (compute capability {capability[0]}.{capability[1]})"
        if capability >= (8, 0):
            yield Finding("ok", "hardware", gpu)
        else:
            reason = (
                "has no bfloat16, TRL's default, and emulates it slowly: set bf16: false and fp16: true in the "
                "recipe, and"
            )
            yield Finding("warning", "hardware", f"{gpu} {reason} mixed_precision: fp16 in the accelerate config")
    if not gpus:
        reason = f"no GPU: runs are on the CPU ({os.cpu_count()} threads); use_cpu: true, bf16: false"
        yield Finding("ok", "hardware", reason)


def allocator(setting: str) -> Finding:
    """The setting of torch's GPU allocator in the environment."""
    if "expandable_segments:True" in setting:
        return Finding("ok", "allocator", f"PYTORCH_ALLOC_CONF={setting}")
    reason = "batches differ in length, and torch's allocator keeps blocks of every size that it was asked for"
    remedy = "PYTORCH_ALLOC_CONF=expandable_segments:True lets it reuse them (not with vllm_enable_sleep_mode)"
    return Finding("ok", "allocator", f"{reason}: {remedy}")


# --- the run that words describe -------------------------------------------------------------------------------------


def launch_of(path: Path, processes: int | None) -> dict[str, str]:
    """The environment that accelerate makes of its config at `path` for each process, limited to the checked keys."""
    from ..recipe.keys import read_yaml

    config = read_yaml(path, "--accelerate_config")
    environment = {"WORLD_SIZE": str(processes or int(config.get("num_processes") or 1))}
    if config.get("distributed_type") == "FSDP":
        environment["ACCELERATE_USE_FSDP"] = "true"
        environment["FSDP_VERSION"] = "1"
        for key, value in (config.get("fsdp_config") or {}).items():
            environment[key.upper()] = str(value).lower() if isinstance(value, bool) else str(value)
    if config.get("distributed_type") == "DEEPSPEED":
        stage = (config.get("deepspeed_config") or {}).get("zero_stage", 2)
        environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = str(stage)
    return environment


def run(launcher: dict[str, str], rest: list[str]) -> Iterator[Finding]:
    """Every finding on the recipe and the fields in `rest`, with `launcher` as the launch's environment."""
    import torch
    from accelerate.utils import patch_environment
    from transformers.utils import logging

    logging.set_verbosity_error()
    num_processes = launcher.get("--num_processes")
    name, processes = default_config(num_processes)
    named_config = launcher.get("--accelerate_config") or launcher.get("--config_file")
    if named_config:
        name = named_config
        processes = int(num_processes or 0)  # if 0, the config's own number counts
    launch = launch_of(Path(name) if Path(name).is_file() else accelerate_config(name), processes)
    processes = int(launch["WORLD_SIZE"])
    try:
        script, config, model, of_parsing = _parsed(rest, processes)
    except UserError as error:
        yield Finding("error", "recipe", str(error))
        return
    yield from of_parsing
    yield Finding("ok", "recipe", f"{type(config).__name__}, {processes} process{'es' * (processes > 1)}")
    with patch_environment(**launch):
        yield from _of_launch(config, model, launch)
    findings = list(_of_recipe(script, config, model))
    train, of_data = _of_data(script, config, model)
    findings += of_data
    yield from findings
    if torch.cuda.is_available():
        yield from memory(rest, name, processes)
    if not {finding.check for finding in findings if finding.level == "error"} - {"output_dir"}:
        yield _rehearsed(script, config, model, train)


def memory(rest: Sequence[str], launch: str, processes: int, hardware: str | None = None) -> Iterator[Finding]:
    """Whether the run fits by its plan, and the next option if it does not; `hardware` is this machine's if absent."""
    from ..planning.plan import changes_that_fit, format_bytes, plan_recipe

    method = method_of(rest, [method for method in METHODS if not method.is_paired])
    try:
        plan = plan_recipe(rest, config_of(method), launch, hardware, processes, script=script_of(method))
    except UserError as error:
        yield Finding("warning", "memory", f"not planned: {error}")
        return
    needed = f"by its plan {plan.limiting} needs {format_bytes(plan.peak)} of {format_bytes(plan.capacity)} per rank"
    if plan.fits:
        yield Finding("ok", "memory", needed)
    else:
        lines = [f"set {line}" for line in changes_that_fit(plan)] if plan.enough_cards else []
        remedy = ", or ".join(lines) or "no single line makes it fit: trl-fsdp-qlora plan --solve has what does"
        yield Finding("warning", "memory", f"{needed}; {remedy}")
    if plan.host_warning:
        yield Finding("warning", "memory", plan.host_warning)


def _parsed(rest: Sequence[str], processes: int) -> tuple[Any, Any, Any, list[Finding]]:
    """(script, config, model, findings) as a launch in `processes` processes would parse them."""
    from trl import ModelConfig

    from ..recipe.arguments import ConfigError, ScriptArguments, parse_recipe
    from ..recipe.keys import read_yaml

    path = pop_options(rest, ("--config",))[0].get("--config")
    methods = [method for method in METHODS if not method.is_paired]
    refuse_other_trainers(path, methods)
    method = method_of(rest, methods)
    types = (ScriptArguments, config_of(method), ModelConfig)
    words = list(rest)
    if processes > 1:
        # Here this process is the only one, so whole groups are counted over more accumulation in place of ranks.
        names = ("--steps_per_generation", "--gradient_accumulation_steps")
        in_file = {f"--{name}": value for name, value in (read_yaml(path) if path else {}).items()}
        options = {**in_file, **pop_options(rest, names)[0]}
        name = next((name for name in names if options.get(name)), names[1])
        words += [name, str(processes * int(options.get(name) or 1))]
    try:
        return (*parse_recipe(types, words), [])
    except ConfigError as error:
        if "bf16/gpu" not in str(error):
            raise
    reason = (
        "bf16 is on (TRL's default), and this machine has no GPU that computes in it: set use_cpu: true and "
        "bf16: false"
    )
    finding = Finding("error", "recipe", f"{reason} to train here; what follows is checked as if they were set")
    return (*parse_recipe(types, [*words, "--use_cpu", "true", "--bf16", "false"]), [finding])


def _refused(check: str, ask: Callable, *words: Any) -> Iterator[Finding]:
    """The error that `ask` raises, as a finding."""
    try:
        ask(*words)
    except UserError as error:
        yield Finding("error", check, str(error))


def _of_launch(config: Any, model: Any, launch: dict[str, str]) -> Iterator[Finding]:
    from trl import get_quantization_config

    from ...compat.transformers import quantization_of
    from ...engines.vllm.sync_choice import choose_sync, warnings_for, why_own_base
    from ...fsdp2_qlora.launch_checks import check_launch, check_reference, is_fsdp_launch
    from ..recipe.checks import lora_config, read_config

    quantization = get_quantization_config(model)
    if quantization is None:  # the checkpoint may be stored quantized
        with contextlib.suppress(UserError):  # a model that is not there is a finding of its own
            config_of_model = read_config(model.model_name_or_path, model.model_revision)
            quantization = quantization_of(config_of_model)
    adapter = lora_config(model)
    zero_stage = int(launch.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", 0)) or None
    yield from _refused("launch", check_launch, quantization, zero_stage)
    yield from _refused("launch", check_reference, config.beta != 0.0 and adapter is None)
    if launch["WORLD_SIZE"] != "1" and config.device.type == "cpu" and not config.use_cpu:
        reason = f"{launch['WORLD_SIZE']} processes on this machine's CPU would each take themselves for the only one"
        yield Finding("error", "launch", f"{reason}: set use_cpu: true")
    # An adapter is gathered whatever the type. Of other weights transformers' `save_model` writes a full state dict
    # only.
    default = "SHARDED_STATE_DICT" if launch.get("FSDP_VERSION") == "2" else "FULL_STATE_DICT"
    kind = launch.get("FSDP_STATE_DICT_TYPE", default)
    if is_fsdp_launch() and adapter is None and "FULL" not in kind:
        reason = f"fsdp_state_dict_type: {kind} without an adapter: the trained model is not written at the run's end"
        yield Finding("error", "launch", f"{reason}. In the accelerate config set it to FULL_STATE_DICT")
    if config.use_vllm:
        try:
            sync = choose_sync(config, adapter, quantization is not None)
        except UserError as error:
            yield Finding("error", "vllm", str(error))
            return
        yield Finding("ok", "vllm", sync.describe())
        yield from _of_server(config, int(launch["WORLD_SIZE"]))
        with contextlib.suppress(UserError):  # as above
            yield from _of_cards(config, model)
        run = SimpleNamespace(**vars(config) | {"deepspeed_plugin": config.deepspeed_plugin})
        run.model_init_kwargs = {"dtype": model.dtype or "float32", **(config.model_init_kwargs or {})}
        try:
            own_base = why_own_base(run, sync, quantization, model.model_name_or_path)
        except UserError as error:
            yield Finding("error", "vllm", str(error))
            return
        one_base = "one copy of the base for trainer and engine"
        yield Finding("ok", "vllm", one_base if own_base is None else f"not {one_base}: {own_base}")
        for line in warnings_for(config, sync):
            yield Finding("warning", "vllm", line)


def _of_server(config: Any, processes: int) -> Iterator[Finding]:
    """A server on this machine needs cards of its own, and then both sides can work at once."""
    import torch

    from ..planning.split import server_is_here

    if config.vllm_mode != "server":
        return
    cards = torch.cuda.device_count()
    is_here = server_is_here(config.vllm_server_base_url, config.vllm_server_host)
    if is_here and cards and processes >= cards:
        reason = f"{processes} training process{'es' * (processes > 1)} on {cards} card{'s' * (cards > 1)} leave none"
        advice = f"--num_processes {cards // 2}" if cards > 1 else "vllm_mode: colocate"
        yield Finding("warning", "vllm", f"{reason} to the vLLM server on this machine: {advice} (docs/scaling.md)")
    if config.rollouts_ahead:
        text = "the server draws the next generation batch while this one is trained on: off-policy by one generation"
        yield Finding("ok", "vllm", text)
        if config.save_strategy == "steps" and config.save_steps == 1:
            yield Finding(
                "warning",
                "vllm",
                "save_steps=1 with rollouts_ahead: a checkpoint holds the batch in flight and waits for it, so the "
                "server idles in every step; save less often",
            )
    else:
        yield Finding(
            "ok", "vllm", "server and trainer wait for each other; rollouts_ahead: 1 makes both work at once"
        )


def _of_cards(config: Any, model: Any) -> Iterator[Finding]:
    """How this machine's cards are best split between a server that draws ahead and the trainer."""
    from ..planning.hardware import read_hardware
    from ..planning.settings import from_config
    from ..planning.split import draws_ahead_here, find_splits
    from ..recipe.checks import read_config

    settings = from_config(config, model)
    hardware = read_hardware(None, settings.launch.use_cpu)
    if not draws_ahead_here(settings) or not hardware.gpu or (hardware.cards or 1) < 2:
        return
    base = read_config(model.model_name_or_path, model.model_revision)
    splits = find_splits(settings, base, hardware, hardware.cards)
    split = splits.chosen
    if split is None:
        reason = f"no split of this machine's {hardware.cards} cards holds the server's base and divides the step"
        yield Finding("warning", "vllm", f"{reason} into whole micro-batches (trl-fsdp-qlora plan)")
        return
    text = f"{split.drawing} of this machine's {hardware.cards} cards to draw and {split.training} to train"
    if split.draw is not None:
        text += f": {split.ahead:.2f} s a step, {split.in_turns:.2f} s with rollouts_ahead: 0"
        if splits.colocated is not None:
            text += f", {splits.colocated.in_turns:.2f} s with vllm_mode: colocate"
        text += ", by an estimate"
    yield Finding("ok", "vllm", f"{text} (trl-fsdp-qlora plan has all splits)")


def _of_recipe(script: Any, config: Any, model: Any) -> Iterator[Finding]:
    from ...engines.vllm.sync_choice import low_adapter_rate
    from ...trainers.run.checkpoints import check_output_dir
    from ..recipe import checks
    from ..recipe.same_command import changed_arguments

    yield from _refused("training", checks.check_training, config, model)
    yield from _refused("rewards", checks.check_script, script)
    if config.output_dir and Path(config.output_dir).exists():  # the check would create a missing folder
        changed = changed_arguments(script, config, model)
        resume = "auto" if changed == [] else config.resume_from_checkpoint
        yield from _refused("output_dir", check_output_dir, config.output_dir, resume, changed or ())
    low = low_adapter_rate(config.learning_rate) if config.learning_rate > 0 else None
    if model.use_peft and not config.use_vllm and low is not None:  # with vLLM the line is among vLLM's warnings
        yield Finding("warning", "learning rate", low)
    if not model.use_peft and config.learning_rate > 1e-4:
        reason = (
            f"learning_rate={config.learning_rate:g} without an adapter: every weight is trained, which 1e-6 to "
            "1e-5 suit"
        )
        yield Finding("warning", "learning rate", f"{reason}; set use_peft: true for LoRA")
    try:
        tokenizer = checks.load_tokenizer(model.model_name_or_path, model.model_revision, script.chat)
        checks.check_model(model)
    except UserError as error:
        yield Finding("error", "model", str(error))
        return
    if tokenizer.pad_token_id is None:
        reason = f"{model.model_name_or_path!r} has no pad token, and TRL takes the end-of-sequence token for it"
        yield Finding("warning", "tokenizer", f"{reason}: give the tokenizer one of its own")


def _of_data(script: Any, config: Any, model: Any) -> tuple[Any, list[Finding]]:
    """The training data (`None` if it cannot be loaded), and the findings on the data and the rewards."""
    from ...trainers.run.input_checks import check_dataset
    from ..recipe.checks import load_tokenizer
    from ..recipe.problems import load_data
    from ..recipe.runner import reward_functions

    train = None
    tokenizer = None
    with contextlib.suppress(UserError):  # a model that is not there is a finding already
        tokenizer = load_tokenizer(model.model_name_or_path, model.model_revision, chat=False)
    findings = []
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            train, _ = load_data(script)
        check_dataset(train, config.generation_batch_size // config.num_generations)
        findings.append(Finding("ok", "data", printed.getvalue().strip().splitlines()[-1].removeprefix("data: ")))
        rewards: list[Callable] = []
        with contextlib.suppress(UserError):  # an unknown reward is a finding already
            rewards = reward_functions(script)
        findings += constant_rewards(rewards, train.select(range(min(8, len(train)))), tokenizer)
    except UserError as error:
        findings.append(Finding("error", "data", str(error)))
    except Exception as error:  # a user's own function raised it, and training would end in it
        reason = f"a reward failed on the first prompts: {type(error).__name__}: {error}"
        findings.append(Finding("error", "rewards", reason))
    return train, findings


def _rehearsed(script: Any, config: Any, model: Any, train: Any) -> Finding:
    """The result of one step of the run with a small random model."""
    from . import rehearsal

    try:
        with rehearsal.silence():
            line = rehearsal.one_step(script, config, model, train)
        return Finding("ok", "rehearsal", line)
    except Exception as error:  # training would end in any error of this step
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        return Finding("error", "rehearsal", f"a step of training ends in {reason[:600]}")


def _nothing(*_arguments: Any) -> None:
    """Takes what a reward logs."""


def constant_rewards(rewards: Sequence[Callable], rows: Any, tokenizer: Any = None) -> Iterator[Finding]:
    """Rewards that score all texts alike on `rows` of the data, the right answer in each known format among them.

    They get the arguments that TRL's trainer hands over. One that names `environments` judges episodes, not texts, and
    is left out. Without a `tokenizer` the bytes of a text are its ids.
    """
    from transformers import TrainerState

    of_trainer = {"trainer_state": TrainerState(), "log_extra": _nothing, "log_metric": _nothing}
    encode = str.encode if tokenizer is None else tokenizer.encode
    with_answer = ("so #### {}", "<reasoning>so</reasoning><answer>{}</answer>", "\\boxed{{{}}}", "{}")
    frames = (*with_answer, "", "I do not know.", "#### 123456789")
    for reward in rewards:
        if "environments" in inspect.signature(reward).parameters:
            continue
        name = name_of(reward)
        distinct = set()
        for row in rows:
            texts = [frame.format(row.get("answer", "")) for frame in frames]
            chat = not isinstance(row["prompt"], str)
            completions = [[{"role": "assistant", "content": text}] if chat else text for text in texts]
            columns = {key: [value] * len(texts) for key, value in row.items() if key != "prompt"}
            ids = [list(encode(text or " ")) for text in texts]  # a completion has a token at least
            values = reward(
                prompts=[row["prompt"]] * len(texts),
                completions=completions,
                completion_ids=ids,
                **{**columns, **of_trainer},
            )
            values = list(asyncio.run(values) if inspect.iscoroutine(values) else values)
            if len(values) != len(texts):
                reason = f"{name} returned {len(values)} values for {len(texts)} completions; it must return one each"
                yield Finding("error", "rewards", reason)
                break
            distinct.update(values)
        if len(distinct) == 1:
            reason = (
                f"{name} gives {distinct.pop()} to every text tried on the first {len(rows)} prompts, the right "
                "answer among them: with equal rewards nothing is learned; look at answer_format, and at the column "
                "`answer`"
            )
            yield Finding("warning", "rewards", reason)
