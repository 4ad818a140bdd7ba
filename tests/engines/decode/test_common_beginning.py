"""A beginning that all prompts have in common is prefilled once: tokens against `generate`'s, and what each forward is
given.
"""

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.distributed.launch import launch
from tests.engines.decode.test_decoding import MODELS, build, greedy, sampled
from tests.prefix_sharing.helpers import RECURRENT
from tests.prefix_sharing.helpers import build as build_family
from trl_fsdp_qlora.engines.decode import common_beginning
from trl_fsdp_qlora.engines.decode.completions import CompletionOptions, complete

BEGINNING = [3 + (7 * i + i // 9) % 60 for i in range(90)]
# Groups of unlike sizes, whose neighbours have other prompts. The rests begin with different tokens.
RESTS = [[50, 51, 52, 53, 54, 55, 56], [30], [40, 41, 42], [33, 34, 35, 36], [20, 21]]
ROWS = [0, 1, 0, 2, 3, 4, 2, 2, 1, 0]
PROMPTS = [BEGINNING + RESTS[i] for i in ROWS]
WIDTH = len(BEGINNING) + 7
# One prompt is the beginning and nothing else, and thus a prefix of all others.
WITH_EMPTY_REST = [BEGINNING + ([] if i == 1 else RESTS[i]) for i in ROWS]
FULL_ATTENTION = {"layer_types": ["full_attention"] * 4}


def build_full(name, **changes):
    """A family with full attention in all layers."""
    config = MODELS[name]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(type(config)(**{**config.to_dict(), **FULL_ATTENTION, **changes})).eval()


def run(model, prompts, config=None, seed=0):
    """Completions by `generate` and by our loop, the shape of each of our forwards' ids, and the loop's own count."""
    config = config or greedy()
    shapes = []
    torch.manual_seed(seed)
    expected, _ = complete(model, prompts, config, CompletionOptions(compact=False))

    def record(_module, _args, kwargs):
        shapes.append(tuple(kwargs["input_ids"].shape))

    hook = model.register_forward_pre_hook(record, with_kwargs=True)
    torch.manual_seed(seed)
    completions, work = complete(model, prompts, config)
    hook.remove()
    return expected, completions, shapes, work


@pytest.mark.parametrize("prompts", [PROMPTS, WITH_EMPTY_REST], ids=["rests", "an empty rest"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "moe"])
def test_greedy_is_token_identical_and_the_beginning_runs_once(name, implementation, prompts):
    model = build(name)
    model.set_attn_implementation(implementation)
    expected, completions, shapes, work = run(model, prompts)
    assert completions == expected
    assert len({*map(tuple, completions)}) == 5  # each prompt has its own
    assert len({*map(len, completions)}) > 1  # rows were dropped before the others ended
    # An empty rest still needs the logits of its last token, which is then left out of the beginning.
    length = len(BEGINNING) - (prompts is WITH_EMPTY_REST)
    assert shapes[:2] == [(1, length), (5, WIDTH - length)]
    assert all(tokens == 1 for _, tokens in shapes[2:])
    assert work.prefill_tokens == sum(rows * tokens for rows, tokens in shapes[:2])
    assert work.prefill_tokens_stock == len(ROWS) * WIDTH


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss"])
def test_where_the_cache_is_repeated_for_the_rows(name):
    """Softcaps and sinks: decoding attends to the prompt in each row, with the mask that has its padding inside."""
    expected, completions, shapes, _ = run(build_full(name), WITH_EMPTY_REST)
    assert completions == expected and len({*map(tuple, completions)}) > 3
    assert shapes[:2] == [(1, len(BEGINNING) - 1), (5, 8)]


@pytest.mark.parametrize("rests", [[[50, 51], [30, 31], [40, 41], [20, 21]], RESTS], ids=["equal", "unlike"])
@pytest.mark.parametrize(
    "changes", [{"prefill_chunk_size": 4}, {"repetition_penalty": 1.3}, {"max_new_tokens": 100}], ids=str
)
def test_chunks_processors_and_rests_of_equal_length(changes, rests):
    """Without padding the model needs no mask of the library's making; processors look at the prompt as it was
    given.
    """
    prompts = [BEGINNING + rest for rest in rests]
    expected, completions, shapes, work = run(build(), prompts, greedy(**changes))
    assert completions == expected
    assert work.prefill_tokens == len(BEGINNING) + len(rests) * max(map(len, rests))
    assert shapes[0] == ((1, 4) if "prefill_chunk_size" in changes else (1, len(BEGINNING)))


def test_samples_do_not_depend_on_it(monkeypatch):
    model = build()
    with_it = run(model, PROMPTS, sampled())
    monkeypatch.setattr(common_beginning, "_MIN_SAVED_TOKENS", 10**9)
    without_it = run(model, PROMPTS, sampled())
    assert with_it[1] == without_it[1] and with_it[2] != without_it[2]


@pytest.mark.parametrize(
    "name", ["qwen3-sliding", "mistral-sliding", "gpt-oss", "longrope", "qwen3_5", "lfm2", "mamba2"]
)
def test_other_models_prefill_whole_prompts(name):
    """Sliding windows, rotary tables of the longest row, and layers with a state."""
    model = build_family(RECURRENT[name][0]) if name in RECURRENT else build(name)
    expected, completions, shapes, work = run(model, PROMPTS)
    assert completions == expected
    assert shapes[0] == (5, WIDTH) and work.prefill_tokens == 5 * WIDTH


@pytest.mark.parametrize(
    "prompts",
    [
        [[first, *prompt[1:]] for first, prompt in zip((60, 61, 62, 59), PROMPTS, strict=False)],  # nothing in common
        [prompt[-20:] for prompt in PROMPTS],  # too little in common to pay
        [PROMPTS[0]] * 4,  # one prompt
    ],
    ids=["none", "short", "one prompt"],
)
def test_nothing_changes_without_a_beginning_that_pays(prompts):
    expected, completions, shapes, work = run(build(), prompts)
    distinct = len({*map(tuple, prompts)})
    width = max(map(len, prompts))
    assert completions == expected
    assert shapes[0] == (distinct, width) and work.prefill_tokens == distinct * width
    assert all(tokens == 1 for _, tokens in shapes[1:])


@pytest.mark.processes
def test_ranks_prefill_a_beginning_on_their_own_all_or_none():
    """Where forwards are collective, a rank that ran one more would wait for the others."""
    launch(__file__)


def rank() -> None:
    model = build("llama")
    mine = dist.get_rank()
    alike = PROMPTS
    unlike = [[3 + i, *prompt] for i, prompt in enumerate(PROMPTS)]
    for prompts, splits in ((alike if mine else unlike, False), (alike, True)):
        shapes = []
        expected, _ = complete(model, prompts, greedy(), CompletionOptions(compact=False))
        hook = model.register_forward_pre_hook(
            lambda _module, _args, kwargs, shapes=shapes: shapes.append(tuple(kwargs["input_ids"].shape)),
            with_kwargs=True,
        )
        completions, _ = complete(model, prompts, greedy(), CompletionOptions(synced_gpus=True))
        hook.remove()
        assert completions == expected
        assert (shapes[0][0] == 1) == splits, shapes[:2]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank()
    dist.destroy_process_group()
