"""Turns whose history the chat template renders: what each turn saw, what is trained, and what is prefilled."""

import pytest
import torch
from datasets import Dataset
from transformers import GenerationConfig, PreTrainedConfig

from tests.engines.decode.test_turns import add
from tests.tiny import config, digit_share, lora, tool_tokenizer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer, TSPMOConfig, TSPMOTrainer
from trl_fsdp_qlora.compat.trl_rollouts import with_response_schema
from trl_fsdp_qlora.engines.decode.completions import EngineModel
from trl_fsdp_qlora.engines.decode.history import strips_thinking
from trl_fsdp_qlora.errors import UserError
from trl_fsdp_qlora.tools.evaluation.drawing import Draw, MeasuringTrainer
from trl_fsdp_qlora.tools.evaluation.measurement import Agent, Measurement
from trl_fsdp_qlora.tools.small_base import new_model

# Calls are part of the text that the model writes; TRL looks whether a call without text is rendered.
KEEPS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] + '\n' + message['content'] }}"
    "{% if message['tool_calls'] and not message['content'] %}{{ message['tool_calls'] | tojson }}{% endif %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPS = KEEPS.replace("message['content'] }}", "message['content'].split('</think>')[-1] }}")
# By the number of tools' answers before it: what the model writes. The last turn calls nothing.
WRITTEN = ["<think>12</think>call", "<think>sum</think>call", "<think>so</think>done"]


def tokenizer_of(template: str, read=None):
    tokenizer = tool_tokenizer()
    tokenizer.chat_template = template
    tokenizer.response_template = {"reads": "calls"}  # TRL then asks the tokenizer to read completions

    def read_call(ids, prefix, tools=None):
        text = tokenizer.decode(ids).removesuffix(tokenizer.eos_token)
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 3}}}
        return {"role": "assistant", "content": text} | ({"tool_calls": [call]} if text.endswith("call") else {})

    tokenizer.parse_response = read_call if read is None else read
    return tokenizer


class Scripted(EfficientGRPOTrainer):
    """Writes `WRITTEN`, and notes the prompt of every turn; odd episodes end after their first call."""

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations=1, has_tool_images=False):
        self.turns = getattr(self, "turns", [])
        self.turns.append([list(ids) for ids in prompt_ids])
        tokenizer = self._tokenizer
        drawn = []
        for number, ids in enumerate(prompt_ids):
            answers = tokenizer.decode(ids).count("<|im_start|>tool")
            text = f"{number}{WRITTEN[min(answers, 2)]}" if answers or number % 2 == 0 else "<think>no</think>done"
            drawn.append(tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id])
        return drawn, [[-0.5 - i for i in range(len(ids))] for ids in drawn]


def make_trainer(folder, template, cls=Scripted, config_cls=EfficientGRPOConfig, read=None, **changes):
    changes = {
        "per_device_train_batch_size": 4, "num_generations": 2, "max_tool_calling_iterations": 4,
        "max_completion_length": 300, "max_steps": 1, **changes,
    }  # fmt: skip
    tokenizer = tokenizer_of(template, read)
    model = new_model(tokenizer, 0, hidden=32, layers=2)
    model.config.max_position_embeddings = 1024
    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in ("1+2", "31+4")] * 4})
    return cls(
        model,
        digit_share,
        config(config_cls, folder, **changes),
        dataset,
        processing_class=tokenizer,
        peft_config=lora(),
        tools=[add],
    )


