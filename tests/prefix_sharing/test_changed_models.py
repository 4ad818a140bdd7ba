"""Models that change after `share_prompts`, and simultaneous calls: attention, wrappers, threads, exceptions."""

import contextlib
import copy
import functools
import itertools
import sys
import threading

import pytest
import torch
import transformers as tf
from peft import get_peft_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.tiny import lora, these_first
from trl_fsdp_qlora import share_prompts
from trl_fsdp_qlora.prefix_sharing import check
from trl_fsdp_qlora.prefix_sharing.status import PassType

from .helpers import (
    MAKE,
    VOCABULARY,
    assert_equal_gradients,
    build,
    counting_padded_forwards,
    gradients,
    with_stock_head,
)


def group(seed: int, prompt: int = 12, completion: int = 6) -> dict[str, torch.Tensor]:
    """Two groups of three rows with a common prompt each."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(2):
        tokens = torch.randint(3, VOCABULARY, (prompt,), generator=draw).expand(3, -1)
        rows.append(torch.cat([tokens, torch.randint(3, VOCABULARY, (3, completion), generator=draw)], dim=1))
    ids = torch.cat(rows)
    labels = ids.clone()
    labels[:, :prompt] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def pair(name: str):
    """A model as stock TRL trains it, and a copy that shares prompts."""
    stock = with_stock_head(build(name)).train()
    stock.enable_input_require_grads()
    ours = with_stock_head(build(name)).train()
    ours.enable_input_require_grads()
    return stock, share_prompts(ours)


def score(model, batch) -> torch.Tensor:
    return model(**batch, fused_lm_head=True).log_probs


def assert_alike(stock, ours, seed: int, packed: bool = True) -> None:
    """Values and gradients of a pass equal stock's, and the pass was packed, or was not."""
    results = []
    for model in (stock, ours):
        values = score(model, group(seed))
        (values * torch.linspace(0.3, 1.7, values.numel()).view_as(values)).sum().backward()
        results.append((values.detach(), gradients(model)))
    torch.testing.assert_close(results[1][0], results[0][0], atol=2e-5, rtol=1e-5)
    assert_equal_gradients(results[1][1], results[0][1], tolerance=2e-5)
    sharing = ours.prompt_sharing
    assert bool(sharing.figures.tokens) == packed, sharing.describe()


def wrap_by_hand(model, reentrant: bool) -> None:
    """As a user does who has read that a layer can be recomputed."""

    def checkpointed(forward):
        def run(hidden, *args, **kwargs):
            return checkpoint(lambda hidden: forward(hidden, *args, **kwargs), hidden, use_reentrant=reentrant)

        return run

    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.forward = checkpointed(layer.forward)


def wrap_with_the_mask(model, reentrant: bool) -> None:
    """The mask is an argument of the checkpoint, which keeps a detached copy of it."""

    def checkpointed(forward):
        def run(hidden, attention_mask=None, **kwargs):
            def recomputed(hidden, attention_mask):
                return forward(hidden, attention_mask=attention_mask, **kwargs)

            return checkpoint(recomputed, hidden, attention_mask, use_reentrant=reentrant)

        return run

    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.forward = checkpointed(layer.forward)


def wrap_by_torch(model, reentrant: bool) -> None:
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=kind)
    apply_activation_checkpointing(model, wrapper, lambda layer: isinstance(layer, GradientCheckpointingLayer))


def wrap_by_transformers(model, reentrant: bool) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})


WRAPPERS = (wrap_by_hand, wrap_with_the_mask, wrap_by_torch, wrap_by_transformers)


# The last is whether it is re-entrant. First, each wrapper once.
RECOMPUTED = these_first(
    [
        *itertools.product(["qwen3", "qwen3_5"], WRAPPERS, [True, False]),
        *itertools.product(["gemma2", "mistral_sliding", "mamba2"], [wrap_by_hand], [True, False]),
    ],
    ("qwen3", wrap_by_hand, True),
    ("qwen3", wrap_by_torch, False),
    ("qwen3_5", wrap_with_the_mask, True),
    ("qwen3_5", wrap_by_transformers, False),
)


