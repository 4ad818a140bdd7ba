"""Planned activations against the same pass on real tensors: this package's packed pass, TRL's padded one, 4-bit
layers.

Covers `compat/fake_forms.py`, `compat/fake_tensors.py`, `tools/planning/fake_trainer.py`,
`tools/planning/rollout.py`.
"""

import contextlib
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import transformers as tf
import trl.trainer.utils
from datasets import Dataset
from peft import LoraConfig, get_peft_model

import trl_fsdp_qlora
from tests.benchmark_modules import benchmark
from tests.prefix_sharing.helpers import closed
from tests.tools.planning.models import LAYERS, config, folder, in_4_bits, settings, words
from trl_fsdp_qlora import (
    AStarPOConfig,
    EfficientDPOConfig,
    EfficientDPOTrainer,
    EfficientGRPOConfig,
    EfficientRLOOConfig,
    TSPMOConfig,
)
from trl_fsdp_qlora.compat.fake_forms import _attention, drop_as_on_a_gpu
from trl_fsdp_qlora.compat.fake_tensors import DeviceMode
from trl_fsdp_qlora.compat.memory import FakeTensorMode, PeakTracker
from trl_fsdp_qlora.engines.decode.completions import CompletionOptions, complete
from trl_fsdp_qlora.engines.decode.decoding import DecodedRows
from trl_fsdp_qlora.long_rows import tiles
from trl_fsdp_qlora.prefix_sharing.batch import Batch
from trl_fsdp_qlora.prefix_sharing.passes import PassPlan
from trl_fsdp_qlora.prefix_sharing.sharing import SharingOptions, install_sharing
from trl_fsdp_qlora.prefix_sharing.status import CannotPack
from trl_fsdp_qlora.scoring import frozen_head, logprobs
from trl_fsdp_qlora.tools.planning import fake_run
from trl_fsdp_qlora.tools.planning.fake_run import FakeRun
from trl_fsdp_qlora.tools.planning.launches import Launch
from trl_fsdp_qlora.tools.planning.settings import from_words
from trl_fsdp_qlora.tools.recipe.arguments import ScriptArguments
from trl_fsdp_qlora.tools.recipe.checks import lora_config
from trl_fsdp_qlora.tools.recipe.pairs import DPOScriptArguments
from trl_fsdp_qlora.tools.small_base import character_tokenizer
from trl_fsdp_qlora.trainers.step.step_scores import StepScores

# The plan counts kernels by their tensors; what they allocate inside for a moment differs by a few rows.
NEAR = 0.05


@pytest.fixture(autouse=True)
def touched_columns(monkeypatch):
    """The buffer of TRL's kernel as wide as what of it is written to: a tracker counts the rest too, which no host
    gives.
    """
    monkeypatch.setattr(trl.trainer.utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 1024)
    monkeypatch.setattr(logprobs, "VOCABULARY_TILE", 1024)


def built(run, base=None):
    torch.manual_seed(0)
    base = base or tf.AutoModelForCausalLM.from_config(config(), dtype=torch.float32)
    install_sharing(base, SharingOptions(compares=False, entropy_gradient=False))
    model = get_peft_model(base, lora_config(run.model)) if run.model.use_peft else base
    if run.gradient_checkpointing:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    if run.model.load_in_4bit:  # as TRL casts it
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.bfloat16()
    return model.train()


