"""Every private name of TRL, transformers, PEFT and torch's FSDP that the package uses is listed in `compat/`, and exists."""

import ast
import inspect
import textwrap
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from transformers import PretrainedConfig, PreTrainedModel
from trl import GRPOConfig, GRPOTrainer

import trl_fsdp_qlora
from tests.tiny import lora, tiny_model, trainer
from trl_fsdp_qlora.compat import fsdp, peft, transformers
from trl_fsdp_qlora.compat import trl as seams

PACKAGE = Path(trl_fsdp_qlora.__file__).parent
# Of other libraries, or of Python: who changes one of these reads its documentation again.
ELSEWHERE = {
    "_DropoutNd": "torch.nn: the base of its dropout modules",
    "_asdict": "collections.namedtuple: its fields by name",
    "_actions": "argparse: all options of a parser",
    "_buffers": "torch.nn.Module: its own buffers, without those of its children",
    "_cdata": "torch: identity of a storage",
    "_commit_hash": "transformers: of a config, the revision that it came from, where it came from the Hub",
    "_convert_weight_packed_for_cpu_inverse": "bitsandbytes: layout of 4-bit weights on CPUs",
    "_current_frames": "sys: where each thread is",
    "_exit": "os: ends a process at once",
    "_flash_attention_backward": "torch: an operator",
    "_flash_attention_forward": "torch: an operator",
    "_forward_hooks": "torch.nn.Module: what was registered to run after its forward",
    "_forward_pre_hooks": "torch.nn.Module: what was registered to run before its forward",
    "_functions": "bitsandbytes.autograd",
    "_linear_pointwise": "torch: oneDNN's product, an operator",
    "_is_gathered": "this package: a mark on a model whose weights FSDP2 keeps gathered",
    "_parameters": "torch.nn.Module: its own parameters",
    "_replace": "namedtuple",
    "_scaled_dot_product_flash_attention_for_cpu": "torch: an operator",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "torch: an operator",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def sources() -> dict[Path, ast.Module]:
    """Parsed files of the package outside `compat/`."""
    files = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "compat"]
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}


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
    names = set_on_self(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def set_on_self(tree: ast.AST) -> set[str]:
    stores = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    return {node.attr for node in stores if getattr(node.value, "id", "") == "self"}


def listed() -> set[str]:
    methods = {name.split(".")[-1] for name in (*seams.EXPECTED, *transformers.EXPECTED)}
    attributes = {*seams.ATTRIBUTES, *transformers.CONFIG_ATTRIBUTES, *transformers.MODEL_ATTRIBUTES}
    attributes |= {*transformers.EXPERTS_ATTRIBUTES}
    vllm = {*seams.WITH_VLLM, *seams.VLLM_ATTRIBUTES, *seams.VLLM_SETS}
    return methods | attributes | vllm | {*transformers.TRAINER_METHODS}


def test_no_private_name_is_borrowed_outside_the_lists():
    trees = sources()
    own = set().union(*map(own_names, trees.values())) - listed()
    known = own | listed() | ELSEWHERE.keys()
    unknown = {str(path.relative_to(PACKAGE)): used_names(tree) - known for path, tree in trees.items()}
    unknown = {path: names for path, names in unknown.items() if names}
    assert unknown == {}, "list them in compat/, with a check"


def test_keys_of_a_batch_and_metrics_have_one_place():
    """Written out nowhere else, so that a new release is a change of one file."""
    keys = {*seams.COMPARED, seams.IMPORTANCE_RATIO, seams.GROUP_SPREAD, seams.PHI_MEAN}
    again = {
        f"{path.relative_to(PACKAGE)}: {node.value}"
        for path, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in keys
    }
    assert again == set()


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """A stock trainer after one step, and what it logged."""
    made = trainer(
        GRPOTrainer, GRPOConfig, tmp_path_factory.mktemp("stock"), max_steps=1, peft_config=lora(), beta=0.1
    )
    made.train()
    return made


def test_what_a_trainer_has_is_listed_where_our_trainers_use_it(stock):
    for room in ("grpo", "t_spmo", "a_star_po"):
        tree = ast.parse((PACKAGE / room / "trainer.py").read_text(encoding="utf-8"))
        theirs = {name for name in used_names(tree) | own_names(tree) if is_private(name) and hasattr(stock, name)}
        assert theirs - {"_tag_names", "_name", "_paper"} - listed() == set(), room


def test_attributes_exist(stock):
    assert [name for name in (*seams.ATTRIBUTES, *transformers.TRAINER_METHODS) if not hasattr(stock, name)] == []
    assert [name for name in seams.DISTRIBUTED_ATTRIBUTES if not hasattr(stock._dist, name)] == []
    assert isinstance(stock._metrics["train"], dict) and stock._step == 1 and len(stock._buffered_inputs) == 1
    assert {"advantages", "rewards"} <= stock._logs.keys()
    for name in transformers.CONFIG_ATTRIBUTES:
        assert hasattr(PretrainedConfig(), name)
    for name in transformers.MODEL_ATTRIBUTES:
        assert hasattr(PreTrainedModel, name)


def test_attributes_that_need_vllm_or_a_coroutine(tmp_path):
    from trl.generation.vllm_generation import VLLMGeneration

    assert [name for name in seams.VLLM_ATTRIBUTES if not hasattr(VLLMGeneration, name)] == []
    sets = set_on_self(ast.parse(inspect.getsource(VLLMGeneration)))
    assert {*seams.VLLM_SETS} <= sets
    engine = ast.parse((PACKAGE / "rollout" / "engine.py").read_text(encoding="utf-8"))
    (ours,) = [node for node in engine.body if getattr(node, "name", "") == "AdapterEngine"]
    assert set_on_self(ours) & sets <= {*seams.VLLM_SETS}, "what we set there is listed"
    for name in seams.WITH_VLLM:
        assert f"self.{name} =" in inspect.getsource(GRPOTrainer.__init__)

    async def reward(completions, **_columns):
        return [0.0] * len(completions)

    assert hasattr(trainer(GRPOTrainer, GRPOConfig, tmp_path, reward=reward), seams.ASYNC_LOOP)


@pytest.mark.parametrize("loss_type", ["grpo", "cispo"])
def test_metrics_and_compared_values_have_these_names(tmp_path, loss_type):
    made = trainer(
        GRPOTrainer,
        GRPOConfig,
        tmp_path,
        max_steps=1,
        beta=0.1,
        loss_type=loss_type,
        num_iterations=2,
        peft_config=lora(),
    )
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


def test_error_texts():
    with pytest.raises(ValueError) as targets:
        get_peft_model(tiny_model(), LoraConfig(target_modules=["nothing"]))
    assert peft.targets_not_found(targets.value)
    assert not peft.targets_not_found(ValueError("must be divisible by num_generations"))


@pytest.mark.parametrize("config", [lora(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)])
def test_peft_says_whether_the_adapter_is_off(config):
    model = get_peft_model(tiny_model(), config)
    assert not peft.is_reference(model) and not peft.is_reference(tiny_model())
    with seams.use_adapter(model, None):
        assert peft.is_reference(torch.nn.ModuleList([model]))
    assert not peft.is_reference(model)
    if config.is_prompt_learning:
        return
    model.add_adapter("ref", config)
    with seams.use_adapter(model, "ref"):
        assert peft.is_reference(model)
    assert not peft.is_reference(model)


def test_fsdp_units(tmp_path):
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        fully_shard(model[0])
        fully_shard(model)
        fsdp.initialise(model)
        assert len(fsdp.units(model)) == 2
        (group,) = fsdp.param_groups(fsdp.units(model)[0][1])
        assert [p.sharded_param.shape for p in group.fsdp_params] == [(2, 2), (2,)]
        saved = fsdp.reshard_settings(model)
        model.set_reshard_after_forward(False)
        assert fsdp.reshard_settings(model) != saved
        fsdp.restore_reshard_settings(model, saved)
        assert fsdp.reshard_settings(model) == saved
    finally:
        torch.distributed.destroy_process_group()


def test_experts_are_marked_as_they_are_found():
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    experts = Qwen3MoeExperts(Qwen3MoeConfig(hidden_size=8, moe_intermediate_size=8, num_experts=2))
    assert all(hasattr(experts, name) for name in (*transformers.EXPERTS_ATTRIBUTES, "has_gate", "is_transposed"))
