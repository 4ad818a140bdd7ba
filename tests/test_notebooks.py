"""Each notebook runs from its first cell to its last, with a tiny model on a CPU."""

import json
from pathlib import Path

import pytest

from tests.distributed.launch import rank_environment
from tests.tiny import save_tiny_model, save_tiny_vision_model, save_tool_calling_model

ROOT = Path(__file__).parents[1]
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
# What each one starts from; a notebook that is missing here has no test.
MODELS = {
    "agent": lambda folder: save_tool_calling_model(folder, "price", {"item": "bread"}),
    "grpo_trl_lora_qlora": save_tiny_model,
    "quickstart": save_tiny_model,
    "t4": save_tiny_model,
    "vision": save_tiny_vision_model,
}
# A line that the last cell prints.
LAST = {
    "agent": "tools/call_frequency",
    "grpo_trl_lora_qlora": "s a step",
    "quickstart": "right answer:",
    "t4": "times as fast",
    "vision": "% of the padded tokens",
}
PICTURES = {"quickstart": 1, "vision": 2}


def test_every_notebook_has_a_test_and_no_outputs():
    assert set(MODELS) == set(NOTEBOOKS)
    for path in NOTEBOOKS.values():
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        assert not any(cell.get("outputs") for cell in cells), f"clear the outputs of {path.name}"


def printed(cell) -> str:
    return "".join(output.get("text", "") for output in cell.get("outputs", ()))


@pytest.mark.exhaustive
@pytest.mark.processes
@pytest.mark.parametrize("name", MODELS)
def test_it_runs_to_its_end(name, tmp_path):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    problems = [{"problem": f"{n}+{n}=", "solution": f"${2 * n}$"} for n in range(32)]
    (tmp_path / "problems.jsonl").write_text("\n".join(map(json.dumps, problems)))
    model = MODELS[name](tmp_path / "tiny")
    settings = {"MODEL": model, "STEPS": "2", "DATA": "problems.jsonl", "COMPLETION_TOKENS": "8"}
    environment = {"IPYTHONDIR": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(tmp_path / "kernel")}
    notebook = nbformat.read(NOTEBOOKS[name], as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=rank_environment({**settings, **environment}))
    codes = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert LAST[name] in printed(codes[-1])
    pictures = [output for cell in codes for output in cell.outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == PICTURES.get(name, 0)
    assert list(tmp_path.glob("runs/*/adapter_model.safetensors"))
