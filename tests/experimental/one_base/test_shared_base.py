"""One copy of the base for a trainer and the engine in its process: the same bytes, the same numbers, and no write."""

import copy
import gc
from functools import wraps
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Gemma3TextConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    TrainerCallback,
)

from tests import tiny
from tests.engines.vllm.runs import figures, grpo
from trl_fsdp_qlora import (
    AStarPOConfig,
    AStarPOTrainer,
    EfficientRLOOConfig,
    EfficientRLOOTrainer,
    TSPMOConfig,
    TSPMOTrainer,
)
from trl_fsdp_qlora.engines.vllm.adapter_sync import RolloutError
from trl_fsdp_qlora.engines.vllm.sync_choice import Sync, choose_sync, why_own_base
from trl_fsdp_qlora.tools.small_base import character_tokenizer

LORA = LoraConfig(r=2, target_modules=["0", "1", "2"])
DIFFERENCE = "sampling/sampling_logp_difference/mean"
ADAPTER = Sync("adapter", "asked for")


def args(**changes):
    values = {
        "vllm_share_base": "on", "vllm_mode": "colocate", "vllm_engine_kwargs": None, "vllm_tensor_parallel_size": 1,
        "deepspeed_plugin": None, "model_init_kwargs": {"dtype": "bfloat16"}, "fp16": False, "bf16": True,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


@pytest.mark.parametrize(
    "changes, sync, quantization, reason",
    [
        ({"vllm_mode": "server"}, ADAPTER, None, "server"),
        ({}, Sync("merge", "asked for"), None, "rollout_sync: adapter"),
        ({}, ADAPTER, BitsAndBytesConfig(load_in_8bit=True), "another way than bitsandbytes' 4 bits"),
        ({}, ADAPTER, {"quant_method": "awq", "bits": 4}, "another way than bitsandbytes' 4 bits"),
        ({"deepspeed_plugin": SimpleNamespace(zero_stage=3)}, ADAPTER, None, "DDP"),
        ({"vllm_tensor_parallel_size": 2}, ADAPTER, None, "vllm_tensor_parallel_size: 1"),
        ({"vllm_engine_kwargs": {"quantization": "fp8"}}, ADAPTER, None, "quantization"),
        ({"model_init_kwargs": None}, ADAPTER, None, "held in float32 and vLLM draws in bfloat16"),
        ({"model_init_kwargs": None, "fp16": True}, ADAPTER, None, "dtype: float16"),
        ({"vllm_engine_kwargs": {"dtype": torch.float16}}, ADAPTER, None, "dtype: float16"),
    ],
)
def test_a_base_that_cannot_be_shared_is_refused_before_loading(changes, sync, quantization, reason):
    with pytest.raises(RolloutError, match=reason):
        why_own_base(args(**changes), sync, quantization, "model")


WRITERS = {
    "merging": ({"rollout_sync": "merge"}, LoraConfig(), "set rollout_sync: adapter"),
    "full fine-tuning": ({}, None, "there is no adapter to send alone"),
    "DoRA": ({}, LoraConfig(use_dora=True), "use use_dora=False"),
    "modules_to_save": (
        {},
        LoraConfig(modules_to_save=["lm_head"]),
        r"modules_to_save=\['lm_head'\] are trained",
    ),
    "biases": ({}, LoraConfig(bias="all"), "use bias='none'"),
    "tokens": ({}, LoraConfig(trainable_token_indices=[5]), "trainable_token_indices"),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_what_trains_or_writes_the_base_does_not_share_it(writer):
    """It is an error before the base is loaded, which names what to change."""
    changes, peft_config, reason = WRITERS[writer]
    settings = args(use_vllm=True, **{"rollout_sync": "auto", **changes})
    sync = choose_sync(settings, peft_config, quantized=False)
    assert sync.mode == "merge"
    with pytest.raises(RolloutError, match=f"vllm_share_base: true cannot be: .*{reason}"):
        why_own_base(settings, sync, None, "model")


def test_a_base_is_shared_if_asked_for():
    assert why_own_base(args(), ADAPTER, None, "model") is None
    for in_4_bits in (BitsAndBytesConfig(load_in_4bit=True), {"load_in_4bit": True}):  # whatever the rest is held in
        assert why_own_base(args(model_init_kwargs=None), ADAPTER, in_4_bits, "model") is None
    assert why_own_base(args(vllm_share_base="off"), ADAPTER, None, "model") == "vllm_share_base is off"


SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "vocab_size": 50, "pad_token_id": 0,
}  # fmt: skip
WITHOUT_HEAD_SIZE = {name: value for name, value in SIZES.items() if name != "head_dim"}
FAMILIES = {
    "Llama": LlamaConfig(**SIZES),
    "Qwen2": Qwen2Config(**WITHOUT_HEAD_SIZE),
    "Qwen3": Qwen3Config(**SIZES),
    "Mistral": MistralConfig(**SIZES),
    "Phi-3": Phi3Config(**WITHOUT_HEAD_SIZE),
    "Gemma 3": Gemma3TextConfig(**SIZES),
    "Qwen3-MoE": Qwen3MoeConfig(**SIZES, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2),
    "Granite hybrid": GraniteMoeHybridConfig(
        **WITHOUT_HEAD_SIZE, layer_types=["mamba", "attention"], mamba_n_heads=8, mamba_d_head=32, mamba_d_state=16,
        num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=256,
    ),
}  # fmt: skip
MODELS = [(name, head) for name in FAMILIES for head in ("own", "tied") if (name, head) != ("Gemma 3", "own")]
WITHOUT_LORA = {"Qwen3-MoE": "vLLM 0.31's LoRA on experts needs Triton"}
IN_16_BITS = {"Granite hybrid": "vLLM's convolution on CPUs"}
# What is shared and what each side holds, if it is more than norms.
SHARED_AND_OWN = {
    "Qwen2": ("attention, MLP, embeddings, head", "norms, biases"),
    "Qwen3-MoE": ("router, attention, embeddings, head", "norms, experts"),
    "Granite hybrid": ("attention, MLP, mamba, embeddings, head", "norms, biases, convolution, decay"),
}
# Part of a parameter's name -> its kind; the first that fits.
KINDS = {
    "norm": "norms", ".bias": "biases", "conv1d": "convolution", "A_log": "decay", "mamba.D": "decay",
    "dt_bias": "decay", ".experts.": "experts", "mlp.gate.": "router", "attn": "attention", "mlp": "MLP",
    "mamba": "mamba", "embed_tokens": "embeddings", "lm_head": "head",
}  # fmt: skip


def kinds(names) -> str:
    found = {next(kind for part, kind in KINDS.items() if part in name) for name in names}
    return ", ".join(sorted(found, key=list(KINDS.values()).index))


def storages(*models) -> dict[int, int]:
    """Address -> bytes of what models hold, what several hold once; without adapters."""
    return {
        parameter.untyped_storage().data_ptr(): parameter.untyped_storage().nbytes()
        for model in models
        for name, parameter in model.named_parameters()
        if "lora_" not in name
    }


def model_of(llm):
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    return worker.model_runner.model


@pytest.fixture
def ranks_of_experts(monkeypatch):
    """vLLM makes its group of ranks for experts with a process's first engine, if that one has experts."""
    from vllm.distributed import parallel_state

    if parallel_state._EP is None and parallel_state._TP is not None:
        monkeypatch.setattr(parallel_state, "_EP", parallel_state._TP)


def drawn_logps(llm, prompt, tokens=20):
    """Tokens that an engine draws, and its log-probabilities of them."""
    from vllm import SamplingParams

    (answer,) = llm.generate(
        [{"prompt_token_ids": prompt}],
        sampling_params=SamplingParams(max_tokens=tokens, logprobs=0, ignore_eos=True),
        use_tqdm=False,
    )
    drawn = list(answer.outputs[0].token_ids)
    logps = [row[token].logprob for row, token in zip(answer.outputs[0].logprobs, drawn, strict=True)]
    return drawn, torch.tensor(logps)


@torch.no_grad()
def policy_logps(model, prompt, drawn):
    logps = model(torch.tensor([prompt + drawn])).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return logps.gather(1, torch.tensor(drawn)[:, None])[:, 0]


@pytest.mark.vllm
@pytest.mark.parametrize(
    "name, head",
    [
        pytest.param(*model, marks=[] if model == ("Llama", "tied") else [pytest.mark.exhaustive, pytest.mark.slow])
        for model in MODELS
    ],
)
def test_the_trainer_computes_with_the_engines_bytes(name, head, ranks_of_experts, tmp_path):
    """Bit for bit as a copy of its own; both hold no more than the engine alone and what is not shared."""
    from vllm import LLM

    from trl_fsdp_qlora.experimental.one_base.shared_base import sharing

    torch.manual_seed(0)
    dtype = torch.bfloat16 if name in IN_16_BITS else torch.float32
    config = copy.deepcopy(FAMILIES[name])
    config.tie_word_embeddings = head == "tied"
    alone = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    alone.save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    targets = ["q_proj", "o_proj"] if name in WITHOUT_LORA else "all-linear"
    policy = get_peft_model(copy.deepcopy(alone), LoraConfig(r=4, target_modules=targets)).eval()
    lora = {} if name in WITHOUT_LORA else {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
    with sharing(policy) as (shared, options):
        llm = LLM(
            str(tmp_path), dtype=str(dtype).removeprefix("torch."), enforce_eager=True, max_model_len=128,
            block_size=32, max_num_seqs=4, num_gpu_blocks_override=64, **lora, **options,
        )  # fmt: skip
    sizes = {key: parameter.nbytes for key, parameter in alone.named_parameters()}
    assert sizes.keys() == shared.parameters.keys() | shared.not_shared.keys()
    own = sum(sizes[key] for key in shared.not_shared)
    its_shared, its_own = SHARED_AND_OWN.get(name, ("attention, MLP, embeddings, head", "norms"))
    assert kinds(shared.parameters) == (its_shared.removesuffix(", head") if head == "tied" else its_shared)
    assert kinds(shared.not_shared) == its_own
    assert own < 0.01 * sum(sizes.values()) or name == "Qwen3-MoE"
    ids = torch.randint(5, 50, (2, 20))
    with torch.no_grad():
        assert torch.equal(policy(ids).logits, alone(ids).logits)
    of_engine = sum(storages(model_of(llm)).values())
    assert sum(storages(model_of(llm), policy.get_base_model()).values()) == of_engine + own
    prompt = list(range(5, 15))
    drawn, sampled = drawn_logps(llm, prompt)
    off = 0.02 if name in IN_16_BITS else 1e-4
    torch.testing.assert_close(sampled, policy_logps(alone, prompt, drawn), rtol=0, atol=off, check_dtype=False)


def writes(linear):
    linear.weight.data.copy_(torch.ones(linear.weight.shape))


def keeps_a_view(linear):
    linear.flat = linear.weight.data.view(-1)


@pytest.mark.vllm
@pytest.mark.parametrize("does", [writes, keeps_a_view])
def test_a_class_that_uses_an_unloaded_weight_is_refused(does, base, tmp_path, monkeypatch):
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    create = Qwen3ForCausalLM.__init__

    @wraps(create)  # vLLM reads the signature
    def create_and_use(model, *args, **kwargs):
        create(model, *args, **kwargs)
        does(model.model.layers[1].mlp.down_proj)

    monkeypatch.setattr(Qwen3ForCausalLM, "__init__", create_and_use)
    with pytest.raises(RolloutError, match="vllm_share_base"):
        grpo(base, tmp_path, vllm_share_base="on", max_steps=2)


@pytest.fixture
def plain_products():
    """The products of a shared base on CPUs, for an engine with a base of its own, too."""
    from trl_fsdp_qlora.compat.vllm import plain_weights_on_cpu

    with plain_weights_on_cpu():
        yield


@pytest.mark.vllm
def test_ten_steps_are_those_of_two_copies(plain_products, base, tmp_path):
    runs = {}
    for share in ("on", "off"):
        trainer = grpo(base, tmp_path / share, vllm_share_base=share, rollout_sync="auto", max_steps=10)
        assert trainer.sync.mode == "adapter"
        lines = [line for _, line in trainer.features() if "vLLM" in line]
        assert any(("shares" if share == "on" else "vllm_share_base is off") in line for line in lines)
        trainer.train()
        assert max(figures(trainer, DIFFERENCE)) < 1e-5
        runs[share] = (figures(trainer, "loss"), figures(trainer, "reward"))
    assert runs["on"] == runs["off"]


class Merges(TrainerCallback):
    """What is often done to look at a model in the middle of a run, and then forgotten to undo."""

    def on_step_end(self, args, state, control, model, **kwargs):
        if state.global_step == 2:
            model.merge_adapter()


@pytest.mark.vllm
def test_a_write_into_the_shared_base_ends_the_run(base, tmp_path):
    trainer = grpo(base, tmp_path, vllm_share_base="on", max_steps=4)
    trainer.add_callback(Merges())
    with pytest.raises(RolloutError, match=r"layers\.0\.\w+\.\w+_proj\.weight"):
        trainer.train()
    assert trainer.state.global_step == 2


class TrainsTheBase(TrainerCallback):
    """Gives an optimizer a parameter of the base in the middle of a run."""

    def on_step_end(self, args, state, control, model, optimizer, **kwargs):
        if state.global_step == 1:
            weight = model.get_base_model().model.layers[1].mlp.down_proj.base_layer.weight
            weight.requires_grad_(True)
            optimizer.add_param_group({"params": [weight]})


@pytest.mark.vllm
def test_an_optimizer_with_a_parameter_of_the_base_ends_the_run(base, tmp_path):
    """Before its first step, because the parameter is not frozen any more."""
    trainer = grpo(base, tmp_path, vllm_share_base="on", max_steps=4)
    trainer.add_callback(TrainsTheBase())
    with pytest.raises(RolloutError, match=r"layers\.1\.mlp\.down_proj\.weight"):
        trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.vllm
@pytest.mark.parametrize("method", ["rloo", "t_spmo", "a_star_po"])
def test_other_trainers_train_with_one_base_and_log_it(base, tmp_path, capfd, method):
    trainer_class, config_class, values = {
        "rloo": (EfficientRLOOTrainer, EfficientRLOOConfig, {}),
        "t_spmo": (TSPMOTrainer, TSPMOConfig, {}),
        "a_star_po": (
            AStarPOTrainer,
            AStarPOConfig,
            {"num_generations": 1, "value_samples": 2},
        ),
    }[method]
    if method == "a_star_po":
        values.update(value_cache=str(tmp_path / "values"), eval_dataset=tiny.prompts(6))
    classes = {"trainer_class": trainer_class, "config_class": config_class}
    trainer = grpo(base, tmp_path / "run", vllm_share_base="on", max_steps=2, **classes, **values)
    lines = [line for _, line in trainer.features() if "vLLM" in line]
    assert [line.partition(":")[0] for line in lines[:2]] == [
        "vLLM gets the adapter alone",
        "vLLM draws in float32 (as the trainer computes)",
    ]
    assert "of the base with the trainer" in lines[2]
    trainer.train()
    start_up = " ".join(capfd.readouterr().out.split())
    assert "vLLM gets the adapter alone" in start_up and "of the base with the trainer" in start_up
    assert trainer.state.global_step == 2 and trainer.vllm_generation.version == 2
    shared = trainer.vllm_generation.shared_base
    shared.check()
    assert len(shared.parameters) > len(shared.not_shared)
    if method == "a_star_po":
        assert trainer.evaluate()["eval_reward"] >= 0
        shared.check()


class Held:
    """The most bytes that tensors hold at once, looked at whenever a layer is loaded and when its parts are there."""

    def __init__(self, monkeypatch):
        from trl_fsdp_qlora.experimental.one_base.shared_base import SharedBase

        self.most = 0
        layers, take_rows = SharedBase.layers, SharedBase.take_rows

        def watched_layers(shared):
            for layer in layers(shared):
                self.look()
                yield layer

        def look_first(take):
            def looked(*args):
                self.look()
                return take(*args)

            return looked

        monkeypatch.setattr(SharedBase, "layers", watched_layers)
        monkeypatch.setattr(SharedBase, "take_rows", look_first(take_rows))

    def look(self):
        storages = {}
        for thing in gc.get_objects():
            if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
                storage = thing.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        self.most = max(self.most, sum(storages.values()))


@pytest.mark.vllm
def test_the_peak_of_loading_is_one_copy_and_one_layer(tmp_path, monkeypatch):
    """And what the engine holds other than weights. A second copy would be eight layers."""
    from vllm import LLM

    from trl_fsdp_qlora.experimental.one_base.shared_base import sharing

    config = Qwen3Config(**{**FAMILIES["Qwen3"].to_dict(), "num_hidden_layers": 8, "layer_types": None})
    base = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    base.save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    policy = get_peft_model(base, LoraConfig(r=1, target_modules=["q_proj"]))
    layer = sum(parameter.nbytes for key, parameter in base.named_parameters() if ".layers.3." in key)
    gc.collect()
    held = Held(monkeypatch)
    held.look()
    before = held.most
    with sharing(policy) as (_, options):
        LLM(
            str(tmp_path), dtype="float32", enforce_eager=True, max_model_len=128, block_size=32, max_num_seqs=4,
            num_gpu_blocks_override=64, **options,
        )  # fmt: skip
    layers = (held.most - before) / layer
    assert 0.5 < layers < 2.2


@pytest.mark.vllm
def test_what_vllm_replaces_or_turns_over_stays_the_trainers_own(tmp_path):
    """After it was loaded a parameter may go; a square one may be transposed at the same address."""
    from trl_fsdp_qlora.experimental.one_base.shared_base import SharedBase

    policy = get_peft_model(torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(3))), LORA)
    shared = SharedBase(policy)
    weights = [parameter for name, parameter in policy.named_parameters() if "base_layer" in name]
    whole = torch.cat([weight.data for weight in weights])
    engine_model = torch.nn.ParameterList([torch.nn.Parameter(whole, requires_grad=False)])
    shared.take_rows([weights[0].data, weights[1].data, weights[2].data.T], engine_model[0].data)
    assert list(shared.parameters) == ["0.weight", "1.weight"]
    assert weights[1].data_ptr() == whole[4:].data_ptr() and weights[2].data_ptr() != whole[8:].data_ptr()
    shared.check()
    shared.settle(engine_model)
    assert list(shared.not_shared) == ["2.weight"] and "not 2.weight" in shared.describe()
    whole[5, 0] = -whole[5, 0]  # past the trainer's version counters
    with pytest.raises(RolloutError, match=r"1\.weight"):
        shared.check()
    engine_model[0] = torch.nn.Parameter(whole.clone(), requires_grad=False)
    shared.settle(engine_model)
    assert not shared.parameters and len(shared.not_shared) == 3
    shared.check()


@pytest.mark.vllm
def test_a_shared_weight_that_is_reordered_in_place_is_noticed():
    """What a kernel's own layout may be: no bit changes but its place."""
    from trl_fsdp_qlora.experimental.one_base.shared_base import SharedBase

    policy = get_peft_model(torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False)), LoraConfig(target_modules=["0"]))
    shared = SharedBase(policy)
    weight = policy.base_model.model[0].base_layer.weight
    whole = weight.data.clone()
    shared.take_rows([weight.data], whole)
    shared.check()
    whole.copy_(whole.roll(32, 0))  # halves swapped
    with pytest.raises(RolloutError, match=r"\.weight"):
        shared.check()
