"""Every private name that the package uses outside `compat/` is its own, or is there in the installed libraries.

Covers `compat/fsdp.py`.
"""

import ast
import inspect
import textwrap
from pathlib import Path

import pytest
import torch
import transformers
from peft import PromptTuningConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from trl import GRPOConfig, GRPOTrainer

import trl_fsdp_qlora
from tests.tiny import lora, tiny_model, trainer
from trl_fsdp_qlora.compat import fsdp, peft, trl_rollouts
from trl_fsdp_qlora.compat import trl as seams

PASS = "_get_per_token_logps_and_entropies"
PACKAGE = Path(trl_fsdp_qlora.__file__).parent
# Of other libraries, or of Python: who changes one of these reads its documentation again.
ELSEWHERE = {
    "torch": "_DropoutNd _cdata _flash_attention_backward _flash_attention_forward _linear_pointwise "
    "_post_accumulate_grad_hooks _engine_run_backward _forward_cls "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward",
    "Python": "_actions _asdict _current_frames _exit _fields _replace",
    "PEFT, of a layer with LoRA": "_cast_input_dtype",
    "bitsandbytes": "_convert_weight_packed_for_cpu_inverse _functions",
    "transformers, of a config that came from the Hub": "_commit_hash",
    "transformers, of Gemma's norms, and of layers that may be checkpointed": "_norm _gradient_checkpointing_func",
    "TRL, of a trainer with vLLM and of its engine": "_last_loaded_step _llm_weights_sleeping",
    "TRL, of a trainer with environments": "_environment_pool",
    "accelerate, where mixed precision keeps the forward that it wraps": "_original_forward",
    "transformers, of training arguments": "_n_gpu",
    "verifiers, of an environment that serves": "_interception",
    "vLLM, of its module of model loaders": "_LOAD_FORMAT_TO_MODEL_LOADER",
    "this package, a mark on a model whose weights FSDP2 keeps gathered": "_is_gathered",
}


def names(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Private names that a file uses (attributes, what `getattr` is asked for, imports), and names that it defines."""
    used = set()
    defined = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            used.add(node.attr)
            if isinstance(node.ctx, ast.Store) and getattr(node.value, "id", "") == "self":
                defined.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            used.update((node.module or "").split("."), (alias.name for alias in node.names))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            used.update(arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
    return {name for name in used if name.startswith("_") and not name.startswith("__")}, defined


def test_what_is_borrowed_is_there(tmp_path):
    stock = trainer(GRPOTrainer, GRPOConfig, tmp_path, max_steps=1, peft_config=lora(), beta=0.1)
    stock.train()
    experts = Qwen3MoeExperts(Qwen3MoeConfig(hidden_size=8, moe_intermediate_size=8, num_experts=2))
    owners = (stock, stock._dist, stock.model.get_base_model(), stock.model.config, experts)
    files = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "compat"]
    names_of_file = {path: names(ast.parse(path.read_text(encoding="utf-8"))) for path in files}
    known = set().union(*(defined for _, defined in names_of_file.values()))
    known.update(*(part.split() for part in ELSEWHERE.values()))
    if transformers.__version__.startswith("5.17."):
        known.add("_is_expert_parallel")  # read of the experts that have it, see compat/transformers.py
    gone = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path, (used, _) in names_of_file.items()
        for name in used - known
        if not any(hasattr(owner, name) for owner in owners)
    }
    assert gone == set()
    assert isinstance(stock._metrics["train"], dict) and stock._step == 1 and len(stock._buffered_inputs) == 1
    assert {"advantages", "rewards"} <= stock._logs.keys()


def test_only_compat_imports_private_names_of_these_libraries():
    libraries = ("trl.", "transformers.", "peft.", "vllm.", "torch.distributed.fsdp.")
    private_imports = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or node.level:
                continue
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name.startswith(libraries) and "._" in name:
                    private_imports.append(path.parent.name)
    assert set(private_imports) == {"compat"}


@pytest.mark.parametrize("loss_type", ["grpo", "cispo"])
def test_metrics_and_compared_values_have_these_names(tmp_path, loss_type):
    changes = {"max_steps": 1, "beta": 0.1, "loss_type": loss_type, "num_iterations": 2, "peft_config": lora()}
    grpo = trainer(GRPOTrainer, GRPOConfig, tmp_path, **changes)
    grpo.train()
    means = {*trl_rollouts.SCORED_MEANS, *trl_rollouts.LEARNING_MEANS, trl_rollouts.GROUP_SPREAD}
    other = "cispo_clip_ratio" if loss_type == "grpo" else "clip_ratio/"
    assert {name for name in means if not name.startswith(other)} <= grpo.state.log_history[0].keys()
    assert {*trl_rollouts.COMPARED[:2]} <= grpo._buffered_inputs[0].keys()


def test_trls_loss_only_passes_the_model_on():
    """The request is in its place."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(GRPOTrainer._compute_loss))))
    nodes = list(ast.walk(tree))
    uses = [node for node in nodes if isinstance(node, ast.Name) and node.id == "model"]
    calls = [node for node in nodes if getattr(getattr(node, "func", None), "attr", "") == PASS]
    assert len(uses) == 1 and uses == [call.args[0] for call in calls]


def test_peft_knows_whether_the_adapter_is_off():
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    for model in (get_peft_model(tiny_model(), lora()), get_peft_model(tiny_model(), config)):
        assert not peft.is_reference(model) and not peft.is_reference(tiny_model())
        with seams.use_adapter(model, None):
            assert peft.is_reference(torch.nn.ModuleList([model]))
        assert not peft.is_reference(model)
    model = get_peft_model(tiny_model(), lora())
    model.add_adapter("ref", lora())
    with seams.use_adapter(model, "ref"):
        assert peft.is_reference(model)
    assert not peft.is_reference(model)


def test_fsdp(tmp_path):
    """A filled shard stays in its memory, which `DTensor.from_local` would move."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        fully_shard(model[0])
        fully_shard(model)
        assert fsdp.misfit() is None and len(fsdp.units(model)) == 2
        weight = model[1].weight.data
        local = torch.arange(4.0).view(2, 2)
        filled = fsdp.filled_shard(weight, local)
        assert filled.to_local().data_ptr() == local.data_ptr() and torch.equal(filled.full_tensor(), local)
        assert filled.placements == weight.placements
        # `meta` is a device that is not the mesh's: the host's under CPU offloading.
        elsewhere = fsdp.filled_shard(weight, local.to("meta"))
        assert elsewhere.to_local().is_meta and elsewhere.device_mesh.device_type == "cpu"
    finally:
        torch.distributed.destroy_process_group()
