"""usage: trl-fsdp-qlora doctor [--config FILE.yaml] [--accelerate_config NAME] [--num_processes N] [any field]

Lists what would fail, or silently do the wrong thing, before it does. Looks at this machine and at what is installed;
with --config (or fields) also at the run that they describe: the first thing that its own command would refuse before
it reads data, and the accelerate config against the model. No GPU is needed and no weight is loaded. The exit status
is 1 if there is an error. `--max_steps 1` of the run's own command is its rehearsal.
"""

import contextlib
import itertools
import os
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...errors import UserError
from ...utils.plain import counted
from ..run.one_line import pop_options
from .scripts import LAUNCHER, PLANNED, config_of, default_config, method_of, script_of, with_recipe

if TYPE_CHECKING:
    from transformers import TrainingArguments
    from trl import ModelConfig

    from ..recipe.arguments import ScriptArguments

_OPTIONAL = ("bitsandbytes", "deepspeed", "vllm", "math-verify")
_LEVELS = ("error", "warning", "ok")


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
            findings += machine_findings()
            findings += recipe_findings(launcher, rest) if rest else ()
    except ImportError as error:  # the package refuses the installed versions: the findings so far have the reason
        findings.append(Finding("error", "imports", str(error)))
    for level in _LEVELS:
        for finding in findings:
            if finding.level == level:
                text = " ".join(finding.text.split())
                print(f"{level:<8} {finding.check}: {text}")
    levels = [finding.level for finding in findings]
    errors = levels.count("error")
    warned = levels.count("warning")
    print(f"{counted(errors, 'error')}, {counted(warned, 'warning')}")
    return 1 if errors else 0


def machine_findings() -> Iterator[Finding]:
    """Findings that need no recipe."""
    import torch

    from ...trainers.reporting.card import software

    installed = [software()]
    for name in _OPTIONAL:
        module = name.replace("-", "_")
        if find_spec(module):
            installed.append(f"{name} {version(name)}")
    yield Finding("ok", "versions", ", ".join(installed))
    driver = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    numbers = range(torch.cuda.device_count())
    gpus = []
    for number in numbers:
        name = torch.cuda.get_device_name(number)
        capability = torch.cuda.get_device_capability(number)
        gpus.append((name, capability))
    yield from devices(torch.__version__, torch.version.cuda or torch.version.hip, driver, gpus)
    if gpus:
        pairs = itertools.permutations(numbers, 2)
        apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
        toolkit = shutil.which("nvcc")
        compiler = shutil.which("cc") or shutil.which("gcc")
        yield from surroundings(toolkit, compiler, apart)
    if find_spec("bitsandbytes") is not None:
        try:
            import bitsandbytes  # noqa: F401
        except Exception as error:  # an error of its native library would also end a run with a 4-bit base
            reason = f"{type(error).__name__}: {error}"
            yield Finding("error", "bitsandbytes", f"cannot be imported: {reason}")
    shared_memory = Path("/dev/shm")
    if shared_memory.is_dir() and shutil.disk_usage(shared_memory).free < 2**30:  # a container's default is 64 MiB
        reason = "less than 1 GiB is free, and NCCL, data loaders and vLLM's workers use it: docker run --shm-size=8g"
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
        major, minor = capability
        gpu = f"{name} (compute capability {major}.{minor})"
        if capability >= (8, 0):
            yield Finding("ok", "hardware", gpu)
        else:
            reason = f"{gpu} has no bfloat16, TRL's default, and emulates it slowly: set bf16: false and fp16: true"
            yield Finding("warning", "hardware", f"{reason} in the recipe, mixed_precision: fp16 for accelerate")
    if not gpus:
        threads = os.cpu_count()
        reason = f"no GPU: runs are on the CPU ({threads} threads); use_cpu: true, bf16: false"
        yield Finding("ok", "hardware", reason)


def surroundings(toolkit: str | None, compiler: str | None, apart: Sequence[tuple[int, int]]) -> Iterator[Finding]:
    """What a machine with a GPU lacks, and what follows.

    `toolkit` and `compiler` are the paths of nvcc and of a C compiler, `apart` the pairs of GPUs without peer access.
    """
    if toolkit is None:
        reason = "no nvcc: nothing here needs it; DeepSpeed's offload to the CPU and flash-attn build kernels with it"
        yield Finding("ok", "CUDA toolkit", reason)
    if compiler is None:
        reason = "no cc or gcc, with which Triton builds the launcher of each kernel: apt-get install gcc"
        yield Finding("warning", "C compiler", reason)
    if apart:
        pairs = [f"{first} and {second}" for first, second in apart if first < second]
        gpus = ", ".join(pairs)
        reason = f"GPUs {gpus} reach each other through the host's memory only"
        advice = "ddp, which moves adapters alone, loses less by it than fsdp2 and zero3, which gather the weights"
        yield Finding("warning", "peer access", f"{reason}: {advice}")


def recipe_findings(launcher: dict[str, str], rest: list[str]) -> Iterator[Finding]:
    """What the run's own command would refuse first, with the fields in `rest` and the options `launcher`."""
    from transformers.utils import logging

    from ...compat.trl_rollouts import with_response_schema
    from ...engines.decode.history import NOT_AS_SERVED, strips_thinking
    from ..planning.launches import read_launch
    from ..recipe.checks import check_recipe

    logging.set_verbosity_error()
    num_processes = launcher.get("--num_processes")
    name, processes = default_config(num_processes)
    named_config = launcher.get("--accelerate_config") or launcher.get("--config_file")
    if named_config:
        name = named_config
        processes = int(num_processes or 0)  # if 0, the config's own number counts
    try:
        launch = read_launch(name, processes or None)
        script, config, model = _parsed(rest, launch.processes)
        wrapped = launch.units if isinstance(launch.units, tuple) else ()
        recipe = check_recipe(script, config, model, wrapped)
        has_tools = bool(script.tools or script.environment)
        if has_tools and vars(config).get("history") == "append":
            tokenizer = with_response_schema(recipe.tokenizer)
            if strips_thinking(tokenizer):
                yield Finding("warning", "history", NOT_AS_SERVED)
        class_name = type(config).__name__
        plural = "es" if launch.processes > 1 else ""
        yield Finding("ok", "recipe", f"{class_name}, {launch.processes} process{plural}")
    except UserError as error:
        yield Finding("error", "recipe", str(error))


def _parsed(rest: Sequence[str], processes: int) -> "tuple[ScriptArguments, TrainingArguments, ModelConfig]":
    """(script, config, model) as a launch in `processes` processes would parse them."""
    from trl import ModelConfig

    from ..recipe.arguments import parse_recipe

    method = method_of(rest, PLANNED)
    types = (script_of(method), config_of(method), ModelConfig)
    words = list(rest)
    if processes > 1:
        # Here this process is the only one, so whole groups are counted over more accumulation in place of ranks.
        name, steps = _accumulation(rest)
        words += [name, str(processes * steps)]
    return parse_recipe(types, words)


def _accumulation(rest: Sequence[str]) -> tuple[str, int]:
    """The option for the number of micro-batches over which groups are whole, and its value in a run's words."""
    from ..recipe.keys import read_yaml

    names = ("steps_per_generation", "gradient_accumulation_steps")
    options, _ = pop_options(rest, ("--config", *(f"--{name}" for name in names)))
    path = options.get("--config")
    in_file = read_yaml(path) if path else {}
    for name in names:
        option = f"--{name}"
        steps = options.get(option, in_file.get(name))
        if steps:
            return option, int(steps)
    return "--gradient_accumulation_steps", 1
