"""`speculate` when `generate` samples: the distribution, the seeds, and torch's generator."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tests.plugins.transformers_cases import generate, knowing, prompt
from tests.targets import tiny_models

from hasten.errors import OptionError
from hasten.plugins.transformers import speculate

__all__ = ["knowing"]

WARPED: dict[str, Any] = {"do_sample": True, "temperature": 1.7, "top_k": 9, "top_p": 0.95}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_models.build(tiny_models.llama)


@pytest.mark.parametrize(
    "options",
    [
        {},
        WARPED,
        {"top_k": 0, "min_p": 0.05},
        {"top_k": 0, "typical_p": 0.6},
        {"eta_cutoff": 0.01, "repetition_penalty": 1.5},
        {"epsilon_cutoff": 0.01, "no_repeat_ngram_size": 1},
    ],
)
def test_a_seed_gives_the_same_answer_whatever_drafts(
    options: Any, model: Any, knowing: Any
) -> None:
    options = {"do_sample": True, **options}
    plain = generate(model, prompt(), speculate("ar", seed=5), **options)
    knowing.extend(plain.tolist())
    for method in ("oracle", "flaky", "wide", "adversarial", "drawn", "racer,nodes=8"):
        got = generate(model, prompt(), speculate(method, seed=5), **options)
        assert torch.equal(got, plain), method
    assert not torch.equal(plain, generate(model, prompt(), speculate("ar", seed=6), **options))


def test_scores_of_a_sampled_answer_are_plain_generates_for_the_same_tokens(
    model: Any, knowing: Any
) -> None:
    options = {**WARPED, "return_dict_in_generate": True, "output_scores": True}
    got = generate(model, prompt(), speculate("racer,nodes=8", seed=2), **options)
    for step in (0, 5, 23):
        ids = got.sequences[:, : 9 + step]
        (plain,) = generate(model, ids, **{**options, "max_new_tokens": 1}).scores
        assert torch.equal(plain.isinf(), got.scores[step].isinf())
        finite = plain.isfinite()
        torch.testing.assert_close(plain[finite], got.scores[step][finite], atol=1e-4, rtol=0)


@pytest.mark.parametrize("verify", ["match", "rejection"])
def test_tokens_come_as_often_as_the_models_probabilities_say(
    verify: str, model: Any, knowing: Any
) -> None:
    """Two tokens of 250 rows, the second one verified against a drawn draft."""
    rows = 250
    options = {**WARPED, "temperature": 2.5, "top_k": 4, "top_p": 1.0, "max_new_tokens": 3}
    speculation = speculate("drawn", verify=verify, seed=11)
    got = generate(model, prompt(), speculation, num_return_sequences=rows, **options)
    first = Counter(got[:, 9].tolist())
    _expect(first, _chances(model, prompt(), options), rows)
    token, count = first.most_common(1)[0]
    second = Counter(got[got[:, 9] == token][:, 10].tolist())
    after = torch.cat([prompt(), torch.tensor([[token]])], 1)
    _expect(second, _chances(model, after, options), count)
    assert sum(each.drafted for each in speculation.statistics) > 0


def _chances(model: Any, ids: torch.Tensor, options: Any) -> torch.Tensor:
    """Plain `generate`'s distribution of the next token."""
    asked = {**options, "max_new_tokens": 1}
    output = generate(model, ids, return_dict_in_generate=True, output_scores=True, **asked)
    chances: torch.Tensor = output.scores[0][0].softmax(-1)
    return chances


def _expect(counts: Counter[int], chances: torch.Tensor, rows: int) -> None:
    assert set(counts) <= set(chances.nonzero()[:, 0].tolist())
    for token in chances.nonzero()[:, 0].tolist():
        p = float(chances[token])
        assert abs(counts[token] - rows * p) < 4.5 * (rows * p * (1 - p)) ** 0.5 + 1


def test_returned_sequences_differ_and_each_can_be_repeated_alone(model: Any) -> None:
    speculation = speculate("racer,nodes=6", seed=4)
    got = generate(model, prompt(), speculation, num_return_sequences=3, **WARPED)
    assert len({tuple(row) for row in got.tolist()}) == 3
    assert len(speculation.statistics) == len(set(speculation.seeds)) == 3
    for row, seed in zip(got, speculation.seeds, strict=True):
        again = generate(model, prompt(), speculate("ar", seed=seed), **WARPED)
        assert again[0].tolist() == row.tolist()
    each = speculate("ar", seed=list(speculation.seeds))
    assert torch.equal(generate(model, prompt(), each, num_return_sequences=3, **WARPED), got)


def test_an_allowed_prefix_function_hears_the_number_of_its_prompt(model: Any) -> None:
    ids = torch.cat([prompt(9, 1), prompt(9, 2)])
    heard = set()

    def allowed(row: int, sentence: torch.Tensor) -> list[int]:
        heard.add((row, sentence[0].item()))
        return list(range(50 * row, 50 * row + 50))

    options = {**WARPED, "num_return_sequences": 2, "prefix_allowed_tokens_fn": allowed}
    got = generate(model, ids, speculate("racer,nodes=6", seed=1), **options)
    assert (got[:2, 9:] < 50).all()
    assert (got[2:, 9:] >= 50).all()
    assert heard == {(0, ids[0, 0].item()), (1, ids[1, 0].item())}


# -- torch's generator -----------------------------------------------------------------------------


def test_greedy_and_seeded_calls_leave_torchs_generator_alone(model: Any) -> None:
    before = torch.get_rng_state()
    generate(model, prompt(), speculate("racer,nodes=6"))
    generate(model, prompt(), speculate("racer,nodes=6", seed=1), **WARPED)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_call_without_seed_takes_one_number_of_torchs_generator(model: Any) -> None:
    torch.manual_seed(7)
    torch.randint(2**62, ())
    after_one = torch.get_rng_state()
    torch.manual_seed(7)
    first = generate(model, prompt(), speculate("ar"), **WARPED)
    assert torch.equal(torch.get_rng_state(), after_one)
    second = generate(model, prompt(), speculate("ar"), **WARPED)
    torch.manual_seed(7)
    again = generate(model, prompt(), speculate("racer,nodes=8"), **WARPED)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_a_refused_call_takes_nothing_of_torchs_generator(model: Any) -> None:
    before = torch.get_rng_state()
    with pytest.raises(OptionError, match="verify: 'greedy' contradicts"):
        generate(model, prompt(), speculate("ar", verify="greedy"), **WARPED)
    with pytest.raises(OptionError, match="seed: 2 given for 1 rows"):
        generate(model, prompt(), speculate("ar", seed=[1, 2]), **WARPED)
    assert torch.equal(torch.get_rng_state(), before)
