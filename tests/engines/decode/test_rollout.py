"""Rollouts of training through the compact decoding loop; what runs otherwise does as with stock."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig
from trl import GRPOConfig, GRPOTrainer

from tests.engines.decode.helpers import calling_tokenizer
from tests.prefix_sharing.helpers import MULTIMODAL, build
from tests.tiny import config, digit_share, lora, prompts, tiny_model, trainer
from tests.trainers.helpers import make_trainer, processor
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.compat.trl_rollouts import Turn
from trl_fsdp_qlora.tools.small_base import character_tokenizer

STOCK = (GRPOTrainer, GRPOConfig)
OURS = (EfficientGRPOTrainer, EfficientGRPOConfig)
# Almost greedy: the same completions whatever the draws are.
GREEDY = {"generation_kwargs": {"do_sample": False}}
# A third of the vocabulary ends a completion.
ENDS = list(range(3, 14))


def make(cls=EfficientGRPOTrainer, config=EfficientGRPOConfig, folder="unused", **changes):
    model = tiny_model()
    model.generation_config.eos_token_id = ENDS
    return trainer(cls, config, folder, model=model, peft_config=lora(), max_completion_length=16, **changes)


def history(grpo):
    grpo.train()
    return [entry for entry in grpo.state.log_history if "loss" in entry]


def assert_equal_steps(ours, stock, *keys):
    assert len(ours) == len(stock) == 3
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4, abs=1e-6)
        for key in ("completions/mean_length", "completions/clipped_ratio", "num_tokens", "reward", *keys):
            assert mine[key] == pytest.approx(theirs[key]), key


def test_greedy_training_equals_stock_and_metrics_count_what_ran(tmp_path):
    other = make(*STOCK, tmp_path / "stock", **GREEDY)
    stock = history(other)
    grpo = make(folder=tmp_path / "ours", **GREEDY)
    seen = []
    turn = grpo._generate_single_turn

    def watched(prompt_ids, *rest):
        drawn = turn(prompt_ids, *rest)
        seen.append((max(map(len, prompt_ids)), drawn[0]))
        return drawn

    grpo._generate_single_turn = watched
    ours = history(grpo)
    assert_equal_steps(ours, stock)
    for entry, (width, completions) in zip(ours, seen, strict=True):
        ran = {
            "prefill_tokens": 2 * width,
            "prefill_tokens_stock": 8 * width,
            "row_steps_stock": 8 * (max(map(len, completions)) - 1),
            "row_steps": sum(len(row) - 1 for row in completions),
        }
        assert {name: entry[f"generation/{name}"] for name in ran} == ran
    assert any(e["generation/row_steps"] < e["generation/row_steps_stock"] for e in ours)
    for each in (other, grpo):
        each.args.num_generations_eval = each.num_generations_eval = 2  # evaluation repeats by its own number
        each.evaluate(prompts(4))
    logged = grpo.state.log_history[-1]
    assert other.state.log_history[-1].keys() <= logged.keys()
    assert logged["eval_generation/prefill_tokens"] == logged["eval_generation/prefill_tokens_stock"] / 2


def test_a_run_is_reproducible_from_its_seed(tmp_path):
    runs = [[entry["loss"] for entry in history(make(folder=tmp_path / str(i), seed=i // 2))] for i in (0, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def goes_to_stock(grpo, multimodal_fields=None) -> bool:
    turn = Turn([[20, 21]] * 4, None, multimodal_fields or {}, num_generations=4)
    return grpo.rollout.training_turn(lambda **_: "stock", turn, grpo.model, grpo._generate_settings()) == "stock"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compact_generation": False}, "compact_generation=False"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"generation_kwargs": {"num_beams": 2}}, "beam sample"),
        ({"generation_kwargs": {"prompt_lookup_num_tokens": 2, "num_beams": 1}}, "assisted generation"),
        ({"generation_kwargs": {"use_cache": False}}, "use_cache=False"),
    ],
    ids=str,
)
def test_what_is_not_exact_runs_as_stock_and_is_logged(tmp_path, changes, message):
    grpo = make(folder=tmp_path, **changes)
    heading, line = next(feature for feature in grpo.features() if feature[1].startswith("rollouts:"))
    assert message in line and heading == ("off" if "compact_generation" in changes else "as stock TRL")
    assert goes_to_stock(grpo)


def test_a_generate_of_the_models_own_gets_every_row(tmp_path):
    """As TRL's tests of tools replace it: once the trainer is built, by something that answers each row of stock's
    call.
    """
    grpo = make(folder=tmp_path / "ours")
    stock = make(*STOCK, tmp_path / "stock")
    calls = []
    for each in (grpo, stock):

        def answers(input_ids, each=each, **kwargs):
            calls.append((type(each), input_ids, sorted(kwargs)))
            return torch.cat([input_ids, torch.arange(3, 3 + len(input_ids))[:, None]], 1)

        each.model.generate = answers
    ours = history(grpo)
    assert_equal_steps(ours, history(stock))
    assert any("generate is not transformers' own" in line for _, line in grpo.features())
    for (_, ids, arguments), (_, stock_ids, stock_given) in zip(calls[:3], calls[3:], strict=True):
        assert torch.equal(ids, stock_ids) and arguments == stock_given and len(ids) == 8


def test_a_trainer_without_init_draws_by_its_rollout_function():
    """TRL's own tests build one so, with what TRL's `_generate` reads."""
    grpo = object.__new__(EfficientGRPOTrainer)
    grpo.accelerator = SimpleNamespace(device=torch.device("cpu"), is_main_process=True, gather=lambda tensor: tensor)
    grpo.args = SimpleNamespace(report_to=[])
    grpo.model = SimpleNamespace(training=True)
    grpo.state = SimpleNamespace(global_step=2, num_input_tokens_seen=0)
    grpo.use_vllm = grpo.use_transformers_continuous_batching = False
    grpo.tools = None
    grpo.eos_token_ids = [2]
    grpo._tokenizer = SimpleNamespace(eos_token_id=2, pad_token_id=0)
    grpo.processing_class = SimpleNamespace(batch_decode=lambda rows, **_: ["text"] * len(rows))
    grpo._metrics = {"train": defaultdict(list)}
    grpo.rollout_func = lambda asked, trainer: {"prompt_ids": [[1]], "completion_ids": [[2]], "logprobs": [[-0.5]]}
    assert grpo._generate(["prompt"])[:2] == ([[1]], [[2]])


def test_text_of_a_processor_is_no_run_with_images(tmp_path):
    """A chat template of a processor gives fields of its own for text, too."""
    options = {"processing_class": processor(), "compact_generation": True}
    grpo = make_trainer(EfficientGRPOTrainer, build(MULTIMODAL["gemma3"]), tmp_path, **options)
    assert not goes_to_stock(grpo, {"token_type_ids": [[0] * 2] * 4})
    assert goes_to_stock(grpo, {"pixel_values": torch.zeros(1)})


def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return str(a + b)


def calls_once(ids, prefix):
    """A completion with an even first token calls the tool, once per conversation."""
    # A tool's answer begins with characters that the tokenizer does not know.
    return ids[0] % 2 == 0 and character_tokenizer().unk_token_id not in prefix


def roll(asked, trainer):
    """A rollout function: greedy, a prompt at a time."""
    tokenizer = trainer.processing_class
    ids = [tokenizer.apply_chat_template(p, add_generation_prompt=True, return_dict=False) for p in asked]
    settings = GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=ENDS)
    rows = [trainer.model.generate(torch.tensor([prompt]), generation_config=settings)[0].tolist() for prompt in ids]
    done = [row[len(prompt) :] for prompt, row in zip(ids, rows, strict=True)]
    return {"prompt_ids": ids, "completion_ids": done, "logprobs": None}


@pytest.mark.filterwarnings("ignore:.*rollout_func")
@pytest.mark.parametrize("drawn_by", ["tools", "rollout_func"])
def test_other_turns_equal_stock(tmp_path, drawn_by):
    """Some rows continue after a tool's answer, each with a history of its own; a rollout function draws itself."""
    runs = []
    for cls, config_cls in (STOCK, OURS):
        model = tiny_model()
        tokenizer = calling_tokenizer(calls_once) if drawn_by == "tools" else character_tokenizer()
        model.generation_config.eos_token_id = ENDS
        args = config(config_cls, tmp_path, max_completion_length=60, **GREEDY)
        drawing = {drawn_by: [add] if drawn_by == "tools" else roll}
        options = {"peft_config": lora(), "processing_class": tokenizer, **drawing}
        runs.append(history(cls(model, digit_share, args, prompts(), **options)))
    stock, ours = runs
    if drawn_by == "rollout_func":
        assert_equal_steps(ours, stock)
        assert not any("generation/prefill_tokens" in entry for entry in ours)
    else:
        assert_equal_steps(ours, stock, "tools/call_frequency", "tools/failure_frequency")
        assert any(0 < entry["tools/call_frequency"] < 1 for entry in ours)
        assert all(entry["generation/prefill_tokens"] < entry["generation/prefill_tokens_stock"] for entry in ours)


def test_continuous_batching_leaves_weights_frequencies_and_mode(tmp_path):
    """Stock TRL 1.16 leaves what is trained in bfloat16."""
    # By default the engine's cache takes half of the machine's memory, here 12 GB of 24.
    small_cache = {"num_blocks": 64, "max_batch_tokens": 256}
    settings = {"use_transformers_continuous_batching": True, "transformers_continuous_batching_config": small_cache}
    grpo = trainer(*OURS, tmp_path, peft_config=lora(), bf16=True, **settings)
    before = {n: x.clone() for n, x in (*grpo.model.named_parameters(), *grpo.model.named_buffers())}
    grpo.model.train()
    batch = grpo._generate_and_score_completions([grpo.train_dataset[i] for i in (0, 0, 0, 0, 1, 1, 1, 1)])
    after = dict((*grpo.model.named_parameters(), *grpo.model.named_buffers()))
    assert batch["completion_mask"].sum() > 8
    assert grpo.model.training and any("continuous batching" in line for _, line in grpo.features())
    assert [n for n, x in before.items() if after[n].dtype != x.dtype or not torch.equal(after[n], x)] == []
