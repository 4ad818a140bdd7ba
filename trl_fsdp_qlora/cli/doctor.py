"""`trl-fsdp-qlora doctor`: what would fail, or silently do the wrong thing, before it does."""

import contextlib
import json
import sys
import warnings
from pathlib import Path

from ..run.accelerate_configs import accelerate_config
from ..run.one_line import refuse_misspelled
from ..run.redaction import redact
from .environment import Finding, environment_findings
from .scripts import LAUNCHER, default_config, with_recipe
from .words import refuse, take

_HELP = """usage: trl-fsdp-qlora doctor [--config FILE.yaml] [--accelerate_config NAME] [--num_processes N] [--json] [any field]

Looks at this machine and at what is installed; with --config (or fields) also at the run that they describe: the accelerate
config against the model, vLLM, the adapter, the tokenizer, the data and the rewards. No GPU is needed and no weight is loaded.
The exit status is 1 where there is an error."""


def doctor(words: list[str]) -> int:
    """Print the findings, worst first; returns 1 where one is an error."""
    if {"--help", "-h"} & set(words):
        print(_HELP)
        return 0
    as_json = "--json" in words
    warnings.simplefilter("ignore")  # libraries about each other: the findings are what is asked for
    try:
        launcher, rest = take([word for word in words if word != "--json"], LAUNCHER)
        refuse_misspelled(rest, ("--json",))
        rest = with_recipe(rest)
        with contextlib.redirect_stdout(sys.stderr):  # what libraries log when they are imported is no finding
            found = list(environment_findings())
            if rest:
                found += _of_run(launcher, rest)
    except ValueError as error:
        return refuse(str(error))
    except ImportError as error:  # a stack that the package refuses: what was found of it says why
        found.append(Finding("error", "imports", str(error)))
    found = [Finding(level, check, " ".join(redact(text).split())) for level, check, text in found]
    print(json.dumps([item._asdict() for item in found], indent=2) if as_json else shown(found))
    return 1 if any(item.level == "error" for item in found) else 0


def _of_run(launcher: dict[str, str], rest: list[str]) -> list[Finding]:
    from transformers.utils import logging

    from .run_findings import launch_environment, run_findings

    logging.set_verbosity_error()
    taken, fields = take(rest, ("--config",))
    asked = launcher.get("--num_processes")
    name = launcher.get("--accelerate_config") or launcher.get("--config_file")
    default, processes = default_config(asked)
    if name is None:
        name = default
    else:
        processes = int(asked) if asked else None
    path = Path(name) if Path(name).is_file() else accelerate_config(name)
    launch = launch_environment(path, processes)
    if "--main_process_port" in launcher:
        launch = launch._replace(port=_port(launcher["--main_process_port"]))
    return list(run_findings(fields, Path(taken["--config"]) if taken else None, launch))


def _port(given: str) -> int:
    if not given.isdigit() or not 0 < int(given) < 2**16:
        raise ValueError(f"--main_process_port {given} is no port; 29500, say")
    return int(given)


def shown(found: list[Finding]) -> str:
    """The findings as lines, worst first, and their count."""
    order = ("error", "warning", "ok")
    lines = [f"{item.level:<8} {item.check}: {item.text}" for level in order for item in found if item.level == level]
    count = {level: sum(item.level == level for item in found) for level in order}
    errors = f"{count['error']} error{'s' * (count['error'] != 1)}"
    return "\n".join([*lines, f"{errors}, {count['warning']} warning{'s' * (count['warning'] != 1)}"])
