"""What happens to a model after `share_prompts`, and beside it: other attention, wrappers, threads, exceptions."""

import contextlib
import copy
import functools
import itertools
import threading

import pytest
import torch
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

from tests.tiny import lora
from trl_fsdp_qlora import share_prompts
from trl_fsdp_qlora.prefix_sharing.batch import Batch
from trl_fsdp_qlora.prefix_sharing.verdict import copied_leaves

from .helpers import MAKE, VOCABULARY, assert_equal_gradients, build, gradients, with_stock_head


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


KINDS = [
    *itertools.product(["qwen3", "qwen3_5"], WRAPPERS),
    *((name, wrap_by_hand) for name in ("gemma2", "mistral_sliding", "mamba2")),
]


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize(("name", "wrap"), KINDS)
def test_recomputed_layers_get_the_row_whoever_recomputes_them(name, wrap, reentrant):
    """Only two wrappers were known, and only before the first pass. Others gave wrong gradients without a word."""
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
    assert "gradients differ" in ours.prompt_sharing.describe()


def test_gradients_are_compared_after_values_were():
    """An evaluation comes first, and sees right values."""
    stock, ours = pair("llama")
    drop_the_mask(ours)
    with torch.no_grad():
        score(ours, group(1))
    assert ours.prompt_sharing.figures.tokens
    drop_the_mask(stock)
    assert_alike(stock, ours, seed=2, packed=False)


def test_the_comparison_reaches_no_gradient_and_no_hook_of_the_user():
    """DDP counts gradients by hooks, and an optimizer may step in one."""
    model = share_prompts(build("llama"))
    parameters = list(model.parameters())
    calls = []
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
        parameter.register_post_accumulate_grad_hook(calls.append)
    assert score(model, group(1)).requires_grad and model.prompt_sharing.checked >= {(True, False)}
    assert not calls and all(torch.equal(p.grad, torch.ones_like(p)) for p in parameters)
    assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
    batch = Batch(**group(2))
    model.prompt_sharing.checked.clear()
    model.prompt_sharing.compare_with_stock(model, batch)  # as the trainers of this package compare
    assert not calls and model.prompt_sharing.checked == {(False, False)}
    tied = build("llama")
    tied.lm_head.weight = tied.model.embed_tokens.weight
    with copied_leaves(tied):
        assert tied.lm_head.weight is tied.model.embed_tokens.weight


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
    assert "has no registered mask" in ours.prompt_sharing.describe()


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
    checked = ours.prompt_sharing.checked
    checked.add("before")
    with torch.no_grad():
        torch.testing.assert_close(score(adapted[1], group(2)), score(adapted[0], group(2)), atol=2e-5, rtol=1e-5)
    assert ours.prompt_sharing.figures.tokens and "before" not in checked


# --- nothing of a call lies in a global, on the model, or behind an exception ---------------------------------------


@contextlib.contextmanager
def meeting_between_layers(models):
    """Inside, two threads wait for each other between the first and the second layer of their forwards."""
    barrier = threading.Barrier(2, timeout=60)

    def meet(*_) -> None:
        barrier.wait()

    handles = [model.base_model.layers[1].register_forward_pre_hook(meet) for model in models]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_5", "mamba2"])
@pytest.mark.parametrize("count", [1, 2], ids=["one model", "two models"])
def test_two_threads_have_a_row_each(name, count):
    """The row was a global of the process: each thread got the mask of the row that was set last."""
    stock, ours = pair(name)
    models = [ours, ours if count == 1 else copy.deepcopy(ours)]
    batches = [group(1), group(2, prompt=9, completion=4)]
    expected = [score(stock, batch).detach() for batch in batches]
    for model, batch in zip(models, batches, strict=True):
        score(model, batch)  # the comparison is over
    results = [None, None]

    def run(number: int) -> None:
        results[number] = score(models[number], batches[number]).detach()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    with meeting_between_layers(set(models)):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for result, values in zip(results, expected, strict=True):
        torch.testing.assert_close(result, values, atol=2e-5, rtol=1e-5)


def test_the_first_passes_of_two_threads_are_compared_one_after_the_other():
    stock, ours = pair("llama")
    batches = [group(1), group(2)]
    expected = [score(stock, batch).detach() for batch in batches]
    results = [None, None]

    def run(number: int) -> None:
        results[number] = score(ours, batches[number]).detach()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ours.prompt_sharing.is_active and all(p.grad is None for p in ours.parameters())
    for result, values in zip(results, expected, strict=True):
        torch.testing.assert_close(result, values, atol=2e-5, rtol=1e-5)


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
    """Of another model that shares prompts, and of one that does not: a teacher in a hook, say."""
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
    assert len(seen) == 2 and name in MAKE
