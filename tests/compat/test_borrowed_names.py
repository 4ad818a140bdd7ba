"""Every private name that the package uses outside `compat/` is its own, or is there in the installed libraries."""

import ast
import inspect
import textwrap
from pathlib import Path

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from trl import GRPOConfig, GRPOTrainer

import trl_fsdp_qlora
from tests.tiny import lora, tiny_model, trainer
from trl_fsdp_qlora.compat import fsdp, peft
from trl_fsdp_qlora.compat import trl as seams

PACKAGE = Path(trl_fsdp_qlora.__file__).parent
# Of other libraries, or of Python: who changes one of these reads its documentation again.
ELSEWHERE = {
    "_DropoutNd": "torch.nn: the base of its dropout modules",
    "_asdict": "collections.namedtuple: its fields by name",
    "_actions": "argparse: all options of a parser",
    "_cdata": "torch: identity of a storage",
    "_commit_hash": "transformers: of a config, the revision that it came from, where it came from the Hub",
    "_convert_weight_packed_for_cpu_inverse": "bitsandbytes: layout of 4-bit weights on CPUs",
    "_current_frames": "sys: where each thread is",
    "_exit": "os: ends a process at once",
    "_flash_attention_backward": "torch: an operator",
    "_flash_attention_forward": "torch: an operator",
    "_functions": "bitsandbytes.autograd",
    "_last_loaded_step": "TRL: of a trainer with vLLM",
    "_linear_pointwise": "torch: oneDNN's product, an operator",
    "_is_gathered": "this package: a mark on a model whose weights FSDP2 keeps gathered",
    "_llm_weights_sleeping": "TRL: of its vLLM engine",
    "_replace": "namedtuple",
    "_scaled_dot_product_flash_attention_for_cpu": "torch: an operator",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "torch: an operator",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def used_names(tree: ast.Module) -> set[str]:
    """Private attributes, names asked for by `getattr`, and parts of imports from other packages."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.update((node.module or "").split("."), (alias.name for alias in node.names))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            names.update(arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant))
    return {name for name in names if is_private(name)}


def own_names(tree: ast.Module) -> set[str]:
    """What a file defines: functions, classes, variables, and attributes that its classes set on themselves."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if getattr(node.value, "id", "") == "self" else set()
    return names


def test_what_is_borrowed_is_there(tmp_path):
    stock = trainer(GRPOTrainer, GRPOConfig, tmp_path, max_steps=1, peft_config=lora(), beta=0.1)
    stock.train()
    experts = Qwen3MoeExperts(Qwen3MoeConfig(hidden_size=8, moe_intermediate_size=8, num_experts=2))
    places = (stock, stock._dist, stock.model.get_base_model(), stock.model.config, experts)
    files = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "compat"]
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
    own = set().union(*map(own_names, trees.values()))
    gone = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path, tree in trees.items()
        for name in used_names(tree) - own - ELSEWHERE.keys()
        if not any(hasattr(place, name) for place in places)
    }
    assert gone == set()
    assert isinstance(stock._metrics["train"], dict) and stock._step == 1 and len(stock._buffered_inputs) == 1
    assert {"advantages", "rewards"} <= stock._logs.keys()


@pytest.mark.parametrize("loss_type", ["grpo", "cispo"])
def test_metrics_and_compared_values_have_these_names(tmp_path, loss_type):
    changes = {"max_steps": 1, "beta": 0.1, "loss_type": loss_type, "num_iterations": 2, "peft_config": lora()}
    made = trainer(GRPOTrainer, GRPOConfig, tmp_path, **changes)
    made.train()
    logged = made.state.log_history[0].keys()
    means = {*seams.SCORED_MEANS, *seams.LEARNING_MEANS, seams.GROUP_SPREAD}
    other = "cispo_clip_ratio" if loss_type == "grpo" else "clip_ratio/"
    assert {name for name in means if not name.startswith(other)} <= logged
    assert {"old_per_token_logps", "ref_per_token_logps"} <= made._buffered_inputs[0].keys() & set(seams.COMPARED)


def test_the_loss_does_nothing_with_the_model_but_hand_it_on():
    """The request stands in its place."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(GRPOTrainer._compute_loss))))
    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "model"]
    calls = [
        node.args[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "_get_per_token_logps_and_entropies"
    ]
    assert len(uses) == 1 and uses == calls


@pytest.mark.parametrize("config", [lora(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)])
def test_peft_says_whether_the_adapter_is_off(config):
    model = get_peft_model(tiny_model(), config)
    assert not peft.is_reference(model) and not peft.is_reference(tiny_model())
    with seams.use_adapter(model, None):
        assert peft.is_reference(torch.nn.ModuleList([model]))
    assert not peft.is_reference(model)
    if not config.is_prompt_learning:
        model.add_adapter("ref", config)
        with seams.use_adapter(model, "ref"):
            assert peft.is_reference(model)
        assert not peft.is_reference(model)


def test_fsdp(tmp_path):
    """Units and their settings; and a filled shard stays where it lies, which `DTensor.from_local` would move."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        fully_shard(model[0])
        fully_shard(model)
        fsdp.initialise(model)
        assert fsdp.misfit() is None and len(fsdp.units(model)) == 2
        group = fsdp.param_groups(model)[0]
        assert [p.sharded_param.shape for p in group.fsdp_params] == [(2, 2), (2,)]
        saved = fsdp.reshard_settings(model)
        model.set_reshard_after_forward(False)
        assert fsdp.reshard_settings(model) != saved
        for owner, name, value in saved:
            setattr(owner, name, value)
        assert fsdp.reshard_settings(model) == saved
        weight, local = model[1].weight.data, torch.arange(4.0).view(2, 2)
        filled = fsdp.filled_shard(weight, local)
        assert filled.to_local().data_ptr() == local.data_ptr() and torch.equal(filled.full_tensor(), local)
        assert filled.placements == weight.placements
        # `meta` stands for a device that is not the mesh's: the host's under CPU offloading.
        elsewhere = fsdp.filled_shard(weight, local.to("meta"))
        assert elsewhere.to_local().is_meta and elsewhere.device_mesh.device_type == "cpu"
    finally:
        torch.distributed.destroy_process_group()
