"""The command that a run was started with, as its user typed it, and the one that goes on with it."""

import shlex
import sys
from pathlib import Path

import psutil

_LAUNCHERS = {name: [name] for name in ("accelerate", "torchrun", "deepspeed", "trl-fsdp-qlora")}
_MODULES = {
    "accelerate.commands.launch": ["accelerate", "launch"],
    "torch.distributed.run": ["torchrun"],
    "trl_fsdp_qlora": ["trl-fsdp-qlora"],
}


def launch_words() -> list[str]:
    """The words of the command that started this run, the launcher's own (`--config_file`) among them.

    A launcher tells its processes nothing of how it was called, so the processes above this one are asked.
    """
    try:
        for process in psutil.Process().parents():
            words = process.cmdline()
            for place, word in enumerate(words[:3]):  # the interpreter and `-m` may stand before it
                plain = _MODULES.get(word) if place and words[place - 1] == "-m" else _LAUNCHERS.get(Path(word).name)
                if plain is not None:
                    return [*plain, *words[place + 1 :]]
    except psutil.Error:  # another user's process, or one that has just ended: what this one knows itself has to do
        pass
    return ["python", *sys.argv]


def resume_line(words: list[str]) -> str:
    """`words` as a line for a shell that goes on with the run from its last whole checkpoint."""
    flag, kept = "--resume_from_checkpoint", []
    for place, word in enumerate(words):
        its_value = place > 0 and words[place - 1] == flag and not word.startswith("--")
        if word != flag and not word.startswith(f"{flag}=") and not its_value:
            kept.append(word)
    return shlex.join([*kept, flag, "auto"])


def config_file(words: list[str]) -> str | None:
    """The recipe's YAML among `words`: `--config FILE` or `--config=FILE`."""
    for place, word in enumerate(words):
        if word == "--config" and place + 1 < len(words):
            return words[place + 1]
        if word.startswith("--config="):
            return word.partition("=")[2]
    return None
