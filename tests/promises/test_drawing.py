"""Who draws completions: what a user puts in the place of TRL's own code is what draws."""

import pytest
import trl

import trl_fsdp_qlora
from tests import tiny


def completions_of_a_run(folder, trainer_class, config_class) -> list[list[str]]:
    drawn = []

    def reward(completions, **_columns):
        drawn.append(completions)
        return tiny.digit_share(completions)

    tiny.trainer(trainer_class, config_class, folder, peft_config=tiny.lora(), reward=reward, max_steps=2).train()
    return drawn


@pytest.mark.parametrize("method", ["GRPO", "RLOO"])
def test_a_draw_that_a_user_patches_onto_trls_class_is_the_draw_of_ours(tmp_path, monkeypatch, method):
    """With the arguments of TRL's own, as a user's engine has them; the completions are equal to stock TRL's."""
    stock_class = getattr(trl, f"{method}Trainer")

    def engine(self, prompt_ids, images, multimodal_fields, num_generations=None):
        completion_ids = [[5 + (sum(ids) + row) % 9, 6, 7] for row, ids in enumerate(prompt_ids)]
        return (completion_ids, None) if method == "GRPO" else completion_ids

    monkeypatch.setattr(stock_class, "_generate_single_turn", engine)
    stock = completions_of_a_run(tmp_path / "stock", stock_class, getattr(trl, f"{method}Config"))
    ours = completions_of_a_run(
        tmp_path / "ours",
        getattr(trl_fsdp_qlora, f"Efficient{method}Trainer"),
        getattr(trl_fsdp_qlora, f"Efficient{method}Config"),
    )
    assert ours == stock and len(stock) == 2
