"""What goes to the engine, what is refused before a model is loaded, and the adapter's versions on their way.

Covers `engines/vllm/adapter_sync.py`, `engines/vllm/drawn_dtype.py`.
"""

import copy
import json
import math
import re
import shutil
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit, Params4bit
from peft import AdaLoraConfig, LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from tests import tiny
from tests.engines.decode.test_decoding import SIZES
from tests.fsdp2_qlora import tiny as qlora
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientRLOOConfig
from trl_fsdp_qlora.engines.vllm import adapter_sync, engine, sync_choice
from trl_fsdp_qlora.engines.vllm.adapter_sync import (
    AdapterVersions,
    RolloutError,
    adapter_weights,
    served_rank,
)
from trl_fsdp_qlora.engines.vllm.drawn_dtype import trainer_dtype
from trl_fsdp_qlora.engines.vllm.engine import _Serving
from trl_fsdp_qlora.engines.vllm.sync_choice import Sync, choose_sync, warnings_for
from trl_fsdp_qlora.trainers.starting.arguments import adapter_and_base

LORA = LoraConfig(r=16, target_modules="all-linear")


def args(**changes):
    values = {
        "use_vllm": True, "vllm_mode": "colocate", "rollout_sync": "auto", "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "sequence_mask", "max_completion_length": 256, "top_p": 1.0, "top_k": 0,
        "min_p": None, "generation_kwargs": None, "learning_rate": 1e-5, "vllm_engine_kwargs": None,
        "vllm_share_base": "off", "rollouts_ahead": 0, "deepspeed_plugin": None,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.parametrize(
    "changes, peft_config, quantized, mode, reason",
    [
        ({}, LORA, False, "merge", "one unquantized device"),
        ({}, LORA, True, "adapter", "quantized"),
        ({"vllm_mode": "server"}, LORA, False, "adapter", "server"),
        ({"deepspeed_plugin": SimpleNamespace(zero_stage=3)}, LORA, False, "adapter", "sharded"),
        ({"rollout_sync": "adapter"}, LORA, False, "adapter", "asked for"),
        ({"vllm_share_base": "on"}, LORA, False, "adapter", "shared"),
        ({"rollout_sync": "merge", "vllm_mode": "server"}, LORA, False, "merge", "asked for"),
        ({}, None, False, "merge", "no adapter"),
        ({"vllm_mode": "server"}, LoraConfig(r=16, use_dora=True), False, "merge", "use_dora"),
        ({"use_vllm": False}, LORA, True, "off", "use_vllm"),
    ],
)
def test_choice(on_a_gpu, changes, peft_config, quantized, mode, reason):
    sync = choose_sync(args(**changes), peft_config, quantized)
    assert sync.mode == mode and reason in sync.reason


def test_choices_by_the_launch_and_choices_that_cannot_be(on_a_gpu, monkeypatch):
    for changes, peft_config, named in (
        ({"rollout_sync": "merge"}, LORA, "trl#4973"),
        ({"rollout_sync": "adapter"}, None, "use_peft"),
    ):
        with pytest.raises(RolloutError, match=named):
            choose_sync(args(**changes), peft_config, quantized=True)
    with monkeypatch.context() as patch:
        patch.setenv("ACCELERATE_USE_FSDP", "true")
        assert choose_sync(args(), LORA, False).mode == "adapter"


def test_a_stored_quantized_checkpoint_is_seen_by_its_config(tmp_path):
    checkpoint = tiny.save_tiny_model(tmp_path / "base")

    def choice(use_vllm=True, **model_init_kwargs):
        config = tiny.config(EfficientGRPOConfig, tmp_path, use_vllm=use_vllm, model_init_kwargs=model_init_kwargs)
        return adapter_and_base({"model": checkpoint, "args": config, "peft_config": LORA})

    assert choice() == (LORA, None)
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    (tmp_path / "base" / "model.safetensors").unlink()  # chosen without a weight
    assert choice(dtype="float32") == (LORA, config["quantization_config"])
    assert choice(use_vllm=False) == (LORA, None)  # nothing depends on it
    asked_for = object()
    assert choice(use_vllm=False, quantization_config=asked_for) == (LORA, asked_for)
    shutil.rmtree(checkpoint)
    assert choice() == (LORA, None)  # TRL raises the error


def test_ranks_are_rounded_up():
    for rank, served in ((1, 1), (4, 8), (16, 16), (48, 64), (300, 320)):
        assert served_rank(LoraConfig(r=rank)) == served


REFUSED = {
    "use_dora": {"use_dora": True},
    "bias": {"bias": "all"},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "init_lora_weights": {"init_lora_weights": "pissa"},
    "rank 1000": {"r": 1000},
    "rank_pattern": {"rank_pattern": {"q_proj": 4}},
    "alpha_pattern": {"alpha_pattern": {"q_proj": 4}},
    "target_parameters": {"target_parameters": ["mlp.experts.gate_up_proj"]},
    "lm_head": {"target_modules": ["q_proj", "lm_head"]},
    "embed_tokens": {"target_modules": r".*embed_tokens"},
}
# What vLLM's reader silently ignores (`vllm/lora/peft_helper.py`), and TRL's trainer does not look at.
IGNORED = {
    "lora_bias": {"lora_bias": True},
    "alora_invocation_tokens": {"alora_invocation_tokens": [5, 6]},
    "trainable_token_indices": {"trainable_token_indices": [5]},
    "layer_replication": {"layer_replication": [[0, 2], [1, 2]]},
    "lora_ga": {"init_lora_weights": "lora_ga"},
}


def test_what_vllm_cannot_serve_is_refused_by_name():
    for named, changes in (REFUSED | IGNORED).items():
        with pytest.raises(RolloutError, match=named):
            served_rank(LoraConfig(**{"r": 16, **changes}))
    with torch.device("meta"):
        mixture = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SIZES, num_experts=4))
        model = get_peft_model(mixture, LoraConfig(r=8, target_modules="all-linear"))
    with pytest.raises(RolloutError, match="`all-linear`"):
        served_rank(model.peft_config["default"])  # what PEFT makes of it


