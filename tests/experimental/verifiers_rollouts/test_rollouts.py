"""Rows and rewards of traces; those here have the attributes that are read of the library's own."""

import sys
from types import SimpleNamespace

import pytest

from trl_fsdp_qlora.errors import UserError
from trl_fsdp_qlora.experimental.verifiers_rollouts import VerifiersRollouts
from trl_fsdp_qlora.experimental.verifiers_rollouts.rollouts import rows_of, trained_trace


def node(token_ids, sampled=(), logprobs=()):
    return SimpleNamespace(
        token_ids=list(token_ids), mask=[token in sampled for token in token_ids], logprobs=list(logprobs)
    )


def trace_of(*paths, **attributes):
    branches = [
        SimpleNamespace(nodes=path, trainable=True, token_ids=[token for part in path for token in part.token_ids])
        for path in paths
    ]
    agent = SimpleNamespace(name="agent", trainable=True)
    return SimpleNamespace(branches=branches, agent=agent, errors=[], num_turns=1, **attributes)


def test_a_turn_of_two_branches_is_sampled_in_the_first_alone():
    question, first = node([5, 6]), node([7, 8, 9], sampled=(8, 9), logprobs=[-0.8, -0.9])
    left, right = node([10, 11], sampled=(11,), logprobs=[-1.1]), node([12, 13], sampled=(13,), logprobs=[-1.3])
    rows = rows_of(trace_of([question, first, left], [question, first, right]), 0)
    assert rows == [
        {"input_ids": [5, 6, 7, 8, 9, 10, 11], "sampled_mask": [0, 0, 0, 1, 1, 0, 1], "logprobs": [-0.8, -0.9, -1.1]},
        {"input_ids": [5, 6, 7, 8, 9, 12, 13], "sampled_mask": [0, 0, 0, 0, 0, 0, 1], "logprobs": [-1.3]},
    ]


def test_branches_that_the_library_does_not_train_have_no_row():
    trace = trace_of([node([5, 6], sampled=(6,))], [node([5, 7], sampled=(7,))])
    trace.branches[1].trainable = False
    assert rows_of(trace, 0) == [{"input_ids": [5, 6], "sampled_mask": [0, 1], "logprobs": None}]


def test_without_the_library_one_line_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(UserError, match=r"^verifiers_rollouts needs .*: pip install 'trl-fsdp-qlora\[verifiers\]'$"):
        VerifiersRollouts(SimpleNamespace())


def test_a_trace_without_token_ids_is_refused_in_one_line():
    with pytest.raises(UserError, match="the trace of task 3 has no token ids: agent 'agent' has a client") as raised:
        rows_of(trace_of([node([])]), 3)
    assert "\n" not in str(raised.value)


def test_one_agent_of_an_episode_is_trained():
    judge, solver = trace_of([node([5])]), trace_of([node([6])])
    judge.agent.trainable = False
    assert trained_trace(SimpleNamespace(traces=[judge, solver], errors=[]), 0) is solver
    judge.agent.trainable = True
    with pytest.raises(UserError, match="episode of task 4 has 2 trained agents"):
        trained_trace(SimpleNamespace(traces=[judge, solver], errors=[]), 4)
