"""What no import linter checks: what an import imports, what it does to the process, and what has to be installed.

The arrows between rooms are contracts of import-linter in pyproject.toml (`make lint`).
"""

import ast
import json
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "trl_fsdp_qlora"
CORE = ("prefix_sharing", "scoring", "long_rows")

# What a user imports, from small to large, and the most nodes of the syntax tree of this package that it may read.
# Lines would count a statement that was split in two as more program.
MOST_NODES = {
    "from trl_fsdp_qlora.fsdp2_qlora.trainer import ShardedQLoRAMixin": 1_100,
    "from trl_fsdp_qlora import share_prompts": 26_500,
    "from trl_fsdp_qlora import EfficientDPOTrainer": 41_600,
    "from trl_fsdp_qlora import EfficientGRPOTrainer": 55_500,
}
# Runs each statement as if this package had not been imported before, and prints what came along and what changed.
SCRIPT = """
import ast, json, os, signal, sys

MARKERS = ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop
results = []
for statement in sys.argv[1:]:
    for name in [name for name in sys.modules if name.startswith("trl_fsdp_qlora")]:
        del sys.modules[name]
    before = dict(os.environ), [signal.getsignal(number) for number in signal.valid_signals()]
    exec(statement)
    after = dict(os.environ), [signal.getsignal(number) for number in signal.valid_signals()]
    ours = [module for name, module in sys.modules.items() if name.startswith("trl_fsdp_qlora")]
    trees = [ast.parse(open(module.__file__, encoding="utf-8").read()) for module in ours]
    nodes = sum(not isinstance(node, MARKERS) for tree in trees for node in ast.walk(tree))
    added = [name for name in after[0] if "TRL_FSDP" in name and name not in before[0]]
    libraries = sorted(name for name in sys.modules if "." not in name)
    results.append([nodes, libraries, before[1] == after[1] and not added])
print(json.dumps(results))
"""


def imported(*statements: str) -> list[tuple[int, list[str]]]:
    """(nodes of this package, top-level modules so far) of each statement; none changes anything of the process."""
    words = [sys.executable, "-c", SCRIPT, *statements]
    run = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert run.returncode == 0, run.stderr
    results = json.loads(run.stdout.splitlines()[-1])
    for statement, (_, _, leaves_the_process) in zip(statements, results, strict=True):
        assert leaves_the_process, statement
    return [(nodes, libraries) for nodes, libraries, _ in results]


def test_an_import_reads_no_more_than_its_part_of_the_package():
    """And the core imports no TRL: a loop of one's own with `share_prompts(model)` needs torch and transformers."""
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for room in CORE
        for path in sorted((PACKAGE / room).rglob("*.py"))
    ]
    (_, libraries), *others = imported("import " + ", ".join(names), *MOST_NODES)
    assert not {*libraries} & {
        "trl",
        "peft",
        "datasets",
        "pandas",
        "pyarrow",
        "requests",
        "matplotlib",
        "bitsandbytes",
    }
    nodes = {statement: nodes for statement, (nodes, _) in zip(MOST_NODES, others, strict=True)}
    print(*(f"{statement}: {count} nodes" for statement, count in nodes.items()), sep="\n")
    assert [(statement, count) for statement, count in nodes.items() if count > MOST_NODES[statement]] == []


def absolute_imports(path: Path) -> set[str]:
    """Top-level names of what a file imports, also inside functions."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    return {name.split(".")[0] for name in names}


def test_what_is_imported_is_declared():
    """The library's imports by its dependencies; those of the commands, recipes and benchmarks by an extra, too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = {canonicalize_name(Requirement(line).name) for line in project["dependencies"]}
    extras = [name for names in project["optional-dependencies"].values() for name in names]
    declared = required | {canonicalize_name(Requirement(line).name) for line in extras}
    distributions = packages_distributions()
    benchmarks = sorted((ROOT / "benchmarks").glob("*.py"))
    ours = {PACKAGE.name, *(path.stem for path in benchmarks)}
    # Libraries that a user brings along; `triton` comes with torch's CUDA build.
    optional = {"triton", "bitsandbytes", "vllm", "verifiers", "unsloth"}
    undeclared = {}
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "recipes").glob("*.py"), *benchmarks]:
        is_library = path.is_relative_to(PACKAGE) and "tools" not in path.parts
        for name in absolute_imports(path) - ours - optional - sys.stdlib_module_names:
            installed_as = {canonicalize_name(x) for x in distributions.get(name, [name])}
            if not installed_as & (required if is_library else declared):
                undeclared.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert undeclared == {}


def test_the_package_imports_no_library_for_tests():
    assert [path for path in PACKAGE.rglob("*.py") if absolute_imports(path) & {"unittest", "pytest"}] == []
