"""GRPO, T-SPMO and A*-PO with vLLM in their process: same tokens as PEFT, the adapter alone is moved, a fault
shows.

Covers `engines/vllm/engine.py`.
"""

import re

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests import tiny
from tests.engines.vllm.runs import figures, grpo, on_quantized
from trl_fsdp_qlora import AStarPOConfig, AStarPOTrainer, TSPMOConfig, TSPMOTrainer
from trl_fsdp_qlora.engines.decode.completions import EngineModel, generate
from trl_fsdp_qlora.engines.vllm.adapter_sync import AdapterVersions, RolloutError
from trl_fsdp_qlora.engines.vllm.engine import AdapterEngine

pytestmark = pytest.mark.vllm

DIFFERENCE = "sampling/sampling_logp_difference/mean"


@pytest.fixture
def start(shared_engine, base, tmp_path):
    def make(model=base, **changes):
        return grpo(model, tmp_path / "out", **changes)

    return make


@pytest.mark.parametrize("method", ["grpo", "t_spmo"])
def test_a_run_moves_the_adapter_alone(start, method):
    classes = {"trainer_class": TSPMOTrainer, "config_class": TSPMOConfig} if method == "t_spmo" else {}
    trainer = start(max_steps=4, **classes)
    assert trainer.sync.mode == "adapter"
    trainer.train()
    adapter = sum(p.numel() * p.element_size() for p in trainer.model.parameters() if p.requires_grad)
    assert trainer.vllm_generation.versions.bytes == adapter
    assert figures(trainer, "time/weight_sync_s")[-1] > 0
    assert max(figures(trainer, DIFFERENCE)) < 1e-5
    weights = figures(trainer, "sampling/importance_sampling_ratio/mean")
    assert len(weights) == (4 if method == "grpo" else 0) and all(abs(weight - 1) < 1e-4 for weight in weights)
    assert not figures(trainer, "time/old_pass_s")
    assert trainer.vllm_generation.versions.root.is_dir()
    for _ in range(2):  # accuracy goes through the engine, which is sent the last adapter once
        with trainer.generating() as (model, synced_gpus):
            assert isinstance(model, EngineModel) and not synced_gpus
        assert trainer.vllm_generation.version == 5


@pytest.mark.parametrize("method", ["grpo", "t_spmo"])
def test_groups_that_are_replaced(start, method, monkeypatch):
    """What is trained on is what the engine drew, in several requests of an optimizer step."""
    classes = {"trainer_class": TSPMOTrainer, "config_class": TSPMOConfig} if method == "t_spmo" else {}
    changes = {
        "dynamic_sampling": True,
        "max_completion_length": 3,
        "reward": tiny.even_start,
    }
    trainer = start(max_steps=4, **classes, **changes)
    asked = []
    versions = []
    ask = trainer.vllm_generation.llm._llm.generate

    def recorded(prompts, **options):
        asked.append(len(prompts))
        versions.append(options["lora_request"].lora_name)
        return ask(prompts, **options)

    monkeypatch.setattr(trainer.vllm_generation.llm._llm, "generate", recorded)
    trainer.train()
    # Four completions of two prompts first; then those of others in the place of groups that are equal.
    assert asked[0] == 8 and len(asked) > 4
    assert [name.rpartition("-")[2] for name in dict.fromkeys(versions)] == ["v1", "v2", "v3", "v4"]
    # Each completion has its own log-probabilities behind it, whichever request it came from.
    assert max(figures(trainer, DIFFERENCE)) < 1e-5
    # The last batch: groups of four, with their own rewards.
    prompts = list(trainer._logs["prompt"])[-8:]
    completions = list(trainer._logs["completion"])[-8:]
    assert prompts == [prompt for prompt in prompts[::4] for _ in range(4)]
    rewards = torch.tensor(list(trainer._logs["rewards"]["even_start"])[-8:])
    assert rewards.tolist() == tiny.even_start(completions)


@pytest.mark.parametrize(
    "changes",
    [
        {"generation_kwargs": {"min_tokens": 8}, "top_p": 0.8, "repetition_penalty": 1.2},
        {
            "generation_kwargs": {"logit_bias": {9: 3.0}, "bad_words": ["7"], "presence_penalty": 0.5},
            "temperature": 0.8,
        },
    ],
    ids=["min_tokens", "logit_bias"],
)
def test_what_vllm_draws_from_need_not_be_the_policy(start, changes):
    trainer = start(max_steps=3, **changes)
    trainer.train()
    # The completions come from another distribution: its weights show that, and it is not taken for another model.
    assert max(figures(trainer, DIFFERENCE)) > 1e-3
    assert max(abs(x - 1) for x in figures(trainer, "sampling/importance_sampling_ratio/mean")) > 1e-3
    assert min(figures(trainer, "completions/min_length")) >= changes["generation_kwargs"].get("min_tokens", 0)


def skip_sync(engine):
    load = engine._load
    engine._load = lambda version, folder: load(version, folder) if version < 3 else None


def scale_twice(engine):
    publish = engine.versions.publish

    def with_another_alpha(version, weights, config):
        return publish(version, weights, LoraConfig(**{**config.to_dict(), "lora_alpha": 16}))

    engine.versions.publish = with_another_alpha