@pytest.mark.parametrize(("name", "wrap", "reentrant"), RECOMPUTED)
def test_recomputed_layers_get_the_row_from_any_wrapper(name, wrap, reentrant):
    """Only two wrappers were known, and only before the first pass. Others silently gave wrong gradients."""
    stock, ours = pair(name)
    assert_alike(stock, ours, seed=1)
    for model in (stock, ours):
        wrap(model, reentrant)
    assert_alike(stock, ours, seed=2)
    stock, ours = pair(name)
    for model in (stock, ours):
        wrap(model, reentrant)
    assert_alike(stock, ours, seed=3)


def drop_the_mask(model) -> None:
    """A wrapper that recomputes a layer without its mask: right values, and wrong gradients of a packed row."""

    def dropping(forward):
        def run(hidden, attention_mask=None, **kwargs):
            def recomputed(hidden):
                mask = None if torch.is_grad_enabled() else attention_mask  # the forward records no graph
                return forward(hidden, attention_mask=mask, **kwargs)

            return checkpoint(recomputed, hidden, use_reentrant=True)

        return run

    for layer in model.model.layers:
        layer.forward = dropping(layer.forward)


@pytest.mark.parametrize("order", ["before the first pass", "after it"])
def test_gradients_are_compared_if_a_backward_follows(order):
    """The values of the packed pass are right here, and only its gradients are wrong. Without padding stock's are."""
    stock, ours = pair("llama")
    if order == "after it":
        assert_alike(stock, ours, seed=1)
    drop_the_mask(stock)
    drop_the_mask(ours)
    assert_alike(stock, ours, seed=2, packed=False)
    assert not ours.prompt_sharing.status.packs


def test_gradients_are_compared_after_values_were():
    """An evaluation comes first, and sees right values."""
    stock, ours = pair("llama")
    drop_the_mask(ours)
    with torch.no_grad():
        score(ours, group(1))
    assert ours.prompt_sharing.figures.tokens
    drop_the_mask(stock)
    assert_alike(stock, ours, seed=2, packed=False)


def test_a_comparison_reaches_no_gradient_and_no_users_hook():
    """DDP counts gradients by hooks, and an optimizer may step in one."""
    model = share_prompts(build("llama"))
    parameters = list(model.parameters())
    calls = []
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
        parameter.register_post_accumulate_grad_hook(calls.append)
    assert score(model, group(1)).requires_grad and model.prompt_sharing.status.compared >= {PassType(True, False)}
    assert not calls and all(torch.equal(p.grad, torch.ones_like(p)) for p in parameters)
    assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))


@pytest.mark.parametrize("name", ["qwen3", "mistral_sliding", "qwen3_5"])
def test_another_attention_implementation_is_taken_over(name):
    """After `set_attn_implementation` packed rows ran without any mask."""
    stock, ours = pair(name)
    assert_alike(stock, ours, seed=1)
    for implementation in ("eager", "sdpa"):
        for model in (stock, ours):
            model.set_attn_implementation(implementation)
        assert_alike(stock, ours, seed=2)


def test_an_implementation_without_a_known_mask_runs_as_stock():
    stock, ours = pair("qwen3")
    for model in (stock, ours):
        model.config._attn_implementation = "eager"  # the attribute alone
    assert_alike(stock, ours, seed=1)
    AttentionInterface.register("of_the_user", ALL_ATTENTION_FUNCTIONS["sdpa"])
    for model in (stock, ours):
        model.set_attn_implementation("of_the_user")
    assert_alike(stock, ours, seed=2, packed=False)
    assert not ours.prompt_sharing.status.packs


def test_an_adapter_that_is_added_later_is_compared():
    stock, ours = pair("qwen3")
    assert_alike(stock, ours, seed=1)
    adapted = []
    for model in (stock, ours):
        torch.manual_seed(0)
        adapted.append(get_peft_model(model, lora()))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.2)
    ours.prompt_sharing.status.compared.add("before")
    with torch.no_grad():
        torch.testing.assert_close(score(adapted[1], group(2)), score(adapted[0], group(2)), atol=2e-5, rtol=1e-5)
    assert ours.prompt_sharing.figures.tokens and "before" not in ours.prompt_sharing.status.compared