def test_every_other_field_that_is_not_at_its_default_is_refused(on_a_gpu):
    """A field that PEFT adds tomorrow is one of these until vLLM's reader was looked at."""
    known = adapter_sync._READ | adapter_sync._CHANGES_NO_PRODUCT
    for name in {field.name for field in fields(LoraConfig)}:
        config = LoraConfig(r=16)
        setattr(config, name, getattr(config, name) if name in adapter_sync._READ else "anything else")
        if name in known:
            assert served_rank(config) == 16
            continue
        with pytest.raises(RolloutError, match=f"{name}='anything else'"):
            served_rank(config)
        sync = choose_sync(args(vllm_mode="server"), config, False)
        assert sync.mode == "merge" and name in sync.reason
    with pytest.raises(RolloutError, match="AdaLoraConfig"):  # a subclass, with a diagonal of its own
        served_rank(AdaLoraConfig(total_step=10))
    assert served_rank(LoraConfig(init_lora_weights="orthogonal", use_rslora=True, lora_dropout=0.1)) == 8


@pytest.mark.parametrize("kind, named", [("norm", "norm.weight"), ("two", "together"), ("head", "LM head")])
def test_what_is_trained_in_addition_to_one_adapter_is_named(on_a_gpu, kind, named):
    """What no field of the config shows: weights unfrozen by hand, two adapters, a head that a pattern finds."""
    targets = r".*(q_proj|head)" if kind == "head" else ["q_proj"]
    policy = get_peft_model(tiny.tiny_model(), LoraConfig(r=4, target_modules=targets))
    if kind == "norm":
        policy.get_base_model().model.norm.weight.requires_grad_(True)
    if kind == "two":
        policy.add_adapter("other", LoraConfig(r=4, target_modules=["v_proj"]))
        policy.base_model.set_adapter(["default", "other"])
    peft_config = policy.peft_config["default"]
    with pytest.raises(RolloutError, match=named):
        choose_sync(args(rollout_sync="adapter"), peft_config, False, model=policy)
    sync = choose_sync(args(vllm_mode="server"), peft_config, False, model=policy)
    assert sync.mode == "merge" and named in sync.reason


def test_trl_refuses_the_same_adapters():
    """What TRL's asynchronous trainer accepts of the adapters above, if it can be imported."""
    asynchronous = pytest.importorskip("trl.experimental.async_grpo.async_grpo_trainer")
    assert asynchronous.VLLM_LORA_RANKS == adapter_sync._RANKS
    for name in REFUSED.keys() - {
        "rank 1000",
        "init_lora_weights",
        "rank_pattern",
        "alpha_pattern",
    }:  # which TRL looks at elsewhere, or not at all
        config = LoraConfig(**{"r": 16, "target_modules": "all-linear", **REFUSED[name]})
        with pytest.raises(ValueError):
            asynchronous.validate_lora_for_vllm_sync(SimpleNamespace(active_adapters=["x"], peft_config={"x": config}))


