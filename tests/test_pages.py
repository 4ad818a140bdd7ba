"""What the pages link and name is there: files, headings, folders and modules of the package, commands, recipes."""

import pkgutil
import re
from pathlib import Path

import pytest

import trl_fsdp_qlora
from trl_fsdp_qlora.__main__ import COMMANDS

ROOT = Path(__file__).parents[1]
PACKAGE = Path(trl_fsdp_qlora.__file__).parent
PAGES = [
    *(ROOT / name for name in ("README.md", "AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "recipes").rglob("README.md")),
    ROOT / "examples" / "README.md",
    ROOT / "notebooks" / "README.md",
]
# A path of this repository in code: at least one slash, and an ending that files here have.
PATH = re.compile(r"(?<![\w/.$~{<-])((?:[\w.+*-]+/)+[\w.*-]+\.(?:py|md|ya?ml|json|png|txt))(?![\w/])")
FOLDER = re.compile(r"\btrl_fsdp_qlora/(?:\w+/)+(?![\w*])")
DOTTED = re.compile(r"\btrl_fsdp_qlora(?:\.\w+)+")
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
# What a run or its user makes.
MADE = ("runs/", "my_", "checkpoint")


def anchors(page: Path) -> set[str]:
    """The fragments that a page's headings can be linked by, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def resolves(dotted: str) -> bool:
    """Whether `trl_fsdp_qlora.folder.module`, or a name in one, can be imported."""
    try:
        return bool(pkgutil.resolve_name(dotted))
    except (ImportError, AttributeError):
        return False


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_what_a_page_links_and_names_is_there(page):
    text = page.read_text(encoding="utf-8")
    lost = []
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        name, _, fragment = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (fragment and fragment not in anchors(file)):
            lost.append(target)
    code = "\n".join(CODE.findall(text))
    # A path is named from the root, from the page, or from inside the package; a pattern matches something.
    for name in PATH.findall(code):
        there = (any(base.glob(name.removeprefix("./"))) for base in (ROOT, page.parent, PACKAGE))
        if not name.startswith(MADE) and not any(there):
            lost.append(name)
    lost += [name for name in FOLDER.findall(code) if not (ROOT / name).is_dir()]
    lost += [name for name in DOTTED.findall(code) if not resolves(name)]
    typed = re.findall(r"^(?:[A-Z_]+=\S+ )*trl-fsdp-qlora ([a-z][\w-]*)", code, re.MULTILINE)
    lost += [f"trl-fsdp-qlora {name}" for name in typed if name not in COMMANDS]
    assert lost == []