# --- nothing of a call is in a global, on the model, or left after an exception -------------------------------------


@contextlib.contextmanager
def meeting_between_layers(models):
    """Inside, two threads wait for each other between the first and the second layer, once the event is set."""
    barrier = threading.Barrier(2, timeout=60)
    begins = threading.Event()

    def meet(*_) -> None:
        if begins.is_set():
            barrier.wait()

    handles = [model.base_model.layers[1].register_forward_pre_hook(meet) for model in models]
    try:
        yield begins
    finally:
        for handle in handles:
            handle.remove()


THREADS = [*itertools.product(["llama", "gemma2", "qwen3_5", "mamba2"], [1, 2])]


@pytest.mark.parametrize(("name", "count"), these_first(THREADS, *THREADS[::3], ("gemma2", 1)))
def test_two_threads_have_a_row_each(name, count):
    """The row was a global of the process: each thread got the mask of the row that was set last."""
    stock, ours = pair(name)
    models = [ours, ours if count == 1 else copy.deepcopy(ours)]
    batches = [group(1), group(2, prompt=9, completion=4)]
    expected = [score(stock, batch).detach() for batch in batches]
    results = [None, None]

    def run(number: int) -> None:
        results[number] = score(models[number], batches[number]).detach()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    with meeting_between_layers(set(models)) as begins:
        for model, batch in zip(models, batches, strict=True):
            score(model, batch)  # the comparison is over
        begins.set()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for result, values in zip(results, expected, strict=True):
        torch.testing.assert_close(result, values, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["kept", "reentrant", "not reentrant"])
def test_a_comparison_changes_nothing_that_another_thread_trains(reentrant, monkeypatch):
    """One thread makes the first call for logits, and stops in its comparison until a step of another is over."""
    stock, ours = pair("llama")
    if reentrant is not None:
        for model in (stock, ours):
            wrap_by_hand(model, reentrant)
    for model in (stock, ours):
        model.model.layers[1].mlp.down_proj = torch.nn.Sequential(model.model.layers[1].mlp.down_proj, Doubled())
    assert_alike(stock, ours, seed=1)
    score(stock, group(2)).sum().backward()
    expected = gradients(stock)
    compares, stepped = threading.Event(), threading.Event()
    compare = check._compare

    def slow(*args, **kwargs):
        compares.set()
        assert stepped.wait(60)
        return compare(*args, **kwargs)

    monkeypatch.setattr(check, "_compare", slow)

    def first_call():
        batch = group(1)
        ours(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)

    thread = threading.Thread(target=first_call)
    thread.start()
    assert compares.wait(60)
    values = score(ours, group(2))
    values.sum().backward()
    stepped.set()
    thread.join()
    assert_equal_gradients(gradients(ours), expected, tolerance=2e-5)
    assert ours.prompt_sharing.status.packs and PassType(True, False, True) in ours.prompt_sharing.status.compared


class Doubled(torch.nn.Module):
    """Has a number by the name of a probability, which comparisons set to zero."""

    def __init__(self):
        super().__init__()
        self.drop = 1.0

    def forward(self, x):
        return x * (1 + self.drop)


def test_a_comparison_draws_no_random_number():
    """A hook draws once in each forward, NEFTune's for example, and the run's next numbers are those of stock."""
    numbers = []
    for model in pair("llama"):
        model.model.layers[0].register_forward_hook(lambda module, args, output: output + 0 * torch.rand(1))
        torch.manual_seed(0)
        score(model, group(1))
        numbers.append(torch.rand(4))
    assert model.prompt_sharing.status.compared and torch.equal(*numbers)