def test_warnings(tmp_path, monkeypatch):
    assert warnings_for(args(), Sync("adapter", "")) == []
    for changes, named in (
        ({"top_p": 0.9}, r"under top_p=0\.9 .*too small .*\(trl#6789\)"),
        ({"generation_kwargs": {"min_p": 0.1}}, r"under min_p=0\.1"),
        ({"vllm_mode": "server", "vllm_engine_kwargs": {"quantization": "fp8"}}, "vllm_engine_kwargs"),
        (
            {"rollouts_ahead": 1, "vllm_importance_sampling_correction": False},
            "nothing corrects for it.* vllm_importance_sampling_correction: true",
        ),
    ):
        (warning,) = warnings_for(args(**changes), Sync("adapter", ""))
        assert re.search(named, warning)
    rloo = {"use_vllm": True, "vllm_mode": "server", "top_p": 0.9, "use_cpu": True, "bf16": False}
    assert warnings_for(EfficientRLOOConfig(str(tmp_path), **rloo), Sync("adapter", "")) == []  # it has no weights
    monkeypatch.setattr(sync_choice, "WEIGHS_AS_1_16", False)  # TRL corrects them itself
    assert warnings_for(args(top_p=0.9), Sync("adapter", "")) == []


def test_a_version_loads_as_the_policy_and_old_ones_go(tmp_path):
    torch.manual_seed(0)
    policy = get_peft_model(tiny.tiny_model(), tiny.lora())
    versions = AdapterVersions("run", tmp_path / "shared")
    folders = [versions.publish(v, adapter_weights(policy), policy.peft_config["default"]) for v in (1, 2, 3)]
    assert folders[0].is_absolute() and (tmp_path / "shared").resolve() in folders[0].parents  # which a server sees
    loaded = PeftModel.from_pretrained(tiny.tiny_model(), folders[0])
    ids = torch.arange(5, 15)[None]
    torch.testing.assert_close(loaded(ids).logits, policy(ids).logits, rtol=0, atol=0)
    adapter = sum(p.nbytes for p in policy.parameters() if p.requires_grad)
    on_disk = load_file(folders[0] / "adapter_model.safetensors")
    assert versions.bytes == adapter == sum(tensor.nbytes for tensor in on_disk.values())
    versions.forget_before(3)
    assert [path.name for path in versions.root.iterdir()] == ["run-v3"]


def test_folders_of_killed_runs_go(tmp_path):
    policy = get_peft_model(tiny.tiny_model(), tiny.lora())
    killed = tmp_path / ".adapters-killed"
    (killed / "policy-v7").mkdir(parents=True)
    versions = AdapterVersions("policy", tmp_path, owns_folder=True)
    folders = [versions.publish(v, adapter_weights(policy), policy.peft_config["default"]) for v in (1, 2)]
    assert not killed.exists() and all(folder.is_dir() for folder in folders)


def products_that_vllm_reads(folder: Path) -> dict[str, torch.Tensor]:
    """B A of each module times the one scaling that vLLM computes of three fields of the config."""
    config = json.loads((folder / "adapter_config.json").read_text())
    scaling = config["lora_alpha"] / (math.sqrt(config["r"]) if config["use_rslora"] else config["r"])
    weights = load_file(folder / "adapter_model.safetensors")
    products = {}
    for name in {name.partition(".lora_")[0] for name in weights}:
        down = weights[f"{name}.lora_A.weight"]
        up = weights[f"{name}.lora_B.weight"]
        assert len(down) == up.shape[1] == config["r"]
        products[name] = scaling * up.double() @ down.double()
    return products


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_rslora": True},
        {"layers_to_transform": [1]},
        {"exclude_modules": ["up_proj"]},
    ],
)
def test_the_products_that_vllm_reads_are_pefts(tmp_path, changes):
    torch.manual_seed(0)
    targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=targets, **changes)
    policy = get_peft_model(tiny.tiny_model(), lora, adapter_name="mine")
    layers = {name: layer for name, layer in policy.named_modules() if isinstance(layer, LoraLayer)}
    for layer in layers.values():
        torch.nn.init.normal_(layer.lora_B["mine"].weight)
    versions = AdapterVersions("run", tmp_path)
    products = products_that_vllm_reads(versions.publish(1, adapter_weights(policy), policy.peft_config["mine"]))
    assert products.keys() == layers.keys()
    for name, layer in layers.items():
        expected = layer.lora_B["mine"].weight.double() @ layer.lora_A["mine"].weight.double() * layer.scaling["mine"]
        torch.testing.assert_close(products[name], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "compute, autocast, expected",
    [
        (torch.float32, "no", torch.float32),
        (torch.bfloat16, "no", torch.bfloat16),
        (torch.float16, "no", torch.float16),
        (torch.float32, "bf16", torch.bfloat16),  # `BitsAndBytesConfig`'s default under TRL's
        (torch.float32, "fp16", torch.float16),
        (torch.bfloat16, "bf16", torch.bfloat16),
    ],
)
def test_the_dtype_of_a_4_bit_layer_is_that_of_its_product(compute, autocast, expected):
    """Against the product of what was rounded to that dtype, whose result is rounded to it."""
    torch.manual_seed(0)
    layer = Linear4bit(64, 64, bias=False, compute_dtype=compute, quant_type="nf4")
    layer.weight = Params4bit(torch.randn(64, 64), requires_grad=False, quant_type="nf4")
    layer = layer.to("cpu")
    x = torch.randn(32, 64, requires_grad=True)
    layer(x)  # the weights are packed
    accelerator = SimpleNamespace(mixed_precision=autocast)
    assert trainer_dtype(layer, accelerator) == expected
    with torch.autocast("cpu", dtype=expected, enabled=autocast != "no"):
        out = layer(x).double()
    weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    product = x.detach().to(expected).double() @ weight.to(expected).double().T
    apart = (out - product.to(expected).double()).norm() / product.norm()
    assert apart < (1e-4 if expected == torch.float16 else 1e-6)  # fp16 products are summed in fp16 blocks