def measured(run, model, packed: bool, grad: bool = True) -> int:
    """Peak bytes of a pass on real tensors above the model, and gradients as micro-batches before it made them; of
    groups of equal prompts and completions of full length."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad and grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    rows = run.per_device_train_batch_size
    prompt = run.prompt_tokens
    ids = torch.randint(3, 512, (rows, prompt + run.max_completion_length))
    ids[:, :prompt] = ids[:: run.num_generations, :prompt].repeat_interleave(run.num_generations, 0)
    mask = torch.ones_like(ids)
    labels = ids.clone()
    labels[:, :prompt] = -100
    sharing = install_sharing(model, SharingOptions(compares=False, entropy_gradient=False))
    as_stock = nullcontext() if packed else closed(sharing)
    tracker = PeakTracker(*model.parameters(), *model.buffers(), *(parameter.grad for parameter in trained))
    with tracker, as_stock, torch.set_grad_enabled(grad):
        before = tracker.now
        out = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
        if grad:
            out.log_probs.sum().backward()
    return tracker.peak - before


def planned(run, packed: bool, grad: bool = True) -> int:
    if not packed:
        run = replace(run, values=run.values | {"prefix_sharing": "off"})
    return FakeRun(run, config(), False).step_bytes(run.per_device_train_batch_size, 1, grad)


@pytest.mark.parametrize(
    "packed, checkpointing, use_peft, grad",
    [
        (True, False, True, True),
        (True, True, True, True),
        (False, False, True, True),
        (False, True, True, True),
        (True, False, False, True),
        (True, True, False, True),
        (True, False, True, False),
    ],
)
def test_a_pass_peaks_where_it_was_planned(tmp_path, packed, checkpointing, use_peft, grad):
    few = {} if use_peft or not checkpointing else {"per_device_train_batch_size": 4, "max_completion_length": 16}
    run = settings(folder(tmp_path), gradient_checkpointing=checkpointing, use_peft=use_peft, **few)
    assert planned(run, packed, grad) == pytest.approx(measured(run, built(run), packed, grad), rel=NEAR)


def measured_step(run, model) -> tuple[int, PassPlan]:
    """Peak bytes of an optimizer step on real tensors, by shared passes, and its passes."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    rows = run.per_device_train_batch_size
    count = run.gradient_accumulation_steps
    prompt = run.prompt_tokens
    ids = torch.randint(3, 512, (rows * count, prompt + run.max_completion_length))
    ids[:, :prompt] = ids[:: run.num_generations, :prompt].repeat_interleave(run.num_generations, 0)
    labels = ids.clone()
    labels[:, :prompt] = -100
    batches = [
        Batch(*part) for part in zip(*(x.chunk(count) for x in (ids, torch.ones_like(ids), labels)), strict=True)
    ]
    sharing = install_sharing(model, SharingOptions(compares=False, entropy_gradient=False))
    plan = sharing.plan_step(batches, run.tokens_per_pass)
    scores = StepScores(plan, batches, True, sharing.packed_model.router_losses)
    tracker = PeakTracker(*model.parameters(), *model.buffers(), *(parameter.grad for parameter in trained))
    with tracker:
        before = tracker.now
        for number in range(count):
            scores.score(number, model).log_probs.sum().backward()
            scores.finish_backward(model, contextlib.nullcontext, contextlib.nullcontext)
    return tracker.peak - before, plan


ROW = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
JOINED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "tokens_per_pass": 300}
GROUP_OF_8 = ROW | {"gradient_accumulation_steps": 8, "num_generations": 8, "prompt_tokens": 100}
CUT = {"per_device_train_batch_size": 4, "tokens_per_pass": 250}
TWO_GROUPS_CUT = {"per_device_train_batch_size": 8, "tokens_per_pass": 280}


@pytest.mark.parametrize(
    "fields, checkpointing",
    [
        (JOINED, False),
        (TWO_GROUPS_CUT, False),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in [
                (ROW, True),
                (ROW, False),
                (JOINED, True),
                (GROUP_OF_8, True),
                (GROUP_OF_8, False),
                (CUT, True),
                (CUT, False),
            ]
        ),
        pytest.param(TWO_GROUPS_CUT, True, marks=pytest.mark.exhaustive),
    ],
)
def test_a_step_whose_passes_share_a_prompt_peaks_where_it_was_planned(tmp_path, fields, checkpointing):
    """Micro-batches of a row, joined ones, and ones that are cut."""
    changes = {"prompt_tokens": 200, "gradient_accumulation_steps": 1, **fields}
    run = settings(folder(tmp_path), gradient_checkpointing=checkpointing, **changes)
    peak, plan = measured_step(run, built(run))
    assert plan.is_shared
    batches = run.gradient_accumulation_steps
    planned_peak = FakeRun(run, config(), False).step_bytes(run.per_device_train_batch_size, batches)
    assert planned_peak == pytest.approx(peak, rel=NEAR)


