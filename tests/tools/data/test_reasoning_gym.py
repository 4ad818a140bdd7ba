"""Problems, verifiers and refusals of reasoning-gym's generators, against reasoning-gym itself."""

import importlib.util

import pytest
import reasoning_gym as gym

from trl_fsdp_qlora.tools.data.datasets import DatasetError, read_problems
from trl_fsdp_qlora.tools.data.rewards import get_reward
from trl_fsdp_qlora.tools.evaluation.accuracy import evaluate
from trl_fsdp_qlora.tools.evaluation.measurement import Measurement
from trl_fsdp_qlora.tools.recipe.arguments import ScriptArguments
from trl_fsdp_qlora.tools.recipe.problems import load_data, load_held_out
from trl_fsdp_qlora.tools.small_base import character_tokenizer

from ...tiny import tiny_model


def arguments(dataset, **options):
    return ScriptArguments(dataset=dataset, rewards=["reasoning_gym"], chat=False, **options)


def test_training_and_test_never_meet_and_no_problem_comes_twice():
    """Two numbers of one digit leave 200 questions in all, so both splits draw the same ones again and again."""
    few = "reasoning_gym:chain_sum(max_terms=2, max_digits=1, size=100)"
    train = [problem["question"] for problem in read_problems(few)]
    test = [problem["question"] for problem in read_problems(few, "test")]
    assert len(train) == len(set(train)) and len(test) == len(set(test)) and not {*train} & {*test}
    many = "reasoning_gym:chain_sum(min_digits=3, max_digits=4)"
    assert len({problem["question"] for problem in read_problems(many)}) == 10_000
    assert len(read_problems(many, "test")) == 500


@pytest.mark.parametrize("name", ["chain_sum", "spell_backward", "family_relationships", "fraction_simplification"])
def test_problems_and_rewards_are_the_generators_own(name):
    theirs = gym.create_dataset(name, seed=0, size=12)
    problems = read_problems(f"reasoning_gym:{name}(size=12)", whole_rows=True)
    for problem in problems:
        entry = theirs[problem["row"]]
        assert (problem["question"], problem["columns"]["answer"]) == (entry["question"], str(entry["answer"]))
    entries = [problem["entry"] for problem in problems]
    reward = get_reward("reasoning_gym", "first_line")
    for answer in ("7", "mother", "1/2", problems[0]["answer"]):
        ours = reward([answer] * len(problems), entry=entries)
        assert ours == [theirs.score_answer(answer, theirs[problem["row"]]) for problem in problems]


def test_evaluate_counts_what_the_verifier_accepts(monkeypatch):
    """The tiny model's completions are replaced by the right answers of every other problem, written in words."""
    data = load_held_out(arguments("reasoning_gym:spell_backward", eval_problems=20))
    texts = [row["answer"] if i % 2 else "nothing" for i, row in enumerate(data)]
    tokenizer = character_tokenizer()
    generate_name = "trl_fsdp_qlora.tools.evaluation.drawing.generate"
    monkeypatch.setattr(generate_name, lambda model, ids, *_, **__: [[i] for i in range(len(ids))])
    monkeypatch.setattr(tokenizer, "batch_decode", lambda rows, **_: [texts[row[0]] for row in rows])
    measurement = Measurement(batch_size=20, answer_format="first_line")
    result = evaluate(tiny_model(), tokenizer, data, measurement)
    assert (result.correct, result.strict, result.n) == (10, 10, 20)


def test_eval_problems_are_the_first_that_a_generator_drew():
    """They are drawn at random; figures in docs/learning.md and in recipes are of these."""
    script = arguments("reasoning_gym:spell_backward", eval_problems=20)
    first = [problem["row"] for problem in read_problems("reasoning_gym:spell_backward", "test")[:20]]
    assert load_held_out(script)["row"][:] == load_data(script)[1]["row"][:] == first


def test_bad_input_is_one_line(monkeypatch):
    with pytest.raises(DatasetError, match="'validation'"):
        read_problems("reasoning_gym:chain_sum", "validation")
    wrong = {
        "chain_sums": "did you mean 'chain_sum'?",
        "chain_sum(maxterms=2)": "'maxterms'",
        "chain_sum(min_terms=3, max_terms=2)": "max_terms must be >= min_terms",
        "chain_sum(max_terms=4)": "pip install 'trl-fsdp-qlora[reasoning-gym]'",  # the last, where it is not there
    }
    spellings = ("", "chain_sum + products", "chain_sum(2)", "chain_sum(max_terms=n)")
    for source, message in (dict.fromkeys(spellings, "is not spelled as a generator") | wrong).items():
        if "pip" in message:
            monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(DatasetError) as error:
            load_data(arguments(f"reasoning_gym:{source}"))
        assert message in str(error.value) and "\n" not in str(error.value)
