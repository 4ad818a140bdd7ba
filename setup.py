"""Only what pyproject.toml cannot say: the README as PyPI shows it.

PyPI has no files beside the README, so a link to one of the repository is made absolute with the `Repository` address of
`[project.urls]`; where none is given, its text stays and the link goes.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)]+)\)")


def readme_for_pypi(text: str, repository: str | None) -> str:
    """`text` (Markdown) with no link that only works inside the repository."""

    def absolute(match: re.Match) -> str:
        image, label, target = match.groups()
        if repository is None:
            return "" if image else label
        return f"{image}[{label}]({repository.rstrip('/')}/{'raw' if image else 'blob'}/main/{target})"

    return _LINK.sub(absolute, text)


def main() -> None:
    root = Path(__file__).parent
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (root / "README.md").read_text(encoding="utf-8")
    setup(
        long_description=readme_for_pypi(text, project["urls"].get("Repository")),
        long_description_content_type="text/markdown",
    )


if __name__ == "__main__":  # a build backend runs it as such
    main()
