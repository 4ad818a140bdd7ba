"""Comparing borrowed functions with the signatures they were written for."""

import inspect
from collections.abc import Callable


class UnsupportedVersion(ImportError):
    """An installed library differs from the one this package was written for, in a place that matters."""


def misfits(expected: dict[str, tuple[Callable, str]]) -> list[str]:
    """The functions in `expected` whose parameters are not those they were written for, each with both."""
    problems = []
    for name, (function, parameters) in expected.items():
        found = " ".join(inspect.signature(inspect.unwrap(function)).parameters)
        if found != parameters:
            problems.append(f"{name}: expected ({parameters}), found ({found})")
    return problems


def check_signatures(library: str, version: str, expected: dict[str, tuple[Callable, str]], advice: str) -> None:
    """Compare every function in `expected` with the parameters it was written for.

    Args:
        library, version: what is installed.
        expected: name -> (function, its parameters in order).
        advice: what to install instead.

    Raises:
        UnsupportedVersion: names each function that differs, and what was expected.
    """
    if problems := misfits(expected):
        raise UnsupportedVersion(
            f"trl_fsdp_qlora was not written for the installed {library} {version}, which differs in\n"
            + "\n".join(f"  {problem}" for problem in problems)
            + f"\nInstall a version that fits: {advice}"
        )
