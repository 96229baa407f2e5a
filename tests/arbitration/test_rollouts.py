"""Rollouts: decisions recorded, branches forced, the oracle's tree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import hasten
from hasten.api import LLM
from hasten.arbitration import rollouts as module
from hasten.arbitration.features import scalars
from hasten.arbitration.mismatch import Mismatch
from hasten.arbitration.rollouts import draft_mark, oracle, rollouts
from hasten.arbitration.rules import Always, Random, Rule, Scripted, Target
from hasten.errors import OptionError
from tests.arbitration.cases import Alternating
from tests.tiny_llm import make_model, make_tokenizer, metered

METHOD = "cospec:target,head=own,exits=1,gate=0,consecutive=0"
HOW: dict[str, Any] = {"method": METHOD, "max_new_tokens": 12, "ignore_eos": True}
PROMPTS = ["abc", "hello there", "xyz"]


@pytest.fixture(scope="module", params=["fused", "transformers"])
def shared(request: Any, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """On either engine; transformers' models have no exits, so that a model drafts there."""
    if request.param == "fused":
        return hasten.load((make_model(), make_tokenizer()), method="ar")
    folder = tmp_path_factory.mktemp("draft")
    make_model(num_hidden_layers=1).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    llm = hasten.load((make_model(), make_tokenizer()), method="ar", engine="transformers")
    llm.draft = str(folder)  # type: ignore[attr-defined]
    return llm


@pytest.fixture
def how(shared: LLM) -> dict[str, Any]:
    draft = getattr(shared, "draft", None)
    model = f"cospec:target,draft=draft-model,model={draft},gate=0,consecutive=0"
    return HOW if draft is None else {**HOW, "method": model}


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    with metered(shared) as counted:
        yield counted


def test_each_request_has_a_rule_of_its_own(llm: LLM, how: dict[str, Any]) -> None:
    rules: list[Rule] = [Target(), Always(), Alternating()]
    together = rollouts(llm, PROMPTS, rules, **how)
    alone = [rollouts(llm, [p], [r], **how)[0] for p, r in zip(PROMPTS, rules, strict=True)]
    assert [t.tokens for t in together] == [a.tokens for a in alone]
    assert together[0].tokens == llm.generate("abc", max_new_tokens=12, ignore_eos=True).tokens
    assert {r.kept for r in together[0].records} == {False}
    assert {r.kept for r in together[1].records} == {True}
    assert [r.kept for r in together[2].records][:2] == [True, False]
    assert [t.problem for t in together] == ["0", "1", "2"]


def test_a_prompt_given_several_times_runs_once_and_answers_alike(
    llm: LLM, how: dict[str, Any]
) -> None:
    from tests.tiny_llm import meter

    rules: list[Rule] = [Target(), Always(), Target(), Alternating()]
    alone = rollouts(llm, ["hello there"], [Alternating()], **how)[0]
    before = meter(llm).rows
    once = rollouts(llm, ["hello there"], [Target()], **how)[0]
    rows = meter(llm).rows - before
    got = rollouts(llm, ["hello there"] * 4, rules, **how)
    assert got[0].tokens == got[2].tokens == once.tokens
    assert got[3].tokens == alone.tokens
    if llm.target.capabilities.fork:
        assert meter(llm).rows - before - rows < 4 * rows


def test_records_say_what_was_decided_on(llm: LLM, how: dict[str, Any]) -> None:
    seen: list[tuple[int, Any]] = []

    class Watching(Rule):
        def keep(self, m: Mismatch) -> bool:
            seen.append((m.position, scalars(m)))
            return m.number % 2 == 0

    (got,) = rollouts(llm, ["hello there"], [Watching()], problems=["p7"], **how)
    assert got.records
    kept = [(at, x) for at, x in seen if at < len(got.tokens)]
    assert [r.position for r in got.records] == [at for at, _ in kept]
    for record, (_, x) in zip(got.records, kept, strict=True):
        assert np.array_equal(record.scalars, x)  # type: ignore[arg-type]
        assert record.problem == "p7"
        token = got.tokens[record.position]
        assert token == (record.drafted if record.kept else record.target)
        assert (record.logp, record.forced, record.hidden) == (0.0, False, None)
        assert 1 <= record.place <= 4
    assert [r.number for r in got.records] == list(range(len(got.records)))
    assert got.target_passes == got.result.metrics.target_passes
    assert got.drafted == got.result.metrics.drafted
    bare = rollouts(llm, ["hello there"], [Target()], scalars=False, **how)[0]
    assert all(r.scalars is None for r in bare.records)