def old_name(engine):
    """The folder is new, the name and id are the first version's: vLLM has it already and reads nothing."""
    from vllm.lora.request import LoRARequest

    add = engine.llm.llm_engine.add_lora

    def under_the_first_name(version, folder):
        request = LoRARequest("policy", 1, folder)
        add(request)
        engine.llm.adapter = request

    engine._load = under_the_first_name


@pytest.mark.parametrize("fault", [skip_sync, scale_twice, old_name])
def test_a_wrong_adapter_shows_in_the_metric(start, fault):
    trainer = start(max_steps=5)
    fault(trainer.vllm_generation)
    trainer.train()
    differences = figures(trainer, DIFFERENCE)
    assert differences[0] < 1e-5 and differences[-1] > 1e-3


def test_another_base_ends_the_run_at_the_first_sync(start, another_base, monkeypatch):
    begin = AdapterEngine._start_colocated

    def wrong(engine):
        engine.base = another_base
        begin(engine)

    monkeypatch.setattr(AdapterEngine, "_start_colocated", wrong)
    # As many tokens as are judged, of completions whose rewards are all equal.
    whole = {"generation_kwargs": {"ignore_eos": True}, "skip_zero_advantage": False}
    trainer = start(per_device_train_batch_size=16, **whole)
    with pytest.raises(RolloutError, match=re.escape(another_base)):
        trainer.train()
    assert trainer.state.global_step == 0


def served(checkpoint, folder, scale, **changes):
    """A tokenizer, a policy with a random adapter, and an engine that was sent it."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    whole = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    lora = LoraConfig(**{"r": 8, "lora_alpha": 16, "target_modules": "all-linear", **changes})
    policy = get_peft_model(whole, lora).eval()
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data = scale * torch.randn_like(parameter)
    arguments = {
        "max_lora_rank": 8,
        "versions": AdapterVersions("greedy", folder),
        "max_model_length": 128,
        "max_num_seqs": 16,
        "gpu_memory_utilization": 0.3,
        "max_completion_length": 64,
        "model": policy,
        "accelerator": Accelerator(cpu=True),
        "processing_class": tokenizer,
    }
    dtype = {"dtype": "float32"}
    engine = AdapterEngine(base=str(checkpoint), mode="colocate", temperature=0.0, engine_kwargs=dtype, **arguments)
    engine.sync_weights()
    return tokenizer, policy, engine


@torch.no_grad()
def scores_of(policy, prompt, completion):
    """The policy's logits at the tokens of a completion."""
    return policy(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1].float()


QUESTIONS = [f"A shop sells {i} apples a day. How many in {i + 2} days?" for i in range(3, 11)]


@pytest.mark.parametrize("model", ["base", pytest.param("smollm2", marks=pytest.mark.slow)])
def test_greedy_is_pefts_token_for_token(shared_engine, model, request, tmp_path):
    """Up to ties; and the log-probabilities of sampled tokens are the policy's."""
    tokenizer, policy, engine = served(request.getfixturevalue(model), tmp_path, 0.05 if model == "base" else 0.02)
    assert engine.versions.bytes == sum(p.numel() * 4 for p in policy.parameters() if p.requires_grad)
    texts = [f"{i}+{7 * i}=" for i in range(1, 17)] if model == "base" else QUESTIONS
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    ends = policy.generation_config.eos_token_id or []  # what vLLM stops at, too
    ends = sorted({tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])})
    config = GenerationConfig(
        max_new_tokens=64, do_sample=False, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id or 0
    )
    expected = generate(policy, prompts, config)
    drawn = engine.generate(prompts, None, 1)[1]
    ties = 0
    for prompt, mine, theirs in zip(prompts, drawn, expected, strict=True):
        if list(mine) != list(theirs):
            where = next((i for i, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]), None)
            assert where is not None, f"one continues after the other's end: {mine} {theirs}"
            best = scores_of(policy, prompt, mine)[where].topk(2).values
            assert best[0] - best[1] < 1e-4, f"no tie: {mine} {theirs}"
            ties += 1
    assert ties <= len(prompts) // 4
    # The base alone draws something else, and the engine's stand-in for a model draws the same as the engine.
    alone = EngineModel(engine, policy.generation_config)
    assert sum(a != b for a, b in zip(generate(alone, prompts, config), expected, strict=True)) == ties
    base = EngineModel(engine.without_adapter(), policy.generation_config)
    with policy.disable_adapter():
        base_says = generate(base, prompts, config)
        assert sum(a != b for a, b in zip(base_says, generate(policy, prompts, config), strict=True)) <= ties + 1
    assert base_says != expected
    engine.temperature = 1.0
    differences = []
    _, drawn, logps, _ = engine.generate(prompts, None, 1)
    for prompt, mine, sampled in zip(prompts, drawn, logps, strict=True):
        policy_logps = scores_of(policy, prompt, mine).log_softmax(-1).gather(1, torch.tensor(mine)[:, None])[:, 0]
        differences += (torch.tensor([row[0] for row in sampled]) - policy_logps).abs().tolist()
    assert sum(differences) / len(differences) <= 1e-4