METHODS = {
    "grpo": (EfficientGRPOConfig, {}),
    "grpo off": (EfficientGRPOConfig, {"prefix_sharing": "off"}),
    "rloo": (EfficientRLOOConfig, {}),
    "t_spmo": (TSPMOConfig, {}),
    "a_star_po": (AStarPOConfig, {"beta": 0.1}),
    "dpo": (EfficientDPOConfig, {}),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_plan_runs_the_trainers_own_loss(name, tmp_path, monkeypatch):
    """A loss that keeps a buffer until its backward is over is planned with that buffer."""
    config_class, fields = METHODS[name]
    line = words(folder(tmp_path, num_hidden_layers=1), **fields)
    script = ScriptArguments
    if config_class is EfficientDPOConfig:
        line = [word for i, word in enumerate(line) if "--num_generations" not in (word, line[i - 1])]
        script = DPOScriptArguments
    run = from_words(line, config_class, Launch(use_cpu=True), 48, script)
    shape = config(num_hidden_layers=1)

    def planned_bytes() -> int:
        monkeypatch.setattr(fake_run, "_measured", {})
        return FakeRun(run, shape, False).step_bytes(run.rows, 1)

    before = planned_bytes()
    trainer_class = getattr(trl_fsdp_qlora, run.method.trainer)
    stock = trainer_class._compute_loss

    def with_buffer(*args, **kwargs):
        loss = stock(*args, **kwargs)
        return loss + torch.empty(2**22, requires_grad=True).exp().sum() * 0

    monkeypatch.setattr(trainer_class, "_compute_loss", with_buffer)
    assert planned_bytes() - before >= 2**22 * 4


def test_a_step_of_dpo_peaks_where_it_was_planned(tmp_path):
    """Compared with the loss and the backward of a trainer on real tensors, with the pass of its reference."""
    fields = {"per_device_train_batch_size": 4, "disable_dropout": True}
    line = words(folder(tmp_path), **fields)
    line = [word for i, word in enumerate(line) if "--num_generations" not in (word, line[i - 1])]
    run = from_words([*line, "--max_length", "88"], EfficientDPOConfig, Launch(use_cpu=True), 48, DPOScriptArguments)
    args = EfficientDPOConfig(
        str(tmp_path), per_device_train_batch_size=4, use_cpu=True, bf16=False, report_to="none",
        gradient_checkpointing=False,
    )  # fmt: skip
    model = tf.AutoModelForCausalLM.from_config(config(), dtype=torch.float32)
    pairs = Dataset.from_list([{"prompt": "1+1=", "chosen": "2", "rejected": "3"}] * 4)
    trainer = EfficientDPOTrainer(
        model,
        args=args,
        train_dataset=pairs,
        processing_class=character_tokenizer(),
        peft_config=lora_config(run.model),
    )
    trainer.sharing.options = replace(trainer.sharing.options, compares=False)
    model = trainer.model.train()
    ids = torch.randint(3, 512, (4, 88)).repeat(2, 1)  # chosen, then rejected
    ids[4:, 48:] = torch.randint(3, 512, (4, 40))
    completion_mask = torch.ones_like(ids)
    completion_mask[:, :48] = 0
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": completion_mask}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    with PeakTracker(*model.parameters(), *model.buffers(), *(parameter.grad for parameter in trained)) as tracker:
        before = tracker.now
        trainer.compute_loss(model, inputs).backward()
    planned_bytes = FakeRun(run, config(), False).step_bytes(run.rows, 1)
    assert planned_bytes == pytest.approx(tracker.peak - before, rel=NEAR)


def test_bytes_are_those_of_storages_that_live():
    with FakeTensorMode(), PeakTracker() as tracker:
        a = torch.empty(100, dtype=torch.uint8)
        b = a[50:]  # a view of the same
        assert tracker.now == 100
        assert torch.empty(0, device="cuda").device.type == "cuda" and a.device.type == "cpu"
        c = torch.empty(200, dtype=torch.uint8)
        assert (tracker.now, tracker.peak) == (300, 300)
        del c, a
        assert (tracker.now, tracker.peak) == (100, 300)
        del b
        assert tracker.now == 0


def test_4_bit_layers_take_their_dense_weight_while_they_compute(tmp_path):
    pytest.importorskip("bitsandbytes")
    tf.AutoModelForCausalLM.from_config(config()).save_pretrained(tmp_path)
    run = settings(tmp_path, load_in_4bit=True, dtype="float32", gradient_checkpointing=True)
    assert planned(run, True) == pytest.approx(measured(run, built(run, in_4_bits(tmp_path, False)), True), rel=NEAR)


SHAPE = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": LAYERS}


def hybrid() -> tf.Qwen3_5TextConfig:
    """Recurrent layers and attention."""
    heads = {
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 2,
        "head_dim": 32,
        # The values' are wider than the model, as Qwen3.5's are.
        "linear_num_value_heads": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    kinds = ["linear_attention"] * 3 + ["full_attention", "linear_attention"]
    return tf.Qwen3_5TextConfig(architectures=["Qwen3_5ForCausalLM"], **SHAPE, **heads, layer_types=kinds)


@pytest.mark.parametrize("of", [config, pytest.param(hybrid, marks=pytest.mark.exhaustive)])
def test_every_layer_adds_what_another_of_its_kind_added(of, tmp_path):
    """The model of five layers by slope, and run whole."""
    of().save_pretrained(tmp_path)
    run = settings(tmp_path)
    fake = FakeRun(run, of(), False)
    rows = run.per_device_train_batch_size
    assert fake.step_bytes(rows, 1) == pytest.approx(max(fake._run_step(range(LAYERS), rows, 1, True)), rel=0.01)


TRL_TILE = 320 * 8192 * 4
# The Jacobian, logits and weights, the targets' rows of the head.
FROZEN = 320 * 128 * 4 + 2 * 320 * 512 * 4 + 320 * 128 * 4


@pytest.mark.parametrize(
    "kernel, gathered, expected", [("auto", False, TRL_TILE), ("auto", True, FROZEN), ("frozen", False, FROZEN)]
)
def test_a_plan_for_a_gpu_counts_the_kernel_that_scores_there(kernel, gathered, expected, monkeypatch):
    monkeypatch.setattr(logprobs, "VOCABULARY_TILE", 8192)
    with DeviceMode("cuda"):
        hidden = torch.empty(320, 128, requires_grad=True)
        weight = torch.empty(512, 128)
        targets = torch.zeros(320, dtype=torch.long)
        with PeakTracker(hidden, weight) as tracker:
            before = tracker.now
            logprobs.score_positions(
                hidden, weight, None, targets, logprobs.HeadSettings(kernel=kernel, gathered=gathered)
            )
            assert tracker.peak - before == pytest.approx(expected, rel=0.02)  # and a few numbers per token


def test_a_kernel_that_takes_more_changes_the_plan(tmp_path, monkeypatch):
    """The frozen head, with buffers of twice as many words."""
    fields = {"num_hidden_layers": 1, "vocab_size": 32768}
    run = settings(folder(tmp_path, **fields), Launch(), lm_head_kernel="frozen")
    planned_bytes = []
    for vocabulary in (8192, 16384):
        monkeypatch.setattr(frozen_head, "VOCABULARY_CHUNK_GPU", vocabulary)
        monkeypatch.setattr(fake_run, "_measured", {})
        planned_bytes.append(FakeRun(run, config(**fields), True).step_bytes(8, 1))
    scored = 8 * run.max_completion_length
    two_buffers = 2 * scored * 8192 * 4
    assert planned_bytes[1] - planned_bytes[0] == pytest.approx(two_buffers, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fake_form_of_the_frozen_head_takes_its_bytes(dtype):
    """Compared with the same call on real tensors."""

    def peak() -> int:
        hidden = torch.empty(3000, 64, dtype=dtype, requires_grad=True)
        weight = torch.empty(5000, 64, dtype=dtype)
        with PeakTracker(hidden, weight) as tracker:
            before = tracker.now
            targets = torch.zeros(3000, dtype=torch.long)
            frozen = logprobs.HeadSettings(kernel="frozen")
            log_probs, *_ = logprobs.score_positions(hidden, weight, None, targets, frozen)
            log_probs.sum().backward()
            return tracker.peak - before

    on_real_tensors = peak()
    with DeviceMode("cpu"):
        assert peak() == pytest.approx(on_real_tensors, rel=0.02)


def test_the_fake_form_of_tiles_takes_their_bytes():
    """Compared with the same MLP on real tensors."""
    widths = (1000, 64, 256)

    def peak() -> int:
        mlp = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.SiLU(), torch.nn.Linear(256, 64))
        mlp.token_tiles = tiles.Tiled("MLP", mlp.forward, None, 50)
        hidden = torch.empty(1, 1000, 64, requires_grad=True)
        with PeakTracker(hidden, *mlp.parameters()) as tracker:
            before = tracker.now
            tiles._forward(mlp, hidden).sum().backward()
            return tracker.peak - before

    on_real_tensors = peak()
    assert on_real_tensors < 1000 * sum(widths) * 4
    with DeviceMode("cpu"):
        assert peak() == pytest.approx(on_real_tensors, rel=0.02)


@pytest.mark.parametrize("of", [config, hybrid])
def test_the_cache_is_the_one_that_generation_leaves(of, tmp_path):
    """Of a hybrid with the states of its recurrent layers."""
    of().save_pretrained(tmp_path)
    run = settings(tmp_path)
    model = tf.AutoModelForCausalLM.from_config(of(), dtype=torch.float32)
    ids = torch.randint(3, 512, (run.rollout_rows, run.prompt_tokens + run.max_completion_length))
    with torch.no_grad():
        layers = model(ids, use_cache=True).past_key_values.layers
    keys = [layer.keys.nbytes + layer.values.nbytes for layer in layers if getattr(layer, "keys", None) is not None]
    recurrent = [layer for layer in layers if hasattr(layer, "conv_states")]
    states = [x[0].nbytes for layer in recurrent for x in (layer.conv_states, layer.recurrent_states)]
    planned_bytes = FakeRun(run, of(), False).generation_bytes()
    # Next to the cache there are the tokens.
    assert planned_bytes.cache == pytest.approx(sum(keys) + sum(states), rel=1e-3)


@pytest.mark.parametrize("compact", [True, False])
def test_generation_peaks_where_it_was_planned(tmp_path, compact):
    """Compared with the same completions on real tensors, of two prompts that share nothing, one of them padded."""
    run = settings(folder(tmp_path), compact_generation=compact, prompt_tokens=100, max_completion_length=12)
    planned_bytes = FakeRun(run, config(), False).generation_bytes()
    model = built(run)
    longest = torch.randint(3, 511, (100,)).tolist()
    shorter = torch.randint(3, 511, (99,)).tolist()
    generation_config = tf.GenerationConfig(do_sample=True, max_new_tokens=12, pad_token_id=0, eos_token_id=[511])
    model.get_base_model().lm_head.weight.data[511] = 0
    with PeakTracker(*model.parameters(), *model.buffers()) as tracker:
        before = tracker.now
        complete(model, [longest] * 4 + [shorter] * 4, generation_config, CompletionOptions(compact=compact))
    peak = max(planned_bytes.prefill, planned_bytes.cache + planned_bytes.step)
    assert peak == pytest.approx(tracker.peak - before, rel=NEAR)


def test_a_token_step_makes_as_many_copies_of_its_logits_as_were_planned(tmp_path):
    """Compared with every allocation of torch's CPU allocator."""
    vocabulary = 65536
    fields = {"vocab_size": vocabulary, "num_hidden_layers": 1}
    run = settings(folder(tmp_path, **fields), temperature=0.9, top_k=0, max_completion_length=4)
    processors = tf.LogitsProcessorList([tf.TemperatureLogitsWarper(0.9)])
    ids = torch.zeros(run.rollout_rows, 4, dtype=torch.long)
    rows = torch.arange(run.rollout_rows)
    sampling = tf.GenerationConfig(do_sample=True)
    steps = DecodedRows(ids, rows, sampling, processors, tf.StoppingCriteriaList(), {})

    def step():
        logits = torch.zeros(run.rollout_rows, vocabulary)
        steps.append(logits)

    taken = benchmark("synthetic").peak_bytes(step, "cpu")
    planned_bytes = FakeRun(run, config(**fields), False).generation_bytes()
    assert planned_bytes.step == pytest.approx(taken, rel=NEAR)


def saved_bytes(run, model=None) -> int:
    """Bytes of the storages that the graph of `run()` keeps, without those of the model's weights."""
    weights = set() if model is None else {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {}

    def pack(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        kept = run()
    del kept
    return sum(size for pointer, size in storages.items() if pointer not in weights)


def test_attention_of_stock_keeps_repeated_keys_and_dropout_on_a_gpu_a_mask_of_bytes():
    heads, key_heads, tokens, size = 8, 2, 64, 16

    def kept(mask, value_size=size):
        query, key = (torch.randn(1, n, tokens, size, dtype=torch.bfloat16) for n in (heads, key_heads))
        value = torch.randn(1, key_heads, tokens, value_size, dtype=torch.bfloat16)
        inputs = [x.requires_grad_() for x in (query, key, value)]
        return saved_bytes(lambda: _attention(torch.nn.Module(), *inputs, mask))

    token = 2 * tokens * size
    lse = 4 * heads * tokens
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool)
    assert kept(None) == token * (2 * heads + 2 * key_heads) + lse
    assert kept(mask) == token * 4 * heads + lse
    assert kept(mask, value_size=size // 2) == token * 3 * heads + lse
    query = torch.randn(1, heads, tokens, size, requires_grad=True)
    dropout = torch.nn.Sequential(torch.nn.Dropout(0.5))
    drop_as_on_a_gpu(dropout)
    assert saved_bytes(lambda: dropout(query)) == query.numel()


def test_packed_rows_in_half_precision_are_planned_on_a_gpu_by_cascade(tmp_path):
    """A row in float32 is refused by `cascade` there."""
    one_layer = config(num_hidden_layers=1)
    fields = {"bf16": True, "dtype": "bfloat16"}
    auto = settings(folder(tmp_path, num_hidden_layers=1), **fields)
    named = settings(tmp_path, prefix_sharing="cascade", **fields)
    assert FakeRun(named, one_layer, True).step_bytes(8, 1) == FakeRun(auto, one_layer, True).step_bytes(8, 1)
    with pytest.raises(CannotPack, match="half precision"):
        FakeRun(settings(tmp_path, prefix_sharing="cascade"), one_layer, True).step_bytes(8, 1)


def test_what_lora_keeps_of_a_layer_whose_projections_share_their_input():
    """The input once, and not once for each of q, k and v; with dropout each has an input and a mask of its own."""
    rank, tokens = 4, 64
    hidden = torch.randn(1, tokens, config().hidden_size, requires_grad=True)

    def kept(**fields) -> int:
        base = tf.AutoModelForCausalLM.from_config(config(num_hidden_layers=1), dtype=torch.float32)
        targets = ["q_proj", "k_proj", "v_proj"]
        get_peft_model(base, LoraConfig(r=rank, target_modules=targets, **fields)).train()
        projections = [base.model.layers[0].self_attn.get_submodule(name) for name in targets]
        return saved_bytes(lambda: [project(hidden) for project in projections], base)

    low = 3 * 4 * tokens * rank
    assert kept() == hidden.nbytes + low
    assert kept(lora_dropout=0.05) == 3 * 2 * hidden.nbytes + low
