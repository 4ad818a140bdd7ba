"""The floors of the house: a room imports only from rooms below it; a trainer overrides few methods of TRL's."""

import ast
import inspect
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import trl
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import trl_fsdp_qlora
from trl_fsdp_qlora import EfficientGRPOTrainer
from trl_fsdp_qlora.fsdp2_qlora.trainer import ShardedQLoRAMixin
from trl_fsdp_qlora.trainers.methods import METHODS
from trl_fsdp_qlora.trainers.rollouts.on_policy import OnPolicyRun
from trl_fsdp_qlora.trainers.run.trainer_run import TrainerRun

PACKAGE = Path(trl_fsdp_qlora.__file__).parent
# From the ground up; rooms of one floor do not know each other. A file at the top level is a floor of its own.
FLOORS = [
    {"errors", "methods"},
    {"compat"},
    {"token_tiles", "scoring"},
    {"prefix_sharing", "fsdp2_qlora"},
    {"run"},
    {"checkpoints", "telemetry"},
    {"vllm"},
    {"decode"},
    {"selection"},
    {"small_base"},
    {"data"},
    {"evaluation"},
    {"report"},
    {"publishing"},
    {"recipe"},
    {"planning"},
    {"trainers", "any_trainer"},
    {"grpo"},
    {method.room for method in METHODS[1:]},
    {"cli"},
    {"__init__", "__main__"},
]
# A file of cpu/ counts as one of the room that it makes faster, so nothing below that room imports it.
MAKES_FASTER = {
    ("cpu",): "compat",
    ("cpu", "linear"): "scoring",
    ("cpu", "shared_prompts"): "decode",
    ("cpu", "vllm_lora"): "vllm",
}
HEIGHT = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> tuple[str, ...]:
    """`("grpo", "trainer")` of grpo/trainer.py, `("grpo",)` of grpo/__init__.py."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts


MODULES = {name_of(path) for path in FILES}


def imports_in(source: str, room: tuple[str, ...]) -> set[tuple[str, ...]]:
    """Modules of the package that a file in `room` imports, also inside functions."""
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom):
            continue
        parts = tuple(node.module.split(".")) if node.module else ()
        if node.level:
            base = room[: len(room) - node.level + 1] + parts
        elif parts[0] == PACKAGE.name:
            base = parts[1:]
        else:
            continue
        imported |= {(*base, alias.name) if (*base, alias.name) in MODULES else base for alias in node.names}
    return imported - {()}


def test_imports_are_seen_however_they_are_written():
    source = "from ..compat import trl\nfrom .training import x\nimport torch\n"
    source += "def f():\n    from trl_fsdp_qlora.scoring.logprobs import y\n"
    expected = {("compat", "trl"), ("grpo", "training"), ("scoring", "logprobs")}
    assert imports_in(source, room=("grpo",)) == expected


def room_of(module: tuple[str, ...]) -> str:
    return MAKES_FASTER.get(module, module[0])


IMPORTS = {
    name_of(path): imports_in(path.read_text(encoding="utf-8"), room=path.relative_to(PACKAGE).parent.parts)
    for path in FILES
}


def test_a_room_imports_only_from_rooms_below_it():
    upwards = [
        f"{'.'.join(module)} imports {'.'.join(target)}"
        for module, targets in IMPORTS.items()
        for target in targets
        if room_of(target) != room_of(module) and HEIGHT[room_of(target)] >= HEIGHT[room_of(module)]
    ]
    assert not upwards


def in_circles(imports: dict) -> set:
    """Modules in a circle of imports, or between two: what is left when the ends of all chains are taken away."""
    left = {module: {target for target in targets if target != module} for module, targets in imports.items()}
    while True:
        imported = {target for targets in left.values() for target in targets}
        ends = {module for module, targets in left.items() if not targets & left.keys() or module not in imported}
        if not ends:
            return set(left)
        left = {module: targets - ends for module, targets in left.items() if module not in ends}


def test_circles_are_found():
    chain = {"a": {"b"}, "b": {"c"}, "c": set()}
    assert in_circles(chain) == set()
    assert in_circles({**chain, "c": {"d"}, "d": {"b"}}) == {"b", "c", "d"}


def test_no_files_import_each_other():
    """Also under TYPE_CHECKING, which shows only that two files do not know which of them comes first."""
    assert in_circles(IMPORTS) == set()


# Each trainer, TRL's own below it, and ours that it builds on.
TRAINERS = [
    (
        getattr(trl_fsdp_qlora, method.trainer),
        getattr(trl, f"{method.stock or 'GRPO'}Trainer"),
        set() if method.stock else {EfficientGRPOTrainer},
    )
    for method in METHODS
]


def test_few_classes_are_between_a_trainer_and_trls():
    """Those that all trainers share, and a trainer of ours under an algorithm that builds on it."""
    for trainer, stock, builds_on in TRAINERS:
        between = {cls for cls in trainer.__mro__ if cls not in stock.__mro__}
        assert between <= {trainer, OnPolicyRun, TrainerRun, ShardedQLoRAMixin} | builds_on, trainer.__name__


def test_a_trainer_overrides_few_methods_of_trls_own():
    """Not counted: what every trainer of this package overrides alike."""
    most = {"EfficientGRPOTrainer": 12, "EfficientRLOOTrainer": 8, "EfficientDPOTrainer": 4}
    shared = {*vars(TrainerRun), *vars(ShardedQLoRAMixin)} - {"__init__"}
    for trainer, stock, builds_on in TRAINERS:
        if builds_on:
            continue
        names = {name for cls in (trainer, OnPolicyRun) if cls in trainer.__mro__ for name in vars(cls)}
        overridden = {name for name in names & set(vars(stock)) - shared if inspect.isfunction(vars(stock)[name])}
        assert len(overridden) <= most[trainer.__name__], sorted(overridden)


ROOT = PACKAGE.parent


def test_the_tests_of_a_room_lie_in_a_folder_of_its_name():
    """Besides the rooms, only the scripts in `recipes/` and what launches processes have a folder."""
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/__init__.py")}
    assert folders - {module[0] for module in MODULES} == {"distributed", "recipes"}


BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))


def absolute_imports(path: Path) -> set[str]:
    """Top-level names of what a file imports, also inside functions."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    return {name.split(".")[0] for name in names}


def test_what_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [name for names in project["optional-dependencies"].values() for name in names]
    declared = {canonicalize_name(Requirement(line).name) for line in [*project["dependencies"], *extras]}
    distributions = packages_distributions()
    ours = {PACKAGE.name, *(path.stem for path in BENCHMARKS)}
    contestants = {"unsloth"}  # of a benchmark, which says so when it is not there
    optional = {"triton"}  # comes with torch's CUDA build; `compat/triton_kernels.py` asks whether it is there
    undeclared = {}
    for path in [*FILES, *(ROOT / "recipes").glob("*.py"), *BENCHMARKS]:
        for name in absolute_imports(path) - ours - contestants - optional - sys.stdlib_module_names:
            if not {canonicalize_name(distribution) for distribution in distributions.get(name, [name])} & declared:
                undeclared.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert undeclared == {}


def test_a_benchmark_stands_on_the_package():
    """Not on the tests, and it is not named as a mechanism of the package is: both are imported by name."""
    modules = {part for module in MODULES for part in module}
    assert [path.stem for path in BENCHMARKS if "tests" in absolute_imports(path) or path.stem in modules] == []
