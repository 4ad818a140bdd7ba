"""Who draws completions, and behind which prompts: as in stock TRL."""

import pytest
import transformers
import trl
from datasets import Dataset

import trl_fsdp_qlora
from tests import tiny
from trl_fsdp_qlora.errors import UserError


def classes(method: str) -> dict[str, tuple[type, type]]:
    """Trainer and config of stock TRL, and of this package."""
    return {
        who: tuple(getattr(module, f"{prefix}{method}{part}") for part in ("Trainer", "Config"))
        for who, module, prefix in (("stock", trl, ""), ("ours", trl_fsdp_qlora, "Efficient"))
    }


def run(folder, trainer_class, config_class, **settings) -> tuple[list[list[str]], list[float]]:
    """The completions of two steps, and the norms of their gradients."""
    drawn = []

    def reward(completions, **_columns):
        drawn.append(completions)
        return tiny.digit_share(completions)

    transformers.set_seed(0)
    options = {"peft_config": tiny.lora(), "reward": reward, "max_steps": 2, "max_grad_norm": 1e9}
    trainer = tiny.trainer(trainer_class, config_class, folder, **options, **settings)
    trainer.train()
    return drawn, [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]


@pytest.mark.parametrize("method", ["GRPO", "RLOO"])
def test_a_draw_that_a_user_patches_onto_trls_class_draws(tmp_path, monkeypatch, method):
    """With the arguments of TRL's own, as a user's engine has them; the completions are equal to stock TRL's."""

    def engine(self, prompt_ids, images, multimodal_fields, num_generations=None):
        completion_ids = [[5 + (sum(ids) + row) % 9, 6, 7] for row, ids in enumerate(prompt_ids)]
        return (completion_ids, None) if method == "GRPO" else completion_ids

    monkeypatch.setattr(getattr(trl, f"{method}Trainer"), "_generate_single_turn", engine)
    drawn = {who: run(tmp_path / who, *pair)[0] for who, pair in classes(method).items()}
    assert drawn["ours"] == drawn["stock"] and len(drawn["stock"]) == 2


@pytest.mark.parametrize("method", ["GRPO", "RLOO"])
def test_an_empty_prompt_among_others_is_trained_as_in_stock(tmp_path, method):
    """It is not the first of its batches: then stock ends in an error of types."""
    rows = Dataset.from_dict({"prompt": ["", "1+1="] * 4})
    (stock, stock_norms), (ours, norms) = (
        run(tmp_path / who, *pair, dataset=rows, seed=7, **({} if who == "stock" else {"compact_generation": False}))
        for who, pair in classes(method).items()
    )
    assert ours == stock and len(stock) == 2
    # The same numbers are added in another order, in float32.
    assert norms == pytest.approx(stock_norms, rel=1e-4)


@pytest.mark.parametrize("method", ["GRPO", "RLOO"])
def test_empty_prompts_with_which_stock_ends_are_one_line(tmp_path, method):
    rows = Dataset.from_dict({"prompt": [""] * 8})
    stock, ours = classes(method).values()
    with pytest.raises(IndexError):
        run(tmp_path / "stock", *stock, dataset=rows)
    with pytest.raises(UserError) as raised:
        run(tmp_path / "ours", *ours, dataset=rows)
    assert "no tokens" in str(raised.value) and "\n" not in str(raised.value)
