"""What mkdocs.yml cannot say: the navigation is docs/index.md's, and links lead out of docs/ as they do in the
repository.

Pages of the repository that docs/ links (README.md, examples/README.md, ...) and pictures become files of the site; a
link to any other file leads to the repository if `repo_url` is set, and is plain text otherwise.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "AGENTS.md", "CHANGELOG.md", "examples/README.md", "notebooks/README.md")
PICTURES = (".png", ".svg")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:|#)([^)\s]+)\)")
# Docstrings name things as TRL's do, [`name`] or [`~room.module.name`]; the second is shown as `name`.
REFERENCE = re.compile(r"\[<code>(?:~[\w.]*\.)?([\w.]+)</code>\]")


def on_page_content(html, **_):
    """Show names in docstrings without brackets, and `int \\| None` in tables, as GitHub does, without a backslash."""
    return REFERENCE.sub(r"<code>\1</code>", html).replace(r" \| ", " | ")


def place(path: str) -> str:
    """Of a file of the repository in the site: pages and pictures that lie outside of docs/ get names of their own."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path.replace('/', '-').replace('README', 'readme')}"


def source(page_uri: str) -> str:
    """The file of the repository that a page of the site is made of."""
    return next((path for path in PAGES if place(path) == page_uri), f"docs/{page_uri}")


def on_config(config, **_):
    """The navigation: the groups of docs/index.md in its order."""
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    nav, group = [{"Home": "index.md"}], None
    for line in index.splitlines():
        entry = re.match(r"- \[([^\]]+)\]\(([^)#]+)\)", line)
        if entry:
            path = posixpath.normpath(posixpath.join("docs", entry[2]))
            group.append({entry[1].removesuffix(".md"): place(path)})
        elif line.startswith("## "):
            group = []
            nav.append({line.removeprefix("## "): group})
    named = {
        "README.md": "README",
        "CONTRIBUTING.md": "Contributing",
        "AGENTS.md": "For assistants",
        "CHANGELOG.md": "Changes",
    }
    nav.append({"Repository": [{title: place(path)} for path, title in named.items() if (ROOT / path).is_file()]})
    config.nav = nav
    return config


def on_files(files, config, **_):
    """Add what the pages need from outside of docs/."""
    wanted = {path for path in PAGES if (ROOT / path).is_file()}
    for path in [*wanted, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]:
        text = (ROOT / path).read_text(encoding="utf-8")
        targets = (
            posixpath.normpath(posixpath.join(posixpath.dirname(path), found[3])) for found in LINK.finditer(text)
        )
        wanted |= {target for target in targets if target.endswith(PICTURES) and not target.startswith("docs/")}
    for path in sorted(wanted):
        if (ROOT / path).is_file():
            files.append(File.generated(config, place(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown, page, config, files, **_):
    """Let links of the repository be links of the site."""
    here = page.file.src_uri
    folder = posixpath.dirname(source(here))

    def moved(match: re.Match) -> str:
        picture, label, target = match.groups()
        name, hash_sign, fragment = target.partition("#")
        path = posixpath.normpath(posixpath.join(folder, name))
        if files.get_file_from_path(place(path)) is not None and (ROOT / path).is_file():
            target = posixpath.relpath(place(path), posixpath.dirname(here) or ".")
            return f"{picture}[{label}]({target}{hash_sign}{fragment})"
        if not (ROOT / path).exists():
            return match[0]  # mkdocs reports it
        if config.repo_url:
            return f"{picture}[{label}]({config.repo_url.rstrip('/')}/blob/main/{path})"
        return label

    return LINK.sub(moved, markdown)
