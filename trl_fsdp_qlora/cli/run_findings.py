"""What `doctor` says of a recipe with an accelerate config: every check that a run makes before it loads weights, and more.

The conditions are those of the run itself (`recipe/checks.py`, `fsdp2_qlora/launch_checks.py`, `rollout/sync_choice.py`);
here each is asked by itself, so that one finding does not hide the next.
"""

import asyncio
import contextlib
import inspect
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from accelerate.utils import patch_environment
from huggingface_hub import constants
from trl import ModelConfig, get_quantization_config

from .. import AStarPOConfig, EfficientGRPOConfig, TSPMOConfig
from ..checkpoints.checkpoints import check_output_dir
from ..fsdp2_qlora.launch_checks import check_launch, check_reference, is_fsdp_launch
from ..recipe import checks
from ..recipe.arguments import ConfigError, ScriptArguments, parse_recipe, read_yaml
from ..recipe.data import load_data
from ..recipe.files import SUFFIXES
from ..recipe.reasoning_gym import is_generated
from ..recipe.runner import reward_functions
from ..recipe.script import USER_ERRORS
from ..recipe.small_tasks import TASKS
from ..rollout.adapter_sync import RolloutError
from ..rollout.sync_choice import choose_sync, low_adapter_rate, warnings_for
from ..run.hub import asked_once
from ..run.input_checks import RewardError, check_dataset, guard_reward
from ..run.own_code import is_import_path
from .environment import Finding, port_taken

REFUSALS = (*USER_ERRORS, RolloutError, ValueError, OSError)
_METHODS = (EfficientGRPOConfig, TSPMOConfig, AStarPOConfig)
_DEFAULT_PORT = 29500
_PROMPTS = 8


class LaunchEnvironment(NamedTuple):
    """What an accelerate config makes of a launch."""

    environment: dict[str, str]
    processes: int
    zero_stage: int | None
    port: int


def launch_environment(path: Path, processes: int | None) -> LaunchEnvironment:
    """The environment that `accelerate launch` gives its processes, as far as checks read it.

    Args:
        path: of the accelerate config.
        processes: `--num_processes`, where it is given.

    Raises:
        ConfigError: the file is no YAML mapping.
    """
    config = read_yaml(path, "--accelerate_config")
    processes = processes or int(config.get("num_processes") or 1)
    environment = {"WORLD_SIZE": str(processes)}
    if config.get("distributed_type") == "FSDP":
        environment["ACCELERATE_USE_FSDP"] = "true"
        for key, value in (config.get("fsdp_config") or {}).items():
            environment[key.upper()] = str(value).lower() if isinstance(value, bool) else str(value)
        environment.setdefault("FSDP_VERSION", "1")
    stage = (config.get("deepspeed_config") or {}).get("zero_stage")
    deepspeed = config.get("distributed_type") == "DEEPSPEED"
    port = int(config.get("main_process_port") or _DEFAULT_PORT)
    return LaunchEnvironment(environment, processes, int(stage) if deepspeed and stage is not None else None, port)


def run_findings(words: Sequence[str], config_path: Path | None, launch: LaunchEnvironment) -> Iterator[Finding]:
    """Every finding on the recipe in `config_path` with the fields in `words`, launched as `launch` says."""
    try:
        method = method_of(words, config_path)
        script, config, model, here = _parsed(method, words, config_path, launch.processes)
    except ConfigError as error:
        yield Finding("error", "recipe", str(error))
        return
    yield from here
    yield Finding("ok", "recipe", f"{method.__name__}, {launch.processes} process{'es' * (launch.processes > 1)}")
    with patch_environment(**launch.environment):
        yield from _launch_findings(config, model, launch)
        yield from _vllm_findings(config, model)
    yield from _refused("training", lambda: checks.check_training(config, model))
    yield from _refused("rewards", lambda: checks.check_script(script))
    yield from _refused("output_dir", lambda: check_output_dir(config.output_dir, config.resume_from_checkpoint))
    yield from _adapter_findings(config, model)
    with asked_once(_asked_of_the_hub(script, model)) as reason:
        if reason is not None:
            yield Finding(
                "warning",
                "network",
                f"{constants.ENDPOINT} does not answer ({reason}), so models and data are looked for on this machine alone: "
                "give folders and files, or fill the cache where there is a network",
            )
        yield from _model_findings(script, model)
        yield from _data_findings(script, config)


