"""usage: trl-fsdp-qlora doctor [--config FILE.yaml] [--accelerate_config NAME] [--num_processes N] [any field]

Lists what would fail, or silently do the wrong thing, before it does. Looks at this machine and at what is installed;
with --config (or fields) also at the run that they describe: the accelerate config against the model, vLLM, the
adapter, the tokenizer, the rewards. No GPU is needed and no weight is loaded. `--max_steps 1` of the run's own command
is its rehearsal. The exit status is 1 if there is an error.
"""

# The checks of a run are the run's own (`recipe/checks.py`, `fsdp2_qlora/launch_checks.py`, `vllm/sync_choice.py`).
# Each is called by itself, so that one finding does not hide the next.

import contextlib
import json
import os
import shutil
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ...errors import UserError
from ...trainers.methods import METHODS
from ...utils.plain import counted
from ...utils.resources import accelerate_config
from ..run.one_line import pop_options
from .scripts import (
    LAUNCHER,
    config_of,
    default_config,
    method_of,
    refuse_other_trainers,
    script_of,
    with_recipe,
)

_OPTIONAL = ("bitsandbytes", "deepspeed", "vllm", "math-verify")
_LEVELS = ("error", "warning", "ok")
_FREE = 5 * 2**30  # bytes that a run's folder should have; checkpoints of an adapter fit


class Finding(NamedTuple):
    """A result of a check: error, warning or ok; `text` has the value, the reason and the line to change."""

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
        launcher, rest = pop_options(words, LAUNCHER)
        rest = with_recipe(rest)
        with contextlib.redirect_stdout(sys.stderr):  # messages that libraries log on import are no findings
            findings += machine()
            findings += run(launcher, rest) if rest else ()
    except ImportError as error:  # the package refuses the installed versions: the findings so far have the reason
        findings.append(Finding("error", "imports", str(error)))
    findings.sort(key=lambda finding: _LEVELS.index(finding.level))
    for finding in findings:
        print(f"{finding.level:<8} {finding.check}: {' '.join(finding.text.split())}")
    errors, warned = (sum(finding.level == level for finding in findings) for level in _LEVELS[:2])
    print(f"{counted(errors, 'error')}, {counted(warned, 'warning')}")
    return 1 if errors else 0


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
    if find_spec("bitsandbytes") is not None:
        try:
            import bitsandbytes  # noqa: F401
        except Exception as error:  # an error of its native library would also end a run with a 4-bit base
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
        reason = f"the driver is older than CUDA {cuda}, or CUDA_VISIBLE_DEVICES={hidden!r} hides them"
        yield Finding("error", "torch", f"torch {build} sees no GPU: {reason}")
    for name, capability in gpus:
        gpu = f"{name} (compute capability {capability[0]}.{capability[1]})"
        if capability >= (8, 0):
            yield Finding("ok", "hardware", gpu)
        else:
            reason = f"{gpu} has no bfloat16, TRL's default, and emulates it slowly: set bf16: false and fp16: true"
            yield Finding("warning", "hardware", f"{reason} in the recipe, mixed_precision: fp16 for accelerate")
    if not gpus:
        reason = f"no GPU: runs are on the CPU ({os.cpu_count()} threads); use_cpu: true, bf16: false"
        yield Finding("ok", "hardware", reason)


def launch_of(path: Path, processes: int | None) -> dict[str, str]:
    """The environment that accelerate makes of its config at `path` for each process, limited to the checked keys.

    Raises:
        UserError: the config cannot be read, or names a file that is not there.
    """
    from accelerate.commands.config.config_args import load_config_from_file

    try:
        config = load_config_from_file(str(path))
        environment = {"WORLD_SIZE": str(processes or config.num_processes or 1)}
        if config.distributed_type == "FSDP":
            environment |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}
            for key, value in config.fsdp_config.items():
                environment[key.upper()] = str(value).lower() if isinstance(value, bool) else str(value)
        if config.distributed_type == "DEEPSPEED":
            stage = config.deepspeed_config.get("zero_stage", 2)
            file = config.deepspeed_config.get("deepspeed_config_file")
            if file:
                stage = json.loads(Path(file).read_text(encoding="utf-8"))["zero_optimization"]["stage"]
            environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = str(stage)
    except Exception as error:  # of YAML, JSON and accelerate's own classes; the launch would raise it, too
        raise UserError(f"--accelerate_config {path}: {type(error).__name__}: {error}") from error
    return environment


def run(launcher: dict[str, str], rest: list[str]) -> Iterator[Finding]:
    """Every finding on the recipe and the fields in `rest`, with `launcher` as the launch's environment."""
    from accelerate.utils import patch_environment
    from transformers.utils import logging

    logging.set_verbosity_error()
    num_processes = launcher.get("--num_processes")
    name, processes = default_config(num_processes)
    named_config = launcher.get("--accelerate_config") or launcher.get("--config_file")
    if named_config:
        name = named_config
        processes = int(num_processes or 0)  # if 0, the config's own number counts
    try:
        launch = launch_of(Path(name) if Path(name).is_file() else accelerate_config(name), processes)
        processes = int(launch["WORLD_SIZE"])
        script, config, model = _parsed(rest, processes)
    except UserError as error:
        yield Finding("error", "recipe", str(error))
        return
    yield Finding("ok", "recipe", f"{type(config).__name__}, {processes} process{'es' * (processes > 1)}")
    with patch_environment(**launch):
        yield from _of_launch(config, model, launch)
    yield from _of_recipe(script, config, model)