SERVED = {
    "rank-stabilized": {"use_rslora": True},
    "some layers": {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]},
    "some of a fused layer": {"target_modules": ["q_proj", "v_proj", "up_proj"]},
    "some left out": {"exclude_modules": ["k_proj"], "init_lora_weights": "gaussian"},
    "another name": {},
}


@torch.no_grad()
@pytest.mark.parametrize("kind", SERVED)
def test_log_probabilities_are_pefts_for_settings_vllm_reads(shared_engine, base, tmp_path, kind):
    """Sampled tokens' log-probabilities, of adapters on some layers and with another scaling."""
    tokenizer, policy, engine = served(base, tmp_path, 0.1, **SERVED[kind])
    if kind == "another name":
        policy.add_adapter("policy", LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        policy.set_adapter("policy")
        for name, parameter in policy.named_parameters():
            if "lora_B.policy" in name:
                parameter.data = torch.randn_like(parameter)
        engine.sync_weights()
    engine.temperature = 1.0
    prompts = [tokenizer(f"{i}+{7 * i}=")["input_ids"] for i in range(1, 9)]
    _, drawn, logps, _ = engine.generate(prompts, None, 1)
    differences = []
    of_adapter = []
    for prompt, mine, sampled in zip(prompts, drawn, logps, strict=True):
        chosen = torch.tensor(mine)[:, None]
        mine_logps = scores_of(policy, prompt, mine).log_softmax(-1).gather(1, chosen)[:, 0]
        with policy.disable_adapter():
            of_base = scores_of(policy, prompt, mine).log_softmax(-1).gather(1, chosen)[:, 0]
        differences += (torch.tensor([row[0] for row in sampled]) - mine_logps).abs().tolist()
        of_adapter += (of_base - mine_logps).abs().tolist()
    assert max(differences) < 1e-4  # float32, sums in another order
    assert sum(of_adapter) / len(of_adapter) > 1e-2


def test_equal_prompts_are_prefilled_once_and_drawn_apart(shared_engine, base, tmp_path):
    from vllm import SamplingParams

    tokenizer, policy, engine = served(base, tmp_path, 0.05)
    model = EngineModel(engine, policy.generation_config)
    config = GenerationConfig(max_new_tokens=12, do_sample=True, top_k=0, eos_token_id=[tokenizer.eos_token_id])
    prompts = [tokenizer("1+2=")["input_ids"]] * 8
    drawn = generate(model, prompts, config, seed=3)
    assert len(set(map(tuple, drawn))) == 8
    assert generate(model, prompts, config, seed=3) == drawn != generate(model, prompts, config, seed=4)
    prompt = {"prompt_token_ids": tokenizer("1+2=" * 10)["input_ids"][:40]}
    outputs = engine.llm.generate([prompt] * 4, sampling_params=SamplingParams(max_tokens=1), use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [0, 32, 32, 32]


def test_a_star_po_draws_both_stages_with_vllm(start, tmp_path, monkeypatch):
    classes = {"trainer_class": AStarPOTrainer, "config_class": AStarPOConfig}
    values = {"value_samples": 2, "value_cache": str(tmp_path / "values")}
    trainer = start(max_steps=3, num_generations=1, eval_dataset=tiny.prompts(6), **classes, **values)
    adapters = []
    ask = trainer.vllm_generation.llm._llm.generate

    def recorded(prompts, **options):
        adapters.append(options["lora_request"] and options["lora_request"].lora_name)
        return ask(prompts, **options)

    monkeypatch.setattr(trainer.vllm_generation.llm._llm, "generate", recorded)
    report = trainer.estimate_values()
    assert report.samples == 2 * report.prompts
    assert set(adapters) == {None}  # stage 1: the base
    adapters.clear()
    trainer.train()
    assert [name.rpartition("-")[2] for name in adapters] == ["v1", "v2", "v3"]
    assert max(figures(trainer, DIFFERENCE)) < 1e-5
    adapters.clear()
    assert trainer.evaluate()["eval_reward"] >= 0
    assert {name.rpartition("-")[2] for name in adapters} == {"v4"}  # after the last step


def test_the_engine_draws_in_the_dtype_of_mixed_precision(start):
    """The checkpoint is float32, and its products are bfloat16's in training."""
    trainer = start(max_steps=2, bf16=True)
    engine = trainer.vllm_generation.llm.llm_engine
    assert engine.model_config.dtype == torch.bfloat16
    trainer.train()
    assert 0 < max(figures(trainer, DIFFERENCE)) < 0.05  # sums in another order, rounded to 8 bits


def test_a_quantized_base_is_served_as_it_is_trained(shared_engine, quantized_base, tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_FSDP_QLORA_CACHE", str(tmp_path / "cache"))
    trainer = on_quantized(quantized_base[0], tmp_path / "out", max_steps=3)
    assert trainer.sync.mode == "adapter"
    assert trainer.vllm_generation.base.startswith(str(tmp_path / "cache" / "dequantized"))
    trainer.train()
    assert max(figures(trainer, DIFFERENCE)) < 1e-4
