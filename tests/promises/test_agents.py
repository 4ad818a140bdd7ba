"""Promises of docs/agents.md: what an agent sampled is trained in the rows in which it was served."""

import torch

from tests.engines.decode import test_history as history
from tests.tiny import trainer as make_trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer


def rows_of_two_turns(number: int) -> list[dict]:
    """A second turn whose history lacks what the first turn thought."""
    prompt, thought, said, seen = [5, 6, 7], [8 + number, 9], [10, 11], [12]
    return [
        {"input_ids": prompt + thought + said, "sampled_mask": [0, 0, 0, 1, 1, 1, 1], "logprobs": None},
        {"input_ids": prompt + said + seen + [13 + number], "sampled_mask": [0] * 6 + [1], "logprobs": None},
    ]


def test_a_rollout_func_with_rows_trains_on_what_was_sampled(tmp_path):
    trainer = make_trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, max_steps=2)
    trainer.rollout_func = lambda prompts, _: {"rows": [rows_of_two_turns(i) for i in range(len(prompts))]}
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.train()
    (inputs,) = trainer._buffered_inputs
    completions = inputs["completion_ids"].tolist()
    assert sorted(completions) == [[8 + i, 9, 10, 11, 13 + i] for i in range(len(completions))]
    assert any(not torch.equal(old, new) for old, new in zip(before, trainer.model.parameters(), strict=True))


def test_a_stripping_template_is_trained_as_it_is_served(tmp_path):
    trainer = history.make_trainer(tmp_path, history.STRIPS, history="template")
    trainer.train()
    (inputs,) = trainer._buffered_inputs
    seen = [row["input_ids"][~row["sampled_mask"]] for rows in inputs["rows"] for row in rows]
    texts = trainer.processing_class.batch_decode(seen)
    assert sum("<|im_start|>tool" in text for text in texts) == 4
    assert not any("<think>" in text for text in texts)