def _parsed(rest: Sequence[str], processes: int) -> tuple[Any, Any, Any]:
    """(script, config, model) as a launch in `processes` processes would parse them."""
    from trl import ModelConfig

    from ..recipe.arguments import parse_recipe
    from ..recipe.keys import read_yaml

    path = pop_options(rest, ("--config",))[0].get("--config")
    methods = [method for method in METHODS if not method.is_paired]
    refuse_other_trainers(path, methods)
    method = method_of(rest, methods)
    words = list(rest)
    if processes > 1:
        # Here this process is the only one, so whole groups are counted over more accumulation in place of ranks.
        names = ("--steps_per_generation", "--gradient_accumulation_steps")
        in_file = {f"--{name}": value for name, value in (read_yaml(path) if path else {}).items()}
        options = {**in_file, **pop_options(rest, names)[0]}
        name = next((name for name in names if options.get(name)), names[1])
        words += [name, str(processes * int(options.get(name) or 1))]
    return parse_recipe((script_of(method), config_of(method), ModelConfig), words)


def _refused(check: str, ask: Callable, *words: Any) -> Iterator[Finding]:
    """The error that `ask` raises, as a finding."""
    try:
        ask(*words)
    except UserError as error:
        yield Finding("error", check, str(error))


def _of_launch(config: Any, model: Any, launch: dict[str, str]) -> Iterator[Finding]:
    from trl import GRPOConfig, get_quantization_config

    from ...compat.transformers import quantization_of
    from ...engines.vllm.sync_choice import choose_sync, warnings_for
    from ...fsdp2_qlora.launch_checks import check_launch, check_reference, is_fsdp_launch
    from ..recipe.checks import lora_config, read_config

    quantization = get_quantization_config(model)
    if quantization is None:  # the checkpoint may be stored quantized
        with contextlib.suppress(UserError):  # a model that is not there is a finding of its own
            quantization = quantization_of(read_config(model.model_name_or_path, model.model_revision))
    adapter = lora_config(model)
    zero_stage = int(launch.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", 0)) or None
    yield from _refused("launch", check_launch, quantization, zero_stage)
    yield from _refused("launch", check_reference, config.beta != 0.0 and adapter is None)
    if isinstance(config, GRPOConfig) and getattr(adapter, "r", 0) >= 64:
        reason = f"lora_r: {adapter.r} under GRPO: in a published sweep ranks of 64 and more lost all accuracy"
        yield Finding("warning", "adapter", f"{reason} (openreview.net/forum?id=XGZHI14m8P); 8 to 32 are usual")
    if launch["WORLD_SIZE"] != "1" and config.device.type == "cpu" and not config.use_cpu:
        reason = f"{launch['WORLD_SIZE']} processes on this machine's CPU would not know of each other"
        yield Finding("error", "launch", f"{reason}: set use_cpu: true")
    # An adapter is gathered with any type. Transformers' `save_model` writes other weights only as a full state
    # dict.
    default = "SHARDED_STATE_DICT" if launch.get("FSDP_VERSION") == "2" else "FULL_STATE_DICT"
    kind = launch.get("FSDP_STATE_DICT_TYPE", default)
    if is_fsdp_launch() and adapter is None and "FULL" not in kind:
        reason = f"fsdp_state_dict_type: {kind} without an adapter: the trained model is not written at the run's end"
        yield Finding("error", "launch", f"{reason}. In the accelerate config set it to FULL_STATE_DICT")
    if not config.use_vllm:
        return
    try:
        sync = choose_sync(config, adapter, quantization is not None)
    except UserError as error:
        yield Finding("error", "vllm", str(error))
        return
    yield Finding("ok", "vllm", sync.describe())
    for line in warnings_for(config, sync):
        yield Finding("warning", "vllm", line)
    if config.vllm_mode == "server":
        url = urlsplit(config.vllm_server_base_url or f"http://{config.vllm_server_host}:{config.vllm_server_port}")
        try:
            socket.create_connection((url.hostname, url.port or 80), timeout=2).close()
        except OSError as error:
            reason = f"no server answers at {url.netloc} ({error}): start it before the run"
            yield Finding("warning", "vllm", f"{reason}; it is waited for for {config.vllm_server_timeout:g} s")


def _of_recipe(script: Any, config: Any, model: Any) -> Iterator[Finding]:
    from ...engines.vllm.sync_choice import low_adapter_rate
    from ..recipe import checks

    yield from _refused("training", checks.check_training, config, model)
    yield from _refused("rewards", checks.check_script, script)
    folder = next(
        path
        for path in (Path(config.output_dir).absolute(), *Path(config.output_dir).absolute().parents)
        if path.exists()
    )
    if shutil.disk_usage(folder).free < _FREE:
        yield Finding("warning", "disk", f"less than {_FREE >> 30} GiB is free under {folder}, for output_dir")
    low = low_adapter_rate(config.learning_rate) if config.learning_rate > 0 else None
    if model.use_peft and not config.use_vllm and low is not None:  # with vLLM the line is among vLLM's warnings
        yield Finding("warning", "learning rate", low)
    try:
        tokenizer = checks.load_tokenizer(model.model_name_or_path, model.model_revision, script.chat)
        checks.check_model(model)
    except UserError as error:
        yield Finding("error", "model", str(error))
        return
    if tokenizer.pad_token_id is None:
        reason = f"{model.model_name_or_path!r} has no pad token, and TRL takes the end-of-sequence token for it"
        yield Finding("warning", "tokenizer", f"{reason}: give the tokenizer one of its own")
