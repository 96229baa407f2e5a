"""`speculate` inside `generate`: the answers are those of plain `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tests.plugins.transformers_cases import KINDS, generate, knowing, learn, prompt
from tests.targets import tiny_models
from transformers.generation import stopping_criteria as hf_stop

from hasten.errors import OptionError
from hasten.plugins.transformers import speculate

__all__ = ["knowing"]

BUILTIN = ["ar", "prompt-lookup", "racer,nodes=8", "recycling,nodes=8", "suffix,nodes=8"]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_models.build(tiny_models.llama)


# -- greedy ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [tiny_models.llama, tiny_models.gpt2, tiny_models.mistral, tiny_models.gemma2, tiny_models.mpt],
)
def test_greedy_ids_are_those_of_plain_generate_for_every_drafter(kind: Any, knowing: Any) -> None:
    model = tiny_models.build(kind)
    ids = prompt()
    plain = learn(model, ids)
    for method in (*KINDS, *BUILTIN[1:3]):
        if method == "drawn":
            continue
        assert torch.equal(generate(model, ids, speculate(method)), plain), method


@pytest.mark.parametrize("method", BUILTIN)
def test_builtin_methods_answer_as_plain_generate(method: str, model: Any) -> None:
    for seed in range(3):
        ids = prompt(12, seed)
        assert torch.equal(generate(model, ids, speculate(method)), generate(model, ids))


def test_auto_is_the_default_and_answers_as_plain_generate(
    model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path))
    speculation = speculate()
    assert str(speculation.method) == "auto"
    assert torch.equal(generate(model, prompt(), speculation), generate(model, prompt()))


def test_an_oracle_makes_fewer_passes_and_the_figures_say_so(model: Any, knowing: Any) -> None:
    learn(model, prompt(), max_new_tokens=25)
    speculation = speculate("oracle")
    generate(model, prompt(), speculation, max_new_tokens=25)
    (row,) = speculation.statistics
    assert row.new_tokens == 25
    assert row.target_passes == 3  # 24 tokens after the first, nine a pass
    assert row.mean_accepted_length == 8.0


def _favour(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores + 9.0 * (torch.arange(199) % 3 == ids[:, -1:] % 3)


OPTIONS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"no_repeat_ngram_size": 1},
    {"bad_words_ids": [[100], [13, 5], [53, 5]]},
    {"sequence_bias": [[[5], 30.0], [[5, 5], -50.0], [[5, 7], 40.0]]},
    {"suppress_tokens": list(range(0, 199, 2))},
    {"begin_suppress_tokens": list(range(100))},
    {"forced_eos_token_id": 3},
    {"encoder_repetition_penalty": 3.5},
    {"encoder_no_repeat_ngram_size": 1, "sequence_bias": [[[101], 60.0], [[4], 50.0]]},
    {"exponential_decay_length_penalty": (3, 1.4), "eos_token_id": 3},
    {"prefix_allowed_tokens_fn": lambda _, ids: [(int(ids[-1]) * 7 + i) % 199 for i in range(9)]},
    {"watermarking_config": hf.WatermarkingConfig(bias=4.0)},
    {"logits_processor": hf.LogitsProcessorList([_favour])},
    {"max_length": 20, "max_new_tokens": None},
    {"remove_invalid_values": True, "renormalize_logits": True, "top_k": 0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: next(iter(o)))
@pytest.mark.filterwarnings("ignore:A custom logits processor")
def test_options_act_as_in_plain_generate(options: Any, model: Any, knowing: Any) -> None:
    plain = generate(model, prompt(), **options)
    knowing.extend(plain.tolist())
    without = generate(model, prompt())
    assert torch.equal(plain, without) == ("remove_invalid_values" in options)
    for method in ("oracle", "flaky", "wide", "adversarial", "ar"):
        got = generate(model, prompt(), speculate(method), **options)
        assert torch.equal(got, plain), method


@pytest.mark.parametrize(
    "options", [{"use_cache": False}, {"cache_implementation": "static"}, {"prefill_chunk_size": 4}]
)
def test_options_about_memory_change_nothing(options: Any, model: Any, knowing: Any) -> None:
    plain = learn(model, prompt())
    assert torch.equal(generate(model, prompt(), speculate("oracle"), **options), plain)


def test_a_processor_is_asked_about_no_token_that_was_not_drafted(model: Any, knowing: Any) -> None:
    """In particular about nothing behind an end-of-sequence id."""
    end = int(generate(model, prompt())[0, 15])

    def check(_: int, ids: torch.Tensor) -> list[int]:
        assert end not in ids[9:].tolist()
        return list(range(199))

    options = {"eos_token_id": end, "prefix_allowed_tokens_fn": check}
    plain = learn(model, prompt(), eos_token_id=end)
    assert torch.equal(generate(model, prompt(), speculate("oracle"), **options), plain)


# -- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(10, 20))
def test_an_end_inside_a_block_cuts_where_plain_generate_does(
    at: int, model: Any, knowing: Any
) -> None:
    ids = prompt()
    end = int(generate(model, ids)[0, at])
    for eos in (end, [150, end]):
        plain = learn(model, ids, eos_token_id=eos)
        assert plain.shape[1] <= at + 1
        for method in ("oracle", "wide", "flaky"):
            got = generate(model, ids, speculate(method), eos_token_id=eos)
            assert torch.equal(got, plain), method


@pytest.mark.parametrize("count", range(1, 12))
def test_exactly_as_many_tokens_come_as_asked_for(count: int, model: Any, knowing: Any) -> None:
    learn(model, prompt())
    got = generate(model, prompt(), speculate("oracle"), max_new_tokens=count)
    assert got.shape == (1, 9 + count)


def test_min_new_tokens_and_min_length_ban_the_end(model: Any, knowing: Any) -> None:
    end = int(generate(model, prompt())[0, 12])
    for least in ({"min_new_tokens": 9}, {"min_length": 18}):
        plain = learn(model, prompt(), **least, eos_token_id=end)
        assert plain.shape[1] >= 18
        got = generate(model, prompt(), speculate("oracle"), **least, eos_token_id=end)
        assert torch.equal(got, plain)


class Counting(hf.StoppingCriteria):
    """Stops at its fifth call, and remembers what it saw."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[int], Any]] = []

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.seen.append((input_ids[0].tolist(), None if scores is None else len(scores)))
        return torch.tensor([len(self.seen) == 5])