def test_hidden_features_come_where_they_are_asked_for(llm: LLM, how: dict[str, Any]) -> None:
    (got,) = rollouts(llm, ["hello there"], [Alternating()], hidden=True, **how)
    plain = rollouts(llm, ["hello there"], [Alternating()], **how)[0]
    assert got.tokens == plain.tokens
    for record in got.records:
        assert record.hidden is not None
        assert record.hidden.shape == (3 * 32,)
        assert np.isfinite(record.hidden).all()


def test_both_branches_of_a_mismatch_share_what_went_before(llm: LLM, how: dict[str, Any]) -> None:
    (base,) = rollouts(llm, ["hello there"], [Alternating()], **how)
    for number in (0, 1, 2):
        place = base.records[number].position
        before = {r.number: r.kept for r in base.records[:number]}
        yes, no = rollouts(
            llm,
            ["hello there"] * 2,
            [Scripted({**before, number: kept}, Alternating()) for kept in (True, False)],
            **how,
        )
        assert yes.tokens[:place] == no.tokens[:place] == base.tokens[:place]
        assert yes.tokens[place] == base.records[number].drafted
        assert no.tokens[place] == base.records[number].target
        assert [r.forced for r in yes.records[: number + 1]] == [True] * (number + 1)
        assert not any(r.forced for r in yes.records[number + 1 :])


def test_the_gates_own_decisions_are_not_the_rules(llm: LLM, how: dict[str, Any]) -> None:
    gated = {**how, "method": how["method"].replace("gate=0", "gate=0.001")}
    made = rollouts(llm, PROMPTS, [Always()] * 3, **gated)
    asked = [len(got.records) for got in made]
    assert sum(asked) > 0
    assert sum(got.result.metrics.mismatches for got in made) > sum(asked)
    for got in made:
        assert all(r.kept for r in got.records)
        numbers = {r.number for r in got.records}
        assert numbers <= set(range(got.result.metrics.mismatches))


def test_seeds_key_what_is_drawn(llm: LLM, how: dict[str, Any]) -> None:
    def text(seed: int) -> tuple[int, ...]:
        return rollouts(llm, ["abc"], [Random(0.5)], seeds=[seed], **how)[0].tokens

    assert text(3) == text(3)
    assert len({text(seed) for seed in range(8)}) > 1


def test_the_oracle_tries_every_combination_once(llm: LLM, how: dict[str, Any]) -> None:
    found = oracle(llm, PROMPTS, lambda index, text: index == 1, most=3, **how)
    assert [each.solved for each in found] == [False, True, False]
    for prompt, each in zip(PROMPTS, found, strict=True):
        assert (
            each.leaves[0].tokens == llm.generate(prompt, max_new_tokens=12, ignore_eos=True).tokens
        )
        assert each.tried == 2**3, "as many mismatches as that were there"
        decided = [tuple(r.kept for r in leaf.records[:3]) for leaf in each.leaves]
        assert len(set(decided)) == 8
        assert not any(r.kept for leaf in each.leaves for r in leaf.records[3:])


def test_an_oracle_over_no_mismatch_is_the_target(llm: LLM, how: dict[str, Any]) -> None:
    (found,) = oracle(llm, ["abc"], lambda index, text: True, most=0, **how)
    assert found.tried == 1


def test_the_draft_is_told_apart_by_its_mark(llm: LLM, how: dict[str, Any]) -> None:
    mark = draft_mark(llm, how["method"])
    assert mark == draft_mark(llm, how["method"].replace("gate=0", "gate=0.5"))
    assert mark.startswith(("own-head-1-", "model-"))
    with pytest.raises(OptionError, match="doesn't arbitrate"):
        draft_mark(llm, "ar")


def test_lists_of_other_lengths_are_refused(llm: LLM, how: dict[str, Any]) -> None:
    for bad in ({"problems": ["a"]}, {"seeds": [1, 2, 3]}):
        with pytest.raises(OptionError, match=next(iter(bad))):
            rollouts(llm, ["a", "b"], [Target(), Target()], **{**how, **bad})
    with pytest.raises(OptionError, match="rules"):
        rollouts(llm, ["a", "b"], [Target()], **how)


def test_the_oracle_cannot_be_chosen_as_a_rule() -> None:
    from hasten.builtin.cospec import RULES

    assert "oracle" not in RULES
    assert hasattr(module, "oracle")
