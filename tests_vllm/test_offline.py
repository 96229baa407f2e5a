"""vLLM with hasten's drafts says what vLLM says, in fewer passes than with drafts of its own."""

from __future__ import annotations

import pytest

from conftest import GREEDY, MAX_TOKENS, SAMPLED, Answer, K, tokens_per_pass

CHEAP = "auto;row_cost=0.02"
"""Rows cost what they do on a GPU: the default there. Counters are compared, not times."""


@pytest.fixture(scope="session")
def ours(answer: Answer) -> dict:
    return answer("hasten", CHEAP, (GREEDY, SAMPLED))


def test_greedy_answers_are_those_of_vllm_without_drafts(answer: Answer, ours: dict) -> None:
    plain = answer("plain")["answers"][0]
    assert len(plain) == 24
    assert ours["answers"][0] == plain


def test_more_tokens_come_of_a_pass_than_with_vllms_own_ngram_drafts(
    answer: Answer, ours: dict
) -> None:
    ngram = answer("ngram")
    assert tokens_per_pass(ours) > tokens_per_pass(ngram) > 1.0


def test_counters_are_conserved_and_drafts_no_longer_than_asked(ours: dict) -> None:
    for counters in ours["counters"]:
        assert 0 < counters["accepted"] <= counters["drafted"] <= K * counters["drafts"]
        assert counters["drafts"] <= 24 * MAX_TOKENS


def test_sampled_requests_run_and_are_drafted_for(ours: dict) -> None:
    sampled = ours["answers"][1]
    assert all(0 < len(ids) <= MAX_TOKENS for ids in sampled)
    assert sampled != ours["answers"][0]
    assert ours["counters"][1]["accepted"] > 0


def test_requests_that_are_over_leave_nothing(ours: dict) -> None:
    # The one that came last is freed by the next step, of which there is none.
    assert ours["sessions"] <= 1


def test_dear_rows_are_drafted_less_and_surer(answer: Answer, ours: dict) -> None:
    made = answer("hasten", "auto;row_cost=0.2")
    assert made["answers"] == [ours["answers"][0]]
    dear = made["counters"][0]
    cheap = ours["counters"][0]
    assert dear["drafted"] < cheap["drafted"]
    assert dear["accepted"] / dear["drafted"] > cheap["accepted"] / cheap["drafted"]


def test_an_unknown_runner_is_served_by_tokens_alone(answer: Answer) -> None:
    made = answer("hasten", CHEAP, known=False)
    assert made["answers"][0] == answer("plain")["answers"][0]
    assert made["counters"][0]["accepted"] > 0
    assert made["sessions"] <= 8
    assert "isn't one the plug-in knows" in made["log"]