def _asked_of_the_hub(script: ScriptArguments, model: ModelConfig) -> list[str | None]:
    """What a run with these arguments might ask the Hub for."""
    data = [name for name in (script.dataset, script.eval_dataset) if name and not is_import_path(name)]
    data = [
        name for name in data if not is_generated(name) and name not in TASKS and Path(name).suffix not in SUFFIXES
    ]
    return [model.model_name_or_path, *data]


def _refused(check: str, ask: Callable[[], Any]) -> Iterator[Finding]:
    """What `ask` refuses, as a finding."""
    try:
        ask()
    except REFUSALS as error:
        yield Finding("error", check, str(error))


def method_of(words: Sequence[str], config_path: Path | None) -> type:
    """The config class that has every field which is used, GRPO's where none has.

    Raises:
        ConfigError: the file cannot be read.
    """
    used = {word.partition("=")[0].removeprefix("--") for word in words if word.startswith("--")}
    used |= set(read_yaml(config_path)) if config_path else set()
    known = {item.name for cls in (ScriptArguments, ModelConfig) for item in fields(cls)} | {"env", "stage"}
    for method in _METHODS:
        if used <= known | {item.name for item in fields(method)}:
            return method
    return EfficientGRPOConfig


def _parsed(method: type, words: Sequence[str], config_path: Path | None, processes: int):
    """(script, config, model, findings) as a launch in `processes` processes would parse them."""
    argv = [*(["--config", str(config_path)] if config_path else []), *words]
    given = {**(read_yaml(config_path) if config_path else {})}
    given |= {w.removeprefix("--"): v for w, v in pairwise(words) if w.startswith("--")}
    # This process is the only one: whole groups are counted over all of them by as many times the accumulation.
    name = "steps_per_generation" if given.get("steps_per_generation") else "gradient_accumulation_steps"
    steps = str(given.get(name) or getattr(method, name) or 1)
    scaled = [*argv, f"--{name}", str(int(steps) * processes)] if steps.isdigit() and processes > 1 else argv
    types = (ScriptArguments, method, ModelConfig)
    try:
        return (*parse_recipe(types, scaled), [])
    except ConfigError as error:
        if "bf16/gpu" not in str(error):
            raise
    found = Finding(
        "error",
        "recipe",
        "bf16 is on (TRL's default), and this machine has no GPU that computes in it: set use_cpu: true and bf16: false to "
        "train here; what follows is checked as if they were set",
    )
    return (*parse_recipe(types, [*scaled, "--use_cpu", "true", "--bf16", "false"]), [found])


def _launch_findings(config: Any, model: ModelConfig, launch: LaunchEnvironment) -> Iterator[Finding]:
    quantization = get_quantization_config(model)
    adapter = checks.lora_config(model)
    yield from _refused("launch", lambda: check_launch(quantization, adapter, launch.zero_stage))
    yield from _refused("launch", lambda: check_reference(config.beta != 0.0 and adapter is None))
    if launch.processes > 1 and config.device.type == "cpu" and not config.use_cpu:
        yield Finding(
            "error",
            "launch",
            f"{launch.processes} processes on this machine's CPU would each take themselves for the only one: set use_cpu: true",
        )
    if is_fsdp_launch() and "FULL" in launch.environment.get("FSDP_STATE_DICT_TYPE", ""):
        yield Finding(
            "warning",
            "launch",
            "fsdp_state_dict_type: FULL_STATE_DICT gathers every weight on rank 0 for each checkpoint. In the accelerate "
            "config set `fsdp_state_dict_type: SHARDED_STATE_DICT`",
        )
    if launch.processes > 1 and port_taken(launch.port):
        yield Finding(
            "error",
            "launch",
            f"port {launch.port}, where the processes meet, is taken on this machine: --main_process_port with another one",
        )


