"""S9, S11 and memory, on tiny models in the fused decoder and in transformers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hasten.smc.exit_proposal import ExitProposal
from hasten.smc.options import SMCOptions
from hasten.smc.proposals import ModelProposal, Proposal
from hasten.smc.run import SMCRun
from hasten.targets.base import Target
from hasten.targets.transformers import TransformersTarget
from hasten.types import SamplingParams
from tests.exits import exit_models as tiny
from tests.exits.exit_requests import prompt_of
from tests.smc.toy import distance
from tests.targets import tiny_models
from tests.targets.fused_models import fused, llama, random_model

PROMPT = prompt_of(3)
PARAMS = SamplingParams(max_new_tokens=30, temperature=0.7)


def run_on(
    target: Target,
    proposal: Proposal,
    *,
    params: SamplingParams = PARAMS,
    seed: int = 0,
    **changes: Any,
) -> SMCRun:
    options = SMCOptions(**{"particles": 5, "length": 3, "ending": 0.0, **changes})
    return SMCRun(target, PROMPT, params, options, proposal=proposal, seed=seed)


def next_logits(target: Target, sequence: Any, token: int) -> torch.Tensor:
    """The logits after `token`; the sequence stays as it is."""
    fork = target.open(sequence)
    logits = target.prefill(fork, [token]).logits
    target.close(fork)
    assert logits is not None
    return logits[-1]


def fresh_logits(target: Target, text: list[int]) -> torch.Tensor:
    sequence = target.open()
    logits = target.prefill(sequence, text).logits
    target.close(sequence)
    assert logits is not None
    return logits[-1]


def check_caches(target: Target, run: SMCRun, draft: ModelProposal | None = None) -> int:
    """Every running particle's cache is what its text alone would have built."""
    for particle in run._population.running:
        text = [*PROMPT, *particle.ids]
        assert particle.sequence.length == len(text) - 1
        cached = next_logits(target, particle.sequence, text[-1])
        torch.testing.assert_close(cached, fresh_logits(target, text), atol=1e-3, rtol=0)
        if draft is not None:
            model, held = draft._model, draft._sequences[particle.slot]
            late = draft._late[particle.slot]
            assert held.length + len(late) == len(text) - 1
            cached = next_logits(model, held, text[held.length])
            want = fresh_logits(model, text[: held.length + 1])
            torch.testing.assert_close(cached, want, atol=1e-3, rtol=0)
    return len(run._population.running)


def test_on_a_float32_model_an_answers_weight_is_its_ratio() -> None:
    target = fused(random_model())
    params = SamplingParams(max_new_tokens=13, temperature=0.7, ignore_eos=True)
    proposal = ModelProposal(target, vocab_size=target.info.vocab_size, name="self")
    changes = {"particles": 1, "length": 3, "threshold": 0.0, "draft": "self", "mix": 0.1}
    run = run_on(target, proposal, params=params, draft_temperature=1.1, **changes)
    for _ in run.rounds():
        pass
    assert run.info is not None
    answer = list(run.info.answers[0].tokens)
    assert len(answer) == 13
    sequence = target.open()
    logits = target.prefill(sequence, [*PROMPT, *answer], all_logits=True).logits
    assert logits is not None
    rows = logits[len(PROMPT) - 1 : -1].double()
    p, q = torch.log_softmax(rows / 0.7, 1), torch.softmax(rows / 1.1, 1)
    q = (0.9 * q + 0.1 / q.shape[1]).log()
    drafted = [at for at in range(13) if at % 4]  # the first, and each round's last, are p's own
    expected = sum(float(p[at, answer[at]] - q[at, answer[at]]) for at in drafted)
    assert abs(run.info.log_evidence - expected) < 1e-4 * len(drafted)


@pytest.mark.parametrize("resampler", ["multinomial", "systematic"])
def test_caches_are_those_of_their_texts_after_any_resampling(resampler: str) -> None:
    target, model = fused(random_model()), fused(random_model(llama(num_hidden_layers=2)))
    draft = ModelProposal(model, vocab_size=target.info.vocab_size)
    run = run_on(target, draft, resampler=resampler, threshold=1.01)
    seen = 0
    for _ in run.rounds():
        seen += check_caches(target, run, draft)
        target.check()
        model.check()
    assert run.info is not None
    assert run.info.copies > 3
    assert seen > 20
    assert target.bytes_in_use == model.bytes_in_use == 0