def drawn(trainer):
    """A generation batch, and what TRL's `_generate` returned for it."""
    trainer.model.train()
    generate = trainer._generate
    results = []

    def noting(prompts):
        results.append(generate(prompts))
        return results[-1]

    trainer._generate = noting
    rows = [trainer.train_dataset[i // 2] for i in range(4)]
    batch = trainer._generate_and_score_completions(rows)
    return batch, results[0]


def test_a_template_that_keeps_everything_equals_append(tmp_path):
    batches = []
    for history in ("append", "template"):
        trainer = make_trainer(tmp_path, KEEPS, history=history)
        torch.manual_seed(0)
        batches.append((drawn(trainer), trainer.turns))
    (append, _), turns = batches[0]
    (template, result), turns_of_template = batches[1]
    assert turns == turns_of_template and len(turns) == 3
    assert append.keys() == template.keys()
    for name, x in append.items():
        assert torch.equal(x, template[name]), name
    assert all(len(rows) == 1 for rows in result[5]["rows"])


def test_a_stripping_template_begins_a_row_at_each_turn(tmp_path):
    trainer = make_trainer(tmp_path, STRIPS, history="template")
    batch, (prompt_ids, completion_ids, mask, completions, logprobs, extra, *_) = drawn(trainer)
    tokenizer = trainer._tokenizer
    assert [len(rows) for rows in extra["rows"]] == [3, 1, 3, 1]
    for number, rows in enumerate(extra["rows"]):
        prompt = trainer.train_dataset[number // 2]["prompt"]
        turns = [i for i, message in enumerate(completions[number]) if message["role"] == "assistant"]
        sampled = []
        for row, turn in zip(rows, turns, strict=True):
            seen = tokenizer.apply_chat_template(
                prompt + completions[number][:turn], add_generation_prompt=True, return_dict=False
            )
            text = completions[number][turn]["content"]
            wrote = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
            assert row["input_ids"] == seen + wrote
            assert row["sampled_mask"] == [0] * len(seen) + [1] * len(wrote)
            assert row["logprobs"] == [-0.5 - i for i in range(len(wrote))]
            sampled += wrote
        assert (
            completion_ids[number] == sampled and prompt_ids[number] == rows[0]["input_ids"][: len(prompt_ids[number])]
        )
        assert mask[number] == [1] * len(sampled)
        assert logprobs[number] == [value for row in rows for value in row["logprobs"]]
    assert [len(rows) for rows in batch["rows"]] == [3, 1, 3, 1]
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer._compute_loss(trainer.model, batch)
    assert loss.requires_grad


@pytest.mark.parametrize("history", ["append", "template"])
def test_a_run_with_a_template_that_strips(tmp_path, history):
    trainer = make_trainer(tmp_path, STRIPS, history=history, max_steps=2)
    trainer.train()
    has_rows = any("rows" in inputs for inputs in trainer._buffered_inputs)
    assert has_rows == (history == "template")


def test_greedy_turns_prefill_what_is_behind_the_parting_token(tmp_path):
    """An episode of eight turns: the history behind the token at which a turn's prompt parts is run, and no more."""

    def always_calls(ids, prefix, tools=None):
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 3}}}
        text = "<think>what it wrote</think>" + "".join(f"{token}," for token in ids[-2:])
        return {"role": "assistant", "content": text, "tool_calls": [call]}

    completions, metrics = {}, {}
    for compact in (True, False):
        trainer = make_trainer(
            tmp_path, STRIPS, EfficientGRPOTrainer, read=always_calls, history="template",
            max_tool_calling_iterations=7, max_completion_length=800, compact_generation=compact,
            generation_kwargs={"do_sample": False, "max_new_tokens": 12},
        )  # fmt: skip
        _, result = drawn(trainer)
        completions[compact] = result[1]
        metrics[compact] = trainer._metrics["train"]
        rows = result[5]["rows"]
    assert completions[True] == completions[False]
    assert all(len(episode) == 8 for episode in rows)
    (prefilled,) = metrics[True]["generation/prefill_tokens"]
    whole = sum(len(row["input_ids"]) - sum(row["sampled_mask"]) for episode in rows for row in episode)
    # What each turn's prompt does not have in common with the row before it; prompts of a group are equal.
    assert prefilled <= sum(map(new_tokens, rows))
    assert prefilled < 0.4 * whole


def new_tokens(rows):
    """Tokens of an episode's prompts that no earlier row begins with."""
    count = 0
    before = []
    for row in rows:
        prompt = row["input_ids"][: row["sampled_mask"].index(1)]
        common = next((i for i, (a, b) in enumerate(zip(prompt, before, strict=False)) if a != b), len(before))
        count += len(prompt) - min(common, len(prompt) - 1)
        before = row["input_ids"]
    return count


class Writing(EngineModel):
    """Writes `WRITTEN` as the trainer above, and notes the prompt of every turn."""

    def __init__(self, tokenizer):
        config = PreTrainedConfig(max_position_embeddings=1024)
        super().__init__(None, GenerationConfig(eos_token_id=tokenizer.eos_token_id), config)
        self.tokenizer = tokenizer
        self.turns = []

    def complete(self, prompt_ids, config, seed):
        texts = self.tokenizer.batch_decode(prompt_ids)
        self.turns += texts
        written = [WRITTEN[min(text.count("<|im_start|>tool"), 2)] for text in texts]
        return [[*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id] for text in written]


def test_accuracy_is_measured_as_served():
    tokenizer = tokenizer_of(STRIPS)
    agent = Agent([add], history="template")
    measuring = MeasuringTrainer(tokenizer, Measurement(max_new_tokens=300, agent=agent))
    model = Writing(tokenizer)
    row = {"prompt": [{"role": "user", "content": "1+2"}]}
    (answer,) = measuring.draw([row], Draw(model, model.generation_config))
    assert [message["role"] for message in answer.completion] == ["assistant", "tool"] * 2 + ["assistant"]
    assert len(model.turns) == 3
    for number, text in enumerate(model.turns):
        messages = row["prompt"] + answer.completion[: 2 * number]
        assert text == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert "<think>" not in text


def test_what_templates_strip():
    tokenizer = with_response_schema(tool_tokenizer())
    assert not strips_thinking(tokenizer)  # Qwen3's keeps what was thought since the last question
    tokenizer.chat_template = tokenizer.chat_template.replace("reasoning_content", "nothing")
    assert strips_thinking(tokenizer)


def test_the_start_up_block_names_a_template_that_strips(tmp_path):
    line = "the chat template strips earlier thinking: what is trained is not what is served; history: template"
    assert ("as stock TRL", line) in make_trainer(tmp_path, STRIPS).features()
    assert ("as stock TRL", line) not in make_trainer(tmp_path, KEEPS).features()
    served = "history: rendered by the chat template before every turn, as a server does"
    assert ("on", served) in make_trainer(tmp_path, STRIPS, history="template").features()


def test_values_that_are_refused(tmp_path):
    with pytest.raises(ValueError, match="history='served' is not known; use one of append, template"):
        config(EfficientGRPOConfig, tmp_path, history="served")
    with pytest.raises(UserError, match=r"T-SPMO .*history: append"):
        make_trainer(tmp_path, KEEPS, cls=TSPMOTrainer, config_cls=TSPMOConfig, history="template")