class Stopped(Exception):
    pass


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_an_exception_leaves_no_row_behind(name):
    stock, ours = pair(name)
    assert_alike(stock, ours, seed=1)

    def stop(*_):
        raise Stopped

    handle = ours.base_model.layers[1].register_forward_pre_hook(stop)
    with pytest.raises(Stopped):
        score(ours, group(2))
    handle.remove()
    ids = group(3)["input_ids"]
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, stock(ids).logits)
    assert_alike(stock, ours, seed=2)


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_a_call_inside_a_call_has_its_own_row(name):
    """Of another model that shares prompts, and of one that does not: for example a teacher in a hook."""
    stock, ours = pair(name)
    other = copy.deepcopy(ours)
    plain = with_stock_head(build(name))
    expected = score(stock, group(2)).detach()
    for model in (ours, other):
        score(model, group(1))
    seen = []

    def call_others(*_):
        with torch.no_grad():
            seen.extend((score(other, group(2)), score(plain, group(2))))

    handle = ours.base_model.layers[1].register_forward_pre_hook(call_others)
    values = score(ours, group(1))
    handle.remove()
    torch.testing.assert_close(values, score(stock, group(1)), atol=2e-5, rtol=1e-5)
    for result in seen:
        torch.testing.assert_close(result, expected, atol=2e-5, rtol=1e-5)
    assert seen and name in MAKE


# --- what is known of a model is known until the model changes ------------------------------------------------------


def steer(module, arguments, output):
    """Moves the last tokens of each padded row, which are other tokens of a packed row."""
    states = (output[0] if isinstance(output, tuple) else output).clone()
    states[:, -6:] += 0.5
    return (states, *output[1:]) if isinstance(output, tuple) else states


@pytest.mark.parametrize("fused", [True, False])
def test_a_hook_that_is_put_on_after_the_first_pass_is_compared(fused):
    def values(model, batch):
        if fused:
            return score(model, batch)
        return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits

    stock, ours = pair("qwen3")
    torch.testing.assert_close(values(ours, group(1)), values(stock, group(1)), atol=2e-5, rtol=1e-5)
    handles = [model.model.layers[0].register_forward_hook(steer) for model in (stock, ours)]
    torch.testing.assert_close(values(ours, group(2)), values(stock, group(2)), atol=2e-5, rtol=1e-5)
    assert not ours.prompt_sharing.status.packs
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(values(ours, group(3)), values(stock, group(3)), atol=2e-5, rtol=1e-5)
    assert ours.prompt_sharing.figures.tokens


def test_hooks_of_libraries_are_no_change():
    """Trainers put the hook of `enable_input_require_grads` on again after each generation."""
    _, ours = pair("qwen3")
    score(ours, group(1))
    ours.disable_input_require_grads()
    ours.enable_input_require_grads()
    with counting_padded_forwards(ours) as padded:
        score(ours, group(2))
    assert not padded


def test_dropout_in_attention_that_is_set_later_runs_as_stock(caplog):
    stock, ours = pair("qwen3")
    assert_alike(stock, ours, seed=1)
    for layer in ours.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with caplog.at_level("WARNING"):
        assert torch.isfinite(score(ours, group(2))).all()
    assert not ours.prompt_sharing.figures.tokens and "attention_dropout=0.5" in caplog.text
    for layer in ours.model.layers:
        layer.self_attn.attention_dropout = 0.0
    assert_alike(stock, ours, seed=3)


@pytest.mark.parametrize("comes", ["before", "after"])
def test_a_forward_of_the_users_own_around_trls_head(comes):
    def scale(model):
        inner = model.forward

        def scaled(*args, **kwargs):
            output = inner(*args, **kwargs)
            output.log_probs = 0.5 * output.log_probs
            return output

        model.forward = scaled

    stock, ours = (with_stock_head(build("qwen3")).train() for _ in range(2))
    if comes == "before":
        scale(ours)
    share_prompts(ours)
    if comes == "after":
        score(ours, group(1))
        scale(ours)
    torch.testing.assert_close(score(ours, group(2)), 0.5 * score(stock, group(2)), atol=2e-5, rtol=1e-5)
    assert ours.prompt_sharing.status.packs == (comes == "after")


# --- what a call may have is known by its name ----------------------------------------------------------------------