def test_an_engine_in_this_process_draws_in_the_trainers_dtype(tmp_path, monkeypatch):
    """Of a dense base, of a 4-bit one, whose copy has that dtype, too, and as the user sets it."""
    monkeypatch.setenv("TRL_FSDP_QLORA_CACHE", str(tmp_path))
    monkeypatch.setattr(engine, "AdapterEngine", lambda **options: SimpleNamespace(**options))
    packed = qlora.load(qlora.make_checkpoint(tmp_path / "packed"))

    def started(model, mixed_precision, **changes):
        accelerator = SimpleNamespace(
            mixed_precision=mixed_precision, num_processes=1, is_main_process=True, device=torch.device("cuda")
        )
        settings = {"vllm_adapter_dir": None, "vllm_engine_kwargs": None, "output_dir": tmp_path, **changes}
        policy = (
            model if isinstance(model, PeftModel) else get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
        )
        arguments = {"model": policy, "accelerator": accelerator, "processing_class": qlora.make_tokenizer()}
        return engine.start_engine(SimpleNamespace(**settings), "not shared", mode="colocate", **arguments)

    for model, mixed_precision, dtype in (
        (tiny.tiny_model().to(torch.bfloat16), "fp16", "float16"),
        (tiny.tiny_model().to(torch.float16), "no", "float16"),
        (tiny.tiny_model(), "bf16", "bfloat16"),
        (packed, "no", "float32"),
        (packed, "fp16", "float16"),
    ):
        begun = started(copy.deepcopy(model), mixed_precision)
        assert begun.engine_kwargs == {"dtype": dtype}
        if model is packed:
            assert json.loads((Path(begun.base) / "config.json").read_text())["dtype"] == dtype
    options = {"dtype": "float32", "quantization": "fp8"}
    assert started(tiny.tiny_model(), "bf16", vllm_engine_kwargs=options).engine_kwargs == options


class Asleep:
    """vLLM's `LLM` before 0.31, which has no `release_kv_cache_memory`: what is copied or drawn needs its memory to be
    there.
    """

    def __init__(self):
        self.there = {"weights", "kv_cache"}
        self.llm_engine = self

    def sleep(self, level=1):
        assert level == 1  # 2 throws the base away, and 0 frees nothing
        self.there = set()

    def wake_up(self, tags=None):
        assert not self.there & set(tags)
        self.there |= set(tags)

    def add_lora(self, request):
        assert "weights" in self.there
        return True

    def remove_lora(self, number):
        assert "weights" in self.there

    def generate(self, prompts, lora_request):
        assert self.there == {"weights", "kv_cache"}
        return None if lora_request is None else lora_request.lora_int_id


def test_an_older_vllm_sleeps_with_its_weights_in_host_memory():
    """Steps as the trainer makes them: a sync, a rollout; then a rollout without a sync."""
    older = Asleep()
    serving = _Serving(older)
    serving.sleep()
    for version in (1, 2):
        serving.load(SimpleNamespace(lora_int_id=version, lora_path="adapter"))
        for _ in range(2):
            serving.wake_up(tags=["kv_cache"])
            assert serving.generate(["prompt"]) == version
            assert serving.without_adapter().generate(["prompt"]) is None
            serving.sleep()
            assert older.there == set()