@pytest.mark.parametrize("output_scores", [False, True])
def test_a_criterion_is_asked_after_each_token_as_by_plain_generate(
    output_scores: bool, model: Any, knowing: Any
) -> None:
    learn(model, prompt())
    seen = []
    for speculation in (None, speculate("oracle"), speculate("flaky")):
        criterion = Counting()
        output = generate(
            model,
            prompt(),
            speculation,
            stopping_criteria=hf.StoppingCriteriaList([criterion]),
            return_dict_in_generate=True,
            output_scores=output_scores,
        )
        assert output.sequences.shape[1] == 14
        seen.append(criterion.seen)
    assert seen[0] == seen[1] == seen[2]


def test_a_criterion_may_give_a_plain_bool(model: Any, knowing: Any) -> None:
    learn(model, prompt())

    def long_enough(ids: torch.Tensor, _: Any) -> bool:
        return ids.shape[1] >= 13

    options = {"stopping_criteria": hf.StoppingCriteriaList([long_enough])}
    got = generate(model, prompt(), speculate("oracle"), **options)
    assert torch.equal(got, generate(model, prompt(), **options))


def test_a_time_limit_is_looked_at_after_each_token(model: Any, knowing: Any) -> None:
    learn(model, prompt())
    got = generate(model, prompt(), speculate("oracle"), max_time=1e-9)
    assert torch.equal(got, generate(model, prompt(), max_time=1e-9))
    assert got.shape[1] == 10


def test_the_shortest_length_criterion_counts(model: Any, knowing: Any) -> None:
    learn(model, prompt())
    for length in (5, 13):  # shorter than the prompt: one token comes
        options = {"stopping_criteria": [hf_stop.MaxLengthCriteria(length)]}
        got = generate(model, prompt(), speculate("oracle"), **options)
        assert torch.equal(got, generate(model, prompt(), **options))


def test_an_answer_ends_with_the_context_and_that_is_said(
    model: Any, knowing: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ids = prompt(tiny_models.CONTEXT - 5)
    got = generate(model, ids, speculate("prompt-lookup"), max_new_tokens=20)
    assert got.shape[1] == tiny_models.CONTEXT
    assert torch.equal(got, generate(model, ids, max_new_tokens=5))
    assert "row 0 ends after 5 new tokens" in caplog.text
    assert "context" in caplog.text


# -- what comes back -------------------------------------------------------------------------------


def test_the_dict_holds_scores_logits_and_figures_of_the_emitted_tokens(
    model: Any, knowing: Any
) -> None:
    options: dict[str, Any] = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "repetition_penalty": 1.3,
        "bad_words_ids": [[5]],
    }
    learn(model, prompt(), repetition_penalty=1.3)
    end = int(generate(model, prompt(), repetition_penalty=1.3)[0, -3])
    plain = generate(model, prompt(), eos_token_id=end, **options)
    for method in ("oracle", "flaky", "wide"):
        speculation = speculate(method)
        got = generate(model, prompt(), speculation, eos_token_id=end, **options)
        assert type(got) is type(plain)
        assert torch.equal(got.sequences, plain.sequences)
        for mine, theirs in ((got.scores, plain.scores), (got.logits, plain.logits)):
            assert len(mine) == len(theirs)
            torch.testing.assert_close(torch.stack(mine), torch.stack(theirs), atol=1e-4, rtol=0)
            assert mine[0].dtype == theirs[0].dtype
        assert got.hasten == speculation.statistics
        assert got.hasten[0].new_tokens == got.sequences.shape[1] - 9
        assert (got.attentions, got.hidden_states) == (None, None)
        assert got.get("cache", got.get("past_key_values")) is None