def test_types_of_tokens_are_known_of_models_with_images_alone():
    gpt2 = functools.partial(
        tf.GPT2LMHeadModel,
        tf.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0.0),
    )
    stock, ours = (with_stock_head(build(gpt2)) for _ in range(2))
    share_prompts(ours)
    types = torch.zeros_like(group(1)["input_ids"])
    types[:, 12:] = 5
    for further in ({}, {"token_type_ids": types}):
        batch = group(1) | further
        torch.testing.assert_close(score(ours, batch), score(stock, batch), atol=2e-5, rtol=1e-5)
        del batch["labels"]
        logits = [model(**batch, use_cache=False).logits for model in (ours, stock)]
        torch.testing.assert_close(*logits, atol=2e-5, rtol=1e-5)
        assert bool(ours.prompt_sharing.figures.tokens) == (not further)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_a_loss_with_a_label_behind_padding_runs_as_stock(name):
    """`DataCollatorForLanguageModeling` makes such labels of rows that are padded on the left."""
    stock, ours = (build(name).train() for _ in range(2))
    share_prompts(ours)
    batch = group(1)
    batch["labels"] = batch["input_ids"].clone()
    if name == "qwen3_moe":
        batch["output_router_logits"] = True
    for padding in (0, 3):
        batch["attention_mask"][::2, :padding] = 0
        batch["labels"][batch["attention_mask"] == 0] = -100
        losses = [model(**batch, use_cache=False).loss for model in (stock, ours)]
        assert type(losses[1]) is torch.Tensor
        torch.testing.assert_close(losses[1], losses[0])
        for loss in losses:
            loss.backward()
        assert_equal_gradients(gradients(ours), gradients(stock), tolerance=2e-5)
        assert bool(ours.prompt_sharing.figures.tokens) == (padding == 0)


def sums_of_columns(forward):
    """A forward that mixes the tokens of a row."""
    return lambda *args, **kwargs: forward(*args, **kwargs) + 0.1 * forward(*args, **kwargs).cumsum(1)


def replace_the_class_forward(models, monkeypatch):
    mlp_class = type(models[0].model.layers[0].mlp)
    monkeypatch.setattr(mlp_class, "forward", sums_of_columns(mlp_class.forward))


def replace_the_attention_function(models, monkeypatch):
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def doubled(*args, **kwargs):
        out, weights = attend(*args, **kwargs)
        return 2 * out, weights

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", doubled)


def let_attention_see_later_tokens(models, monkeypatch):
    for model in models:
        for layer in model.model.layers:
            layer.self_attn.is_causal = False


def replace_the_rotary_tables(models, monkeypatch):
    for model in models:
        config = copy.deepcopy(model.config)
        config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
        config.max_position_embeddings = 10
        model.model.rotary_emb = type(model.model.rotary_emb)(config)


def replace_the_rotary_function(models, monkeypatch):
    file = sys.modules[type(models[0]).__module__]
    rotate = file.apply_rotary_pos_emb
    monkeypatch.setattr(file, "apply_rotary_pos_emb", lambda q, k, cos, sin, *args: rotate(q, k, cos, sin.roll(1, 1)))


LATE_CHANGES = (
    replace_the_class_forward,
    replace_the_attention_function,
    let_attention_see_later_tokens,
    replace_the_rotary_tables,
    replace_the_rotary_function,
)


@pytest.mark.parametrize("change", LATE_CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("fused", [True, False])
def test_a_change_after_the_first_pass_gives_stocks_values(change, fused, monkeypatch):
    """Each was noticed from the start, and silently wrong by 0.08 to 1.4 nats if it came later."""

    def values(model, seed):
        batch = group(seed)
        if fused:
            return score(model, batch)
        return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits

    stock, ours = pair("qwen3")
    torch.testing.assert_close(values(ours, 1), values(stock, 1), atol=2e-5, rtol=1e-5)
    before = values(stock, 2)
    change((stock, ours), monkeypatch)
    expected = values(stock, 2)
    assert not torch.allclose(before, expected, atol=1e-2)
    torch.testing.assert_close(values(ours, 2), expected, atol=2e-5, rtol=1e-5)
