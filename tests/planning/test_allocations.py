"""Plans against every allocation of torch's CPU allocator, where a tracker that sees operators only would be wrong."""

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList, TemperatureLogitsWarper

from tests.benchmark_modules import benchmark
from tests.planning.models import config, folder, settings
from tests.planning.test_passes import NEAR, batch, built
from tests.prefix_sharing.helpers import packed_forward
from trl_fsdp_qlora.planning import components, passes
from trl_fsdp_qlora.planning.settings import Launch
from trl_fsdp_qlora.prefix_sharing.layout import pack
from trl_fsdp_qlora.rollout.decoding import _Batch


def rise(call) -> int:
    """Bytes by which torch's allocator rises while `call` runs."""
    return benchmark("synthetic").peak_bytes(call, "cpu")


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_tied_head_s_gradient_is_added_to_the_embeddings_in_place(tmp_path, accumulation):
    """The engine does so outside of every dispatch mode, so that no tracker can be the reference here."""
    shape = {"vocab_size": 16384, "tie_word_embeddings": True}
    run = settings(
        folder(tmp_path, **shape),
        use_peft=False,
        gradient_checkpointing=True,
        per_device_train_batch_size=4,
        max_completion_length=16,
        gradient_accumulation_steps=accumulation,
    )
    model = built(run, **shape)
    for parameter in model.parameters():
        if accumulation > 1:
            parameter.grad = torch.zeros_like(parameter)
    layout = pack(*batch(run), run.max_completion_length)
    measured = rise(lambda: packed_forward(model, layout).log_probs.sum().backward())
    planned = passes.loss(run, config(**shape), True, False)
    embeddings = model.get_input_embeddings().weight.nbytes
    assert planned.peak == pytest.approx(measured, rel=NEAR) and embeddings > 3 * NEAR * measured


def test_a_reference_that_is_the_base_scores_without_the_adapter(tmp_path):
    """Its updates are not computed; the policy's own old log-probabilities come with them."""
    run = settings(folder(tmp_path), beta=0.1)
    model, layout = built(run), pack(*batch(run), run.max_completion_length)

    def score():
        with torch.no_grad(), model.disable_adapter():
            packed_forward(model, layout)

    measured = rise(score)
    assert passes.loss(run, config(), True, False, grad=False).peak == pytest.approx(measured, rel=NEAR)
    both = settings(folder(tmp_path), beta=0.1, num_iterations=2)
    assert passes.loss(both, config(), True, False, grad=False).peak > (1 + 2 * NEAR) * measured
    assert both.scores_policy and not run.scores_policy and run.scores_again


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.9}])
def test_a_token_step_makes_as_many_copies_of_its_logits_as_were_planned(tmp_path, changes):
    vocabulary = 65536
    run = settings(folder(tmp_path, vocab_size=vocabulary), Launch(use_cpu=True), **changes)
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.9)] if changes else [])
    ids = torch.zeros(run.rollout_rows, 4, dtype=torch.long)
    steps = _Batch(ids, GenerationConfig(do_sample=True), processors, StoppingCriteriaList(), {})

    def step():
        logits = torch.zeros(run.rollout_rows, vocabulary)
        steps._pick(logits)

    planned, _ = components.decoding_bytes(run, config(vocab_size=vocabulary), True)
    assert planned == pytest.approx(rise(step), rel=NEAR)
    # Of a small vocabulary, a layer's cache that is copied as it grows is more, and gone by then.
    layer = components.cache_bytes(run, config(vocab_size=64), True)[1]
    logits, copy = components.decoding_bytes(run, config(vocab_size=64), True)
    assert logits < copy == layer


def test_what_changes_logits_is_known_by_its_field(tmp_path):
    folder(tmp_path)
    asked = ({"top_k": 20}, {"min_p": 0.1}, {"generation_kwargs": {"min_new_tokens": 8}}, {"repetition_penalty": 1.1})
    assert all(components.processes_logits(settings(tmp_path, **changes)) for changes in asked)
    assert not components.processes_logits(settings(tmp_path))
    assert not components.processes_logits(settings(tmp_path, generation_kwargs={"min_new_tokens": 0}))