def test_scores_and_logits_come_only_when_asked_for(model: Any) -> None:
    got = generate(model, prompt(), speculate("ar"), return_dict_in_generate=True)
    assert (got.scores, got.logits) == (None, None)
    both = {"output_scores": True, "output_logits": True}
    got = generate(model, prompt(), speculate("ar"), **both)
    assert isinstance(got, torch.Tensor)


def test_transition_scores_can_be_computed(model: Any) -> None:
    options = {"return_dict_in_generate": True, "output_scores": True}
    got, plain = (generate(model, prompt(), s, **options) for s in (speculate("ar"), None))
    mine, theirs = (
        model.compute_transition_scores(o.sequences, o.scores, normalize_logits=True)
        for o in (got, plain)
    )
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)


# -- batches ---------------------------------------------------------------------------------------


def _batch(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded prompts of these lengths, and their mask."""
    longest = max(lengths)
    rows = [[0] * (longest - n) + tiny_models.random_ids(n, n) for n in lengths]
    mask = [[0] * (longest - n) + [1] * n for n in lengths]
    return torch.tensor(rows), torch.tensor(mask)


BATCH_OPTIONS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.7},
    {"encoder_repetition_penalty": 1.7},
    {"encoder_no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"min_new_tokens": 6, "eos_token_id": list(range(0, 199, 4))},
    {"prefix_allowed_tokens_fn": lambda row, _: list(range(40 * row, 40 * row + 50))},
    {
        "logits_processor": hf.LogitsProcessorList(
            [lambda ids, scores: scores + torch.eye(3, 199) * 90]
        )
    },
]


@pytest.mark.parametrize("options", BATCH_OPTIONS, ids=lambda o: next(iter(o), "plain"))
def test_a_batch_is_answered_as_by_plain_generate(options: Any, model: Any, knowing: Any) -> None:
    ids, mask = _batch(9, 4, 6)
    options = {"attention_mask": mask, "eos_token_id": 3, "max_new_tokens": 12, **options}
    plain = learn(model, ids, **options)
    for row in list(knowing):  # the drafters see prompts without padding
        knowing.append(row[next(i for i, t in enumerate(row) if t) :])
    for method in ("oracle", "flaky", "ar"):
        speculation = speculate(method)
        assert torch.equal(generate(model, ids, speculation, **options), plain), method
        assert len(speculation.statistics) == 3


def test_a_row_is_answered_as_its_prompt_alone_and_then_padded(model: Any) -> None:
    ids, mask = _batch(9, 4, 6)
    eos = list(range(0, 199, 5))
    got = generate(
        model, ids, speculate("ar"), attention_mask=mask, eos_token_id=eos, pad_token_id=2
    )
    lengths = set()
    for row, real in zip(got, mask, strict=True):
        start = 9 - int(real.sum())
        alone = generate(model, row[None, start:9], speculate("ar"), eos_token_id=eos)[0]
        lengths.add(len(alone))
        assert row[start : start + len(alone)].tolist() == alone.tolist()
        assert (row[start + len(alone) :] == 2).all()
    assert len(lengths) > 1


def test_rows_that_end_early_have_scores_that_are_certain_of_padding(
    model: Any, knowing: Any
) -> None:
    ids, mask = _batch(9, 4, 6)
    for row, real in zip(ids, mask, strict=True):
        learn(model, row[None, real.bool()])
    got = generate(
        model,
        ids,
        speculate("oracle"),
        attention_mask=mask,
        eos_token_id=list(range(0, 199, 5)),
        pad_token_id=2,
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert len(got.scores) == got.sequences.shape[1] - 9
    last = got.scores[-1].softmax(-1)
    ended = got.sequences[:, -2] == 2
    assert ended.any()
    assert (last[ended][:, 2] == 1).all()
    sums = model.compute_transition_scores(got.sequences, got.scores, normalize_logits=True).sum(1)
    assert sums.isfinite().all()


class Odd(hf.StoppingCriteria):
    """Stops a row by its own last token."""

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        return input_ids[:, -1] % 7 == 3 + torch.arange(len(input_ids))


def test_a_criterion_may_tell_rows_apart(model: Any, knowing: Any) -> None:
    ids, mask = _batch(9, 4, 6)
    options = {"attention_mask": mask, "eos_token_id": 3, "stopping_criteria": [Odd()]}
    plain = generate(model, ids, **options)
    assert (plain[:, -1] == 0).any()
    assert torch.equal(generate(model, ids, speculate("racer,nodes=6"), **options), plain)


def test_a_criterion_for_the_whole_batch_is_refused_by_name(model: Any) -> None:
    def anyone(ids: torch.Tensor, _: Any) -> bool:
        return bool((ids[:, -1] == 5).any())

    ids, mask = _batch(9, 4)
    with pytest.raises(OptionError, match="stopping_criteria: anyone answers for a batch"):
        generate(
            model,
            ids,
            speculate("ar"),
            attention_mask=mask,
            eos_token_id=3,
            stopping_criteria=[anyone],
        )
