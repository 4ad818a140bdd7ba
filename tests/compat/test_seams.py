"""The table of seams has every undocumented name of TRL's that the package uses, and no more than that.

Covers `compat/trl_seams.py`.
"""

import ast
import inspect
import logging
from dataclasses import fields
from pathlib import Path

import pytest
import transformers
import trl

import trl_fsdp_qlora
from tests.tiny import lora, trainer
from trl_fsdp_qlora.compat import trl as seams
from trl_fsdp_qlora.compat import trl_seams

PACKAGE = Path(trl_fsdp_qlora.__file__).parent
MOST = 45
NAMES = {**trl_seams.METHODS, **trl_seams.ATTRIBUTES}
KINDS = ("grpo", "rloo", "dpo")
# Of TRL's documentation: whole trainers and configs, clients, and helpers for data.
DOCUMENTED = {"VLLMClient", "is_conversational", "maybe_extract_prompt", "disable_dropout_in_model"}


def trees(*folders: str):
    for folder in folders or ("",):
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def attributes_and_methods(tree: ast.Module) -> set[str]:
    """Names of the methods of a file's classes, and of the attributes that they set."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if getattr(node.value, "id", "") == "self" else set()
    return names


def undocumented() -> set[str]:
    """Names of TRL's three trainers that are no option of theirs, and not transformers'."""
    folder = Path(trl.__file__).parent / "trainer"
    names = set()
    for file in (*(f"{kind}_trainer.py" for kind in KINDS), "base_trainer.py"):
        names |= attributes_and_methods(ast.parse((folder / file).read_text(encoding="utf-8")))
    documented = attributes_and_methods(ast.parse(Path(transformers.trainer.__file__).read_text(encoding="utf-8")))
    for kind in KINDS:
        documented |= {item.name for item in fields(getattr(trl, f"{kind.upper()}Config"))}
        documented |= set(inspect.signature(getattr(trl, f"{kind.upper()}Trainer")).parameters)
    return {name for name in names - documented if not name.startswith("__")}


def uses(tree: ast.Module) -> set[str]:
    """Names that a file reads of a trainer, overrides, patches or asks for by text."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value
            is_super = isinstance(owner, ast.Call) and getattr(owner.func, "id", "") == "super"
            name = getattr(owner, "id", getattr(owner, "attr", ""))
            if is_super or name in ("self", "trainer", "GRPOTrainer", "RLOOTrainer", "DPOTrainer", "ours"):
                found.add(node.attr)
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.keyword) and node.arg and node.arg.startswith("_"):
            found.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("_"):
            found.add(node.value)
    return found


def test_every_name_of_trls_trainers_is_in_the_table():
    used = set().union(*(uses(tree) for path, tree in trees("trainers", "engines", "fsdp2_qlora", "compat")))
    used |= set().union(*(uses(tree) for path, tree in trees("experimental/one_generation_ahead", "tools/recipe")))
    names = undocumented()
    own = {"features", "tools", "reset"}  # of this package, by names that TRL's trainers have for something else
    assert (used & names) - own - set(NAMES) == set()
    assert set(NAMES) - used == set() and set(NAMES) <= names


def at_run_time(tree: ast.AST) -> list[ast.AST]:
    """The nodes of a file that are not for type checkers alone."""
    for_types = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for_types.update(ast.walk(node))
    return [node for node in ast.walk(tree) if node not in for_types]


def test_every_import_from_trl_is_in_the_table():
    public = set(dir(trl)) | DOCUMENTED
    table = set(seams.BORROWED) | set(trl_seams.REPLACED)
    modules = {module for module, _ in [*seams.BORROWED.values(), *trl_seams.REPLACED.values()]}
    for path, tree in trees():
        for node in at_run_time(tree):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "trl":
                names = {alias.name for alias in node.names}
                are_modules = all(f"{node.module}.{name}" in modules for name in names)
                assert are_modules or names <= public | table, (path, names)


def test_the_table_is_short():
    borrowed = {name for name in seams.BORROWED if not hasattr(trl, name)} - DOCUMENTED
    rows = [*borrowed, *NAMES, *trl_seams.REPLACED]
    print(len(rows), "seams")
    assert len(rows) <= MOST, sorted(rows)


def test_a_method_or_an_attribute_that_is_gone_is_one_line(tmp_path, caplog):
    grpo = trainer(trl.GRPOTrainer, trl.GRPOConfig, tmp_path, peft_config=lora())

    class Next:
        """Stands for TRL's class: without two methods."""

    Next.__name__ = "GRPOTrainer"
    for name in set(trl_seams.METHODS) - {"_tool_call_loop"}:
        setattr(Next, name, None)
    with caplog.at_level(logging.WARNING):
        trl_seams.check(grpo, Next)
    (line,) = [record.getMessage() for record in caplog.records if "_tool_call_loop" in record.getMessage()]
    assert "GRPOTrainer" in line and "as in stock TRL" in line
    del grpo._metrics
    with pytest.raises(seams.MissingName, match=r"_metrics.* pip install 'trl"):
        trl_seams.check(grpo, trl.GRPOTrainer)
