"""The pages: what they name is there, and what is written from the code is what the code says."""

import importlib.util
import json
import pkgutil
import re
import sys
from pathlib import Path

import pytest
import yaml
from datasets import Dataset
from trl import TrlParser

import trl_fsdp_qlora
from tests.decode.test_tools import naming
from tests.tiny import config as small_config
from tests.tiny import save_tiny_model, tiny_model
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.cli.scripts import LAUNCHER
from trl_fsdp_qlora.methods import METHODS
from trl_fsdp_qlora.recipe.arguments import ScriptArguments
from trl_fsdp_qlora.recipe.episodes import agent_of
from trl_fsdp_qlora.run.config_fields import own_fields
from trl_fsdp_qlora.run.import_path import load_function

ROOT = Path(__file__).parents[1]
PACKAGE = Path(trl_fsdp_qlora.__file__).parent
PAGES = [
    *(ROOT / name for name in ("README.md", "AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "recipes").rglob("README.md")),
    ROOT / "examples" / "README.md",
    ROOT / "notebooks" / "README.md",
]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
# A path of this repository in code: at least one slash, and an ending that files here have.
PATH = re.compile(r"(?<![\w/.$~{<-])((?:[\w.+*-]+/)+[\w.*-]+\.(?:py|md|ya?ml|json|png|txt))(?![\w/])")
# A room of the package, in code.
ROOM = re.compile(r"\btrl_fsdp_qlora/\w+/(?![\w*])")
DOTTED = re.compile(r"\btrl_fsdp_qlora(?:\.\w+)+")
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
# What a run or its user makes.
MADE = ("runs/", "my_", "checkpoint")


def script(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def anchors(page: Path) -> set[str]:
    """The fragments that a page's headings can be linked by, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def resolves(dotted: str) -> bool:
    """`trl_fsdp_qlora.room.module`, or a name in one."""
    try:
        return bool(pkgutil.resolve_name(dotted))
    except (ImportError, AttributeError):
        return False


def lost_names(page: Path) -> list[str]:
    """The links, paths, rooms and dotted names of a page that lead nowhere."""
    text = page.read_text(encoding="utf-8")
    lost = []
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        name, _, fragment = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (fragment and fragment not in anchors(file)):
            lost.append(target)
    code = "\n".join(CODE.findall(text))
    # A path as a page names it: from the root, from the page, or from inside the package; a pattern matches something.
    for name in PATH.findall(code):
        there = (any(base.glob(name.removeprefix("./"))) for base in (ROOT, page.parent, PACKAGE))
        if not name.startswith(MADE) and not any(there):
            lost.append(name)
    lost += [name for name in ROOM.findall(code) if not (ROOT / name).is_dir()]
    lost += [name for name in DOTTED.findall(code) if not resolves(name)]
    return lost


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_what_a_page_links_and_names_is_there(page):
    assert lost_names(page) == []


def test_the_check_sees_what_leads_nowhere(tmp_path):
    lost = ["gone.md", "#no-heading", "docs/gone.md", "trl_fsdp_qlora/gone/", "trl_fsdp_qlora.gone.name"]
    there = ["page.md", "#a-heading", "docs/index.md", "trl_fsdp_qlora/grpo/", "trl_fsdp_qlora.grpo.trainer"]
    lines = ["# A heading"]
    for link, fragment, *code in (lost, there):
        lines += [f"[a link]({link}) and [another]({fragment})", *(f"`{name}`" for name in code)]
    (tmp_path / "page.md").write_text("\n".join(lines))
    assert lost_names(tmp_path / "page.md") == lost


def test_every_page_is_in_the_index_and_the_floor_plan_names_every_room():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- \[([\w.]+)\]\(\1\)", index, re.MULTILINE)
    assert sorted(listed) == sorted({path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"})
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert rooms <= set(re.findall(r"(?<= )(\w+)/(?= )", text))


def test_the_api_reference_has_the_public_names():
    named = re.findall(
        r"^::: trl_fsdp_qlora\.(\w+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(named) == sorted({*trl_fsdp_qlora.__all__} - {"__version__"})


def test_a_field_is_documented_once_and_the_reference_is_what_the_classes_say():
    reference = script(ROOT / "docs" / "config_reference.py")
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "run python docs/config_reference.py"
    for config in (getattr(trl_fsdp_qlora, method.config) for method in METHODS):
        for item in own_fields(config):
            assert item.metadata["help"].endswith("."), item.name
            assert f"        {item.name} (`" in config.__doc__
        assert "Parameters:" not in Path(sys.modules[config.__module__].__file__).read_text(encoding="utf-8")


def options_of(name: str) -> set[str]:
    """The options that a recipe script takes."""
    page = script(ROOT / "recipes" / name)
    types = re.search(r"parse_recipe\(\((.*?),?\)", (ROOT / "recipes" / name).read_text(encoding="utf-8"))[1]
    parser = TrlParser(tuple(getattr(page, each.strip()) for each in types.split(",")))
    return {"--config", *parser._option_string_actions}


def test_commands_use_options_that_their_script_has():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES).replace("\\\n", " ")
    used: dict[str, set[str]] = {}
    names = "|".join([*(method.command for method in METHODS), "evaluate", "merge", "dequantize"])
    commands = re.findall(rf"trl-fsdp-qlora ({names}) ([^\n`]*)", text)
    commands = [(f"{name.replace('-', '_')}.py", words) for name, words in commands]
    for name, words in [*re.findall(r"recipes/(\w+\.py)([^\n`]*)", text), *commands]:
        if (ROOT / "recipes" / name).is_file() and "parse_recipe((" in (ROOT / "recipes" / name).read_text("utf-8"):
            used.setdefault(name, set()).update(re.findall(r"(?<!\S)--\w+", words))
    assert len(used) >= 4
    unknown = {name: arguments - options_of(name) - set(LAUNCHER) for name, arguments in used.items()}
    assert not any(unknown.values()), unknown


def test_the_script_of_a_page_runs_and_every_metric_it_logs_is_explained(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "own_data.md").read_text(encoding="utf-8")
    (rows,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len([json.loads(row) for row in rows.splitlines()]) == 2
    (tmp_path / "problems.jsonl").write_text(rows * 4, encoding="utf-8")
    save_tiny_model(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(code.replace("HuggingFaceTB/SmolLM2-135M-Instruct", "tiny"), "own_data.md", "exec"), names)
    assert (tmp_path / "runs" / "mine" / "adapter_model.safetensors").is_file()
    logged = {name for entry in names["trainer"].state.log_history if "loss" in entry for name in entry} - {"step"}
    assert len(logged) > 30
    # In docs/telemetry.md `<phase>` stands for one word, `...` for anything.
    text = (ROOT / "docs" / "telemetry.md").read_text(encoding="utf-8").partition("## Every metric")[2]
    cells = re.findall(r"^\| (`.*?) \| ", text, re.MULTILINE)
    explained = [re.escape(name) for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    patterns = [re.sub(r"<\w+>", r"\\w+", name.replace(re.escape("..."), ".*")) for name in explained]
    assert {name for name in logged if not any(re.fullmatch(pattern, name) for pattern in patterns)} == set()


@pytest.mark.filterwarnings("ignore:.*environment_factory")
def test_the_tool_the_environment_and_the_reward_of_agents_md_train(tmp_path, monkeypatch):
    """Each Python block of the page is a file; the recipe lines name them, and a step calls the environment's tool."""
    page = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    tool, game, reward = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for name, code in {"my_tools": tool, "my_game": game, "my_reward": reward}.items():
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (settings,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert "environment: my_game.py:HigherOrLower" in page
    script = ScriptArguments("problems.jsonl", **yaml.safe_load(settings), environment="my_game.py:HigherOrLower")
    agent = agent_of(script)
    assert [agent.tools[0](6, 7), agent.environment.__name__] == [42, "HigherOrLower"]
    questions = [[{"role": "user", "content": f"{n}="}] for n in range(8)]
    settings = {"max_steps": 1, "max_completion_length": 60, "max_tool_calling_iterations": 2}
    trainer = EfficientGRPOTrainer(
        tiny_model(),
        load_function("my_reward.py:right_and_brief"),
        small_config(EfficientGRPOConfig, tmp_path, **settings),
        Dataset.from_dict({"prompt": questions, "answer": ["40"] * 8}),
        processing_class=naming("guess", {"number": 30}),
        **agent.arguments(),
    )
    trainer.train()
    step = trainer.state.log_history[0]
    assert step["tools/call_frequency"] > 0 and step["tools/failure_frequency"] == 0
    # One guess too low by ten leaves 0.9; an episode without a guess has 0.
    assert 0 < step["rewards/HigherOrLower/mean"] <= 0.9
    assert -0.2 <= step["rewards/right_and_brief/mean"] <= 1