def test_caches_are_those_of_their_texts_after_a_collapse() -> None:
    target, model = fused(random_model()), fused(random_model(llama(num_hidden_layers=2)))
    draft = ModelProposal(model, vocab_size=target.info.vocab_size)
    params = SamplingParams(max_new_tokens=14, temperature=0.7, top_k=1)
    run = run_on(target, draft, params=params, particles=2)
    for _ in run.rounds():
        check_caches(target, run, draft)
    assert run.info is not None
    assert run.info.collapsed > 3


def test_caches_are_those_of_their_texts_where_rows_are_resumed() -> None:
    target, bank = tiny.target(), tiny.bank([("adapter", 2)])
    run = run_on(target, ExitProposal(target, bank), threshold=1.01)
    assert sum(check_caches(target, run) for _ in run.rounds()) > 20


@pytest.mark.parametrize("kind", [("adapter", 2), ("deep", 0)], ids=str)
def test_caches_are_those_of_their_texts_in_one_lineage(kind: tuple[str, int]) -> None:
    target, bank = tiny.target(), tiny.bank([kind])
    run = run_on(target, ExitProposal(target, bank), population="committed")
    seen = 0
    for _ in run.rounds():
        target.check()
        seen += check_caches(target, run)
    assert seen > 20
    assert run.info is not None
    assert run.info.target_rows < 0.9 * 5 * 30
    assert target.bytes_in_use == 0


def test_a_transformers_model_answers_too_one_particle_after_another() -> None:
    model = random_model()
    target = TransformersTarget(model, name="tiny", eos_ids=frozenset({2}))
    draft = ModelProposal(target, vocab_size=target.info.vocab_size, name="self")
    run = run_on(target, draft, threshold=1.01, draft_temperature=1.0)
    assert sum(check_caches(target, run, draft) for _ in run.rounds()) > 20
    assert not any(value.is_inference() for value in model.state_dict().values())


def test_eight_particles_hold_a_long_prompt_once() -> None:
    kind = llama(max_position_embeddings=2304, num_hidden_layers=tiny.LAYERS)
    target = fused(random_model(kind))
    bank = tiny.bank([("lens", 4)], over=target)
    prompt = tiny_models.random_ids(2000)
    held = {}
    for count in (1, 8):
        options = SMCOptions(particles=count, length=4, threshold=1.01)
        run = SMCRun(target, prompt, PARAMS, options, proposal=ExitProposal(target, bank))
        held[count] = max(target.bytes_in_use for _ in run.rounds())
        assert target.bytes_in_use == 0
    shape = target.shape
    slot = 2 * shape.layers * shape.kv_heads * shape.head_dim * 4
    assert held[1] > 2000 * slot
    assert held[8] - held[1] <= 8 * 64 * slot, "more than a block of answers each"


class _Second:
    """The law of the answer's second token."""

    def __init__(self, target: Target, params: SamplingParams) -> None:
        sequence = target.open()
        logits = target.prefill(sequence, PROMPT).logits
        assert logits is not None
        first = torch.softmax(logits[-1] / params.temperature, 0)
        law = torch.zeros_like(first)
        for token in range(len(first)):
            row = next_logits(target, sequence, token)
            law += first[token] * torch.softmax(row / params.temperature, 0)
        target.close(sequence)
        likely = law.topk(12).indices.tolist()
        self.law = {(t,): float(law[t]) for t in likely}
        self.law[-1,] = 1 - sum(self.law.values())

    def of(self, runs: list[SMCRun]) -> dict[tuple[int, ...], float]:
        out: dict[tuple[int, ...], float] = {}
        for run in runs:
            for _ in run.rounds():
                pass
            assert run.info is not None
            for answer in run.info.answers:
                key = (answer.tokens[1],)
                key = key if key in self.law else (-1,)
                out[key] = out.get(key, 0.0) + answer.weight / len(runs)
        return out


def test_the_second_tokens_law_comes_nearer_with_more_particles() -> None:
    target, bank = tiny.target(), tiny.bank([("lens", 2)])
    params = SamplingParams(max_new_tokens=3, temperature=0.7)
    exact = _Second(target, params)
    far = []
    for count in (1, 4, 16):
        runs = [
            run_on(target, ExitProposal(target, bank), params=params, particles=count, seed=seed)
            for seed in range(90)
        ]
        far.append(distance(exact.of(runs), exact.law))
    assert far[0] > far[1] > far[2]
    assert far[2] < 0.5 * far[0]
