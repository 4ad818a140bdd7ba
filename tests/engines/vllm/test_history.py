"""Episodes of several rows that a real `vllm serve` draws: its log-probabilities are those of each row alone."""

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import AutoModelForCausalLM

from tests import tiny
from tests.engines.vllm.runs import figures, on_server
from tests.fsdp2_qlora.tiny import make_tokenizer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer

pytestmark = pytest.mark.vllm
TURNS = 3
# A call of `add` is part of the text that the model wrote; TRL looks whether other calls are rendered.
STRIPS = (
    "{% for message in messages %}{{ message.role[:1] + '=' + message.content.split('</think>')[-1] }}"
    "{% for call in message.tool_calls or [] %}{% if call.function.name != 'add' %}{{ call | tojson }}{% endif %}"
    "{% endfor %}{% if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a={% endif %}"
)


def add(a: int, b: int) -> str:
    """Adds two numbers.

    Args:
        a: one.
        b: the other.
    """
    return str(a + b)


def thinking_tokenizer():
    """Reads the first half of a completion as thinking, which the chat template strips, and a call in most."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = STRIPS
    tokenizer.response_template = {}  # TRL then asks the tokenizer to read completions

    def read(ids, prefix, tools=None):
        text = tokenizer.decode(ids, skip_special_tokens=True).replace(" ", "")
        half = -(-len(text) // 2)
        message = {"role": "assistant", "content": f"<think>{text[:half]}</think>{text[half:]}"}
        if ids[0] % 4:
            call = {"name": "add", "arguments": {"a": ids[0], "b": len(ids)}}
            message["tool_calls"] = [{"type": "function", "function": call}]
        return message

    tokenizer.parse_response = read
    return tokenizer


class OneByOne:
    """A reward that computes each row of a batch alone, by transformers, with the adapter that drew it.

    Attributes:
        differences: for each row of each episode, the largest difference from the engine's log-probabilities.
    """

    def __init__(self, base: str, ahead: int):
        self.ahead = ahead
        self.adapters: list[dict] = []  # before each optimizer step
        self.differences: list[list[float]] = []
        self.reference = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), tiny.lora())
        self.reference.eval()
        self.trainer = None
        self.__name__ = "one_by_one"

    @torch.no_grad()
    def __call__(self, completions, rows, **_columns):
        adapter = get_peft_model_state_dict(self.trainer.model)
        self.adapters.append({name: x.clone() for name, x in adapter.items()})
        step = self.trainer.state.global_step
        assert len(self.adapters) == step + 1
        set_peft_model_state_dict(self.reference, self.adapters[max(0, step - self.ahead)])
        self.differences += [[self.difference(row) for row in episode] for episode in rows]
        return tiny.digit_share(completions)

    def difference(self, row: dict) -> float:
        ids = torch.tensor(row["input_ids"])
        logps = self.reference(ids[None]).logits[0, :-1].log_softmax(-1)
        is_sampled = torch.tensor(row["sampled_mask"]).bool()[1:]
        expected = logps.gather(1, ids[1:, None])[is_sampled, 0]
        return (expected - torch.tensor(row["logprobs"])).abs().max().item()


@pytest.mark.parametrize("ahead", [0, 1])
def test_rows_have_log_probabilities_of_their_own_adapter(server, quantized_base, tmp_path, ahead):
    torch.manual_seed(0)
    base = quantized_base[1]
    reward = OneByOne(base, ahead)
    settings = {
        "use_vllm": True, **on_server(server.url), "history": "template", "rollouts_ahead": ahead,
        "max_completion_length": 48, "max_tool_calling_iterations": TURNS - 1, "learning_rate": 0.1,
        "generation_kwargs": {"stop_token_ids": list(range(13, 21))}, "model_init_kwargs": {"dtype": "float32"},
    }  # fmt: skip
    prompts = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"{i}+{3 * i}"}] for i in range(16)]})
    trainer = EfficientGRPOTrainer(
        base, reward, tiny.config(EfficientGRPOConfig, tmp_path, **settings), prompts, peft_config=tiny.lora(),
        processing_class=thinking_tokenizer(), tools=[add],
    )  # fmt: skip
    reward.trainer = trainer
    trainer.train()
    assert len(reward.differences) == 8 * 3
    counts = {len(episode) for episode in reward.differences}
    assert TURNS in counts and len(counts) > 1  # histories that part at every turn, and shorter episodes
    assert max(difference for episode in reward.differences for difference in episode) < 1e-4
    # The trainer's own pass over the tree of rows, with the adapter that drew them or with the next one.
    differences = figures(trainer, "sampling/sampling_logp_difference/max")
    assert differences[0] < 1e-4
    if ahead:
        assert figures(trainer, "sampling/staleness") == [0, 1, 1] and min(differences[1:]) > 1e-4
    else:
        assert max(differences) < 1e-4
