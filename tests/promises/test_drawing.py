"""Who draws completions, and behind which prompts: as in stock TRL."""

import functools

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
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("method", ["GRPO", "RLOO"])
def test_a_users_decorator_around_trls_prepare_inputs_is_called(tmp_path, monkeypatch, method):
    """As often as in stock TRL, such as a profiler's."""
    trainer = getattr(trl, f"{method}Trainer")
    stock = trainer._prepare_inputs
    calls = []

    @functools.wraps(stock)
    def counted(self, batch):
        calls.append(len(batch))
        return stock(self, batch)

    monkeypatch.setattr(trainer, "_prepare_inputs", counted)
    counts = {}
    for who, pair in classes(method).items():
        run(tmp_path / who, *pair)
        counts[who] = list(calls)
        calls.clear()
    assert counts["ours"] == counts["stock"] != []


def test_a_trainer_is_the_users_while_it_draws(tmp_path):
    """What a user's function finds on the trainer is what the user has put there, and what it sets stays."""
    seen = []

    def look(trainer):
        trainer.looks = getattr(trainer, "looks", 0) + 1
        functions = trainer.rollout_func is rollout, trainer.reward_funcs == [reward]
        seen.append((type(trainer), *functions, vars(trainer).keys() & {"_generate", "_log_metric"}))

    def rollout(prompts, trainer):
        look(trainer)
        ids = [[5 + row % 9, 6] for row in range(len(prompts))]
        return {"prompt_ids": [[7]] * len(prompts), "completion_ids": ids, "logprobs": [[-0.5, -0.5]] * len(ids)}

    def reward(completions, **_columns):
        look(grpo)
        return tiny.digit_share(completions)

    trainer_class, config_class = classes("GRPO")["ours"]
    options = {"peft_config": tiny.lora(), "reward": reward, "max_steps": 1}
    grpo = tiny.trainer(trainer_class, config_class, tmp_path, **options)
    grpo.rollout_func = rollout
    grpo.train()
    assert seen == [(trainer_class, True, True, set())] * 2
    assert grpo.looks == 2