def _vllm_findings(config: Any, model: ModelConfig) -> Iterator[Finding]:
    quantized = get_quantization_config(model) is not None
    try:
        sync = choose_sync(config, checks.lora_config(model), quantized)
    except REFUSALS as error:
        yield Finding("error", "vllm", str(error))
        return
    if sync.mode == "off":
        return
    yield Finding("ok", "vllm", sync.describe())
    for line in warnings_for(config, sync):
        yield Finding("warning", "vllm", line)
    yield from _refused("vllm", lambda: checks.check_installed("vllm", "use_vllm: true"))


def _adapter_findings(config: Any, model: ModelConfig) -> Iterator[Finding]:
    low = low_adapter_rate(config.learning_rate)
    if model.use_peft and not config.use_vllm and config.learning_rate > 0 and low is not None:
        yield Finding("warning", "learning rate", low)
    if not model.use_peft and config.learning_rate > 1e-4:
        yield Finding(
            "warning",
            "learning rate",
            f"learning_rate={config.learning_rate:g} without an adapter: every weight is trained, which 1e-6 to 1e-5 suit; "
            "set use_peft: true for LoRA",
        )


def _model_findings(script: ScriptArguments, model: ModelConfig) -> Iterator[Finding]:
    name = model.model_name_or_path
    try:
        tokenizer = checks.load_tokenizer(name, model.model_revision, script.chat)
        checks.check_skeleton(model)
    except REFUSALS as error:
        yield Finding("error", "model", str(error))
        return
    if tokenizer.pad_token_id is None:
        yield Finding(
            "warning",
            "tokenizer",
            f"{name!r} has no pad token, and TRL takes the end-of-sequence token for it: give the tokenizer one of its own "
            "(tokenizer.pad_token = ..., save_pretrained)",
        )
    elif tokenizer.pad_token_id == tokenizer.eos_token_id:
        yield Finding(
            "ok", "tokenizer", "the pad token is the end-of-sequence token; completions are cut at the first one"
        )


def _data_findings(script: ScriptArguments, config: Any) -> Iterator[Finding]:
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            train, _ = load_data(script)
        check_dataset(train, config.generation_batch_size // config.num_generations)
        first = train.select(range(min(_PROMPTS, len(train))))
        yield Finding("ok", "data", said.getvalue().strip().splitlines()[-1].removeprefix("data: "))
        rewards: list[Callable] = []
        with contextlib.suppress(ValueError):  # an unknown reward is a finding already
            rewards = reward_functions(script)
        yield from constant_rewards(rewards, first)
    except RewardError as error:
        yield Finding("error", "rewards", str(error))
    except REFUSALS as error:
        yield Finding("error", "data", str(error))
    except Exception as error:  # of a reward of the user's own, which training would end in
        yield Finding("error", "rewards", f"a reward failed on the first prompts: {type(error).__name__}: {error}")


def constant_rewards(rewards: Sequence[Callable], rows: Any) -> Iterator[Finding]:
    """Rewards that give every text the same on the first prompts, the right answer in each known place among them.

    Args:
        rewards: of the recipe.
        rows: prompts with the columns that rewards get.
    """
    chat = not isinstance(rows[0]["prompt"], str)
    for reward in rewards:
        name = getattr(reward, "__name__", type(reward).__name__)
        guarded = guard_reward(reward)  # as the trainer calls it
        seen: set[float | None] = set()
        for row in rows:
            texts = _texts(str(row.get("answer", "")))
            completions = [[{"role": "assistant", "content": text}] if chat else text for text in texts]
            columns = {key: [value] * len(texts) for key, value in row.items() if key != "prompt"}
            values = guarded(prompts=[row["prompt"]] * len(texts), completions=completions, **columns)
            seen |= set(asyncio.run(values) if inspect.iscoroutine(values) else values)
        if len(seen) == 1:
            yield Finding(
                "warning",
                "rewards",
                f"{name} gives {seen.pop()} to every text tried on the first {len(rows)} prompts, the right answer among "
                "them: with equal rewards nothing is learned; look at answer_format, and at the column `answer`",
            )


def _texts(answer: str) -> list[str]:
    right = [
        f"so #### {answer}",
        f"<reasoning>so</reasoning><answer>{answer}</answer>",
        f"\\boxed{{{answer}}}",
        answer,
    ]
    return [*right, "", "I do not know.", "#### 123456789"]
