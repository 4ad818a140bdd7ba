import pytest

from trl_fsdp_qlora.recipe import rewards
from trl_fsdp_qlora.recipe.answers import UnparsableGoldAnswer


def test_exact_answer_takes_plain_and_conversational_completions():
    reward = rewards.exact_answer_reward("hash")
    conversation = [{"role": "assistant", "content": "#### 1,234.0"}]
    assert reward(completions=["#### 7", conversation, "7", "#### 8"], answer=["7", "1234", "7", "7"]) == [1, 1, 0, 0]
    assert reward.__name__ == "exact_answer"
    with pytest.raises(ValueError, match=r"'hashes' is not one of auto, hash"):
        rewards.exact_answer_reward("hashes")


def test_a_row_without_an_answer_is_not_judged_and_content_parts_are_read():
    """Of several tasks in one dataset, those of another: TRL leaves `None` out."""
    for reward in (rewards.exact_answer_reward(), rewards.graded_reward):
        judged, other = reward(completions=["<answer>1</answer>", "2"], answer=["1", None])
        assert judged > 0 and other is None
    parts = [{"type": "text", "text": "so "}, {"type": "image"}, {"type": "text", "text": "#### 7"}]
    completions = [[{"role": "assistant", "content": parts}], [{"role": "assistant", "content": None}]]
    assert rewards.exact_answer_reward("hash")(completions=completions, answer=["7", "7"]) == [1, 0]
    assert rewards.tag_format_reward(completions) == [0, 0]


@pytest.mark.parametrize("gold", ["no answer", "", "about five", "1 or 2", ["7"], {"value": 7}])
def test_an_unparsable_gold_answer_is_an_error_that_names_the_row(gold):
    with pytest.raises(UnparsableGoldAnswer, match="row 17"):
        rewards.exact_answer_reward()(completions=["1", "2"], answer=["1", gold], row=[3, 17])
    with pytest.raises(UnparsableGoldAnswer, match="row 17"):
        rewards.graded_reward(completions=["1", "2"], answer=["1", gold], row=[3, 17])


def test_tag_format():
    good = "<reasoning>a\nb</reasoning>\n<answer>1</answer>\n"
    assert rewards.tag_format_reward([good, good + "more", "<answer>1</answer>", ""]) == [1, 0, 0, 0]


def test_graded_reward_follows_the_blog():
    full = "<reasoning>r</reasoning><answer>{}</answer>"
    completions = [*map(full.format, ("72", "the sum is 72 clips", "71")), "72", "<answer>72</answer>"]
    given = rewards.graded_reward(completions, answer=["72"] * 5)
    assert given == pytest.approx([2.8, 2.3, 0.8, 0.0, 2.4])


def test_every_completion_is_judged():
    tags = [*rewards._TAGS, *"{} \n9-", "\\boxed{", "####", "1/"]
    tags += ["</reasoning><answer>", "<answer>9", "$ ", "9,999", ".", "9.", "- 1 ", "1e9", " 9 "]
    ends = ("", "</answer>x")
    texts = [("<reasoning>" + tag * (100_000 // len(tag)) + end)[-110_000:] for tag in tags for end in ends]
    texts += ["<reasoning>" + "</reasoning>" * 5000 + "<answer>" * 5000 + "</answer>" * 5000]
    gold = ["7"] * len(texts)
    for reward in (rewards.exact_answer_reward(), rewards.graded_reward, rewards.tag_format_reward):
        assert len(reward(completions=texts, answer=gold)) == len(texts)
