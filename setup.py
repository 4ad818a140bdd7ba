"""The README as PyPI shows it, and the folders that a wheel carries inside the package; the rest is in pyproject.toml.

PyPI has no files next to the README. So a link to a file of the repository becomes absolute, with the `Repository`
address of `[project.urls]`. If there is no address, the link's text stays without the link.
"""

import re
import shutil
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

# These folders are at the top of the repository, because a reader looks for them there.
# `trl_fsdp_qlora/utils/resources.py` finds them there and in a wheel.
_SHIPPED = ("recipes", "accelerate_configs")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)]+)\)")


def readme_for_pypi(text: str, repository: str | None) -> str:
    """`text` (Markdown) with no link that only works inside the repository."""

    def absolute(match: re.Match) -> str:
        image, label, target = match.groups()
        if repository is None:
            return "" if image else label
        return f"{image}[{label}]({repository.rstrip('/')}/{'raw' if image else 'blob'}/main/{target})"

    return _LINK.sub(absolute, text)


class WithFolders(build_py):
    """Modules, and the folders of `_SHIPPED` as `trl_fsdp_qlora/_recipes` and `trl_fsdp_qlora/_accelerate_configs`."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # a clone has them at its top
            return
        for name in _SHIPPED:
            target = Path(self.build_lib, "trl_fsdp_qlora", f"_{name}")
            shutil.rmtree(target, ignore_errors=True)  # of an earlier build
            shutil.copytree(name, target, ignore=shutil.ignore_patterns("__pycache__"))


def main() -> None:
    root = Path(__file__).parent
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (root / "README.md").read_text(encoding="utf-8")
    setup(
        long_description=readme_for_pypi(text, project["urls"].get("Repository")),
        long_description_content_type="text/markdown",
        cmdclass={"build_py": WithFolders},
    )


if __name__ == "__main__":  # a build backend runs this file under that name
    main()
