"""Hooks of mkdocs.yml: they take the navigation from docs/index.md, and let links lead out of docs/.

Pages of the repository that docs/ links (README.md, examples/README.md, ...) and pictures become files of the site. A
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


def site_path(path: str) -> str:
    """The path in the site of a file of the repository; a page or a picture from outside of docs/ gets a new name."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path.replace('/', '-').replace('README', 'readme')}"


def source(page_uri: str) -> str:
    """The file of the repository that a page of the site is made of."""
    return next((path for path in PAGES if site_path(path) == page_uri), f"docs/{page_uri}")


def on_config(config, **_):
    """The navigation: the groups of docs/index.md in its order."""
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    nav = [{"Home": "index.md"}]
    group = None
    for line in index.splitlines():
        entry = re.match(r"- \[([^\]]+)\]\(([^)#]+)\)", line)
        if entry:
            path = posixpath.normpath(posixpath.join("docs", entry[2]))
            group.append({entry[1].removesuffix(".md"): site_path(path)})
        elif line.startswith("## "):
            group = []
            nav.append({line.removeprefix("## "): group})
    titles = {
        "README.md": "README",
        "CONTRIBUTING.md": "Contributing",
        "AGENTS.md": "For assistants",
        "CHANGELOG.md": "Changes",
    }
    pages = [{title: site_path(path)} for path, title in titles.items() if (ROOT / path).is_file()]
    nav.append({"Repository": pages})
    config.nav = nav
    return config


def on_files(files, config, **_):
    """Add the pages and pictures from outside of docs/."""
    pages = [path for path in PAGES if (ROOT / path).is_file()]
    pictures = set()
    for page in [*pages, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]:
        for link in LINK.finditer((ROOT / page).read_text(encoding="utf-8")):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link[3]))
            if target.endswith(PICTURES) and not target.startswith("docs/") and (ROOT / target).is_file():
                pictures.add(target)
    for path in sorted({*pages, *pictures}):
        files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown, page, config, files, **_):
    """Let links of the repository be links of the site."""
    page_uri = page.file.src_uri
    folder = posixpath.dirname(source(page_uri))

    def link_in_site(match: re.Match) -> str:
        picture, label, target = match.groups()
        name, hash_sign, fragment = target.partition("#")
        path = posixpath.normpath(posixpath.join(folder, name))
        if files.get_file_from_path(site_path(path)) is not None and (ROOT / path).is_file():
            target = posixpath.relpath(site_path(path), posixpath.dirname(page_uri) or ".")
            return f"{picture}[{label}]({target}{hash_sign}{fragment})"
        if not (ROOT / path).exists():
            return match[0]  # mkdocs reports it
        if config.repo_url:
            return f"{picture}[{label}]({config.repo_url.rstrip('/')}/blob/main/{path})"
        return label

    return LINK.sub(link_in_site, markdown)
