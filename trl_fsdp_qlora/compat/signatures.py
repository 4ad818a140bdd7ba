"""Comparing borrowed functions with the signatures they were written for."""

import inspect
import logging
from operator import attrgetter
from typing import Any

logger = logging.getLogger(__name__)


def misfits(where: Any, expected: dict[str, str]) -> list[str]:
    """What differs in `where` (a module, a class) from `expected`: dotted name -> its parameters in order."""
    problems = []
    for name, parameters in expected.items():
        try:
            found = f"({' '.join(inspect.signature(inspect.unwrap(attrgetter(name)(where))).parameters)})"
        except AttributeError:
            found = "nothing"
        if found != f"({parameters})":
            problems.append(f"{name}: expected ({parameters}), found {found}")
    return problems


def warn_of_misfits(library: str, version: str, where: Any, expected: dict[str, str]) -> None:
    """Warn where [`misfits`] finds something: a library's next release is taken, and what changed in it has a name."""
    if problems := misfits(where, expected):
        logger.warning(
            "trl_fsdp_qlora was not written for %s %s, so a step may fail or be wrong; compare a few with stock TRL "
            "(`trl-fsdp-qlora compare`), or install a version of constraints.txt. What differs: %s",
            library,
            version,
            "; ".join(problems),
        )
