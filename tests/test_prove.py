"""The losslessness check: what it finds identical, what it excuses, and what it calls a fault."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hasten
from hasten import verify as verifiers
from hasten.divergence import Divergence, ulp_at
from hasten.prove import RULES, Check, DrawDivergence, Proof, _nudged, explain_draw, prove
from hasten.sampling import Sampler
from hasten.types import Pass, SamplingParams
from hasten.verify import Verdict
from tests.cli.tiny import CONTEXT, save_tiny

VOCAB = 1500
SEED = 5
PROMPT = [3, 4]
PARAMS = SamplingParams(temperature=0.8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> hasten.LLM:
    return hasten.load(folder, device="cpu")


PROMPTS = ["abcabc abcabc abc", "xyzxyz"]


def believe_drafts(tree: Any, q: Any, judge: Any) -> Verdict:
    """A broken verifier: the first drafted token is taken unchecked."""
    if len(tree) == 1:
        return verifiers.walk(tree, q, judge)
    drafted = tree.tokens[1]
    return Verdict((0, 1), (drafted, judge.choose(1, (drafted,))))


# -- prove -----------------------------------------------------------------------------------------


def test_a_lossless_method_is_proven_under_both_rules(llm: hasten.LLM) -> None:
    seen: list[Check] = []
    proof = prove(llm, PROMPTS, "prompt-lookup", max_new_tokens=24, on_check=seen.append)
    assert proof.ok
    assert [proof.count(rule) for rule in RULES] == [(2, 2), (2, 2)]
    assert [(c.prompt, c.rule) for c in seen] == [(p, rule) for p in (0, 1) for rule in RULES]


def test_prompts_draw_with_seeds_of_their_own(
    llm: hasten.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int | None] = []
    generate = hasten.LLM.generate

    def noted(self: hasten.LLM, prompt: Any, **options: Any) -> Any:
        if not options["params"].is_greedy:
            seeds.append(options["params"].seed)
        return generate(self, prompt, **options)

    monkeypatch.setattr(hasten.LLM, "generate", noted)
    prove(llm, PROMPTS, "ar", max_new_tokens=2, seed=40)
    assert seeds == [40, 40, 41, 41]


@pytest.mark.parametrize(("verifier", "rule"), [("greedy", "greedy"), ("match", "sampled")])
def test_a_biased_verifier_is_found_out(
    llm: hasten.LLM, monkeypatch: pytest.MonkeyPatch, verifier: str, rule: str
) -> None:
    monkeypatch.setitem(verifiers.VERIFIERS, verifier, believe_drafts)
    proof = prove(llm, PROMPTS, "prompt-lookup", max_new_tokens=24)
    assert not proof.ok
    assert {check.rule for check in proof.faults} == {rule}
    assert "please report it" in proof.faults[0].difference.describe()  # type: ignore[union-attr]


def test_a_prompt_without_room_is_skipped_and_named(llm: hasten.LLM) -> None:
    proof = prove(llm, ["abc", "a" * CONTEXT, ""], "ar", max_new_tokens=2)
    assert [index for index, _ in proof.skipped] == [1, 2]
    assert proof.ok
    assert not prove(llm, [""], "ar").ok


def test_the_reference_is_made_once_and_only_for_a_difference(
    folder: Path, llm: hasten.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    low = hasten.load(folder, device="cpu", dtype="bfloat16")
    made: list[int] = []

    def reference() -> Any:
        made.append(1)
        return llm.target

    assert prove(low, PROMPTS, "ar", max_new_tokens=12, reference=reference).ok
    assert made == []
    monkeypatch.setitem(verifiers.VERIFIERS, "greedy", believe_drafts)
    proof = prove(low, PROMPTS, "prompt-lookup", max_new_tokens=24, reference=reference)
    assert made == [1]
    assert proof.faults


def test_float32_excuses_nothing() -> None:
    tie = Divergence(
        0, 1, 2, top_logit=8.0, gap=0.0, gap_float32=0.0, ulp=ulp_at(8.0, torch.float32)
    )
    assert tie.near_tie
    check = Check(0, "greedy", 4, tie)
    assert Proof("x", exact=True, checks=[check]).faults == [check]
    assert Proof("x", exact=False, checks=[check]).ok


# -- explain_draw ----------------------------------------------------------------------------------


@dataclass
class FixedTarget:
    """A target whose logits are the same after anything."""

    logits: torch.Tensor
    dtype: torch.dtype = torch.bfloat16

    @property
    def info(self) -> Any:
        return SimpleNamespace(vocab_size=VOCAB, eos_ids=frozenset(), dtype=self.dtype)

    def open(self) -> Any:
        return None

    def close(self, sequence: Any) -> None:
        pass

    def prefill(self, sequence: Any, tokens: Any) -> Pass:
        return Pass(self.logits[None])

    def forward(self, batch: Any) -> list[Pass]:
        return [Pass(self.logits[None])]


def draw(logits: torch.Tensor, seed: int = SEED) -> int:
    return Sampler(PARAMS, VOCAB, frozenset(), len(PROMPT), seed).choose(PROMPT, logits)


def flat_logits(seed: int = 0) -> torch.Tensor:
    """Many tokens about as likely, the top one near 8, exactly as bfloat16 holds them."""
    noise = torch.rand(VOCAB, generator=torch.Generator().manual_seed(seed))
    return (7 + noise).bfloat16().float()


def explain(own: torch.Tensor, plain: int, other: int, wide: torch.Tensor | None) -> DrawDivergence:
    reference: Any = None if wide is None else FixedTarget(wide, torch.float32)
    target: Any = FixedTarget(own)
    found = explain_draw(target, PROMPT, [plain], [other], PARAMS, SEED, reference=reference)
    assert found is not None
    return found


def rounding_swaps(ulps: float, count: int) -> list[tuple[torch.Tensor, int, int]]:
    """Rows, and the two tokens drawn before and after an error of at most `ulps` in every logit."""
    out = []
    for at in range(4000):
        row = flat_logits(at)
        random = torch.Generator().manual_seed(at)
        error = (
            (2 * torch.rand(VOCAB, generator=random) - 1)
            * ulps
            * ulp_at(float(row.max()), torch.bfloat16)
        )
        before, after = draw(row), draw(row + error)
        if before != after:
            out.append((row, before, after))
            if len(out) == count:
                break
    return out


def test_identical_answers_need_no_explanation() -> None:
    target: Any = FixedTarget(flat_logits())
    assert explain_draw(target, PROMPT, [7, 8], [7, 8], PARAMS, SEED) is None


def test_a_draw_turned_by_rounding_is_excused() -> None:
    swaps = rounding_swaps(1.0, 5)
    assert len(swaps) == 5
    for row, before, after in swaps:
        found = explain(row, before, after, row)
        assert found.near_tie, found.describe()
        assert 0 < found.shift <= 2
        assert "rounding" in found.describe()


def test_another_token_is_no_rounding() -> None:
    row = flat_logits()
    plain = draw(row)
    excused = [
        t for t in range(0, VOCAB, 50) if t != plain and explain(row, plain, t, row).near_tie
    ]
    assert excused == []


def test_both_measures_must_agree() -> None:
    ((row, before, after),) = rounding_swaps(1.0, 1)
    far = row.clone()
    far[after] -= 3  # float32 says that this token was out of reach
    assert not explain(row, before, after, far).near_tie
    assert not explain(far, before, after, row).near_tie
    assert not explain(row, before, after, None).near_tie


def test_an_answer_that_ended_early_is_a_fault() -> None:
    row = flat_logits()
    target: Any = FixedTarget(row)
    found = explain_draw(target, PROMPT, [draw(row)], [], PARAMS, SEED, reference=target)
    assert found is not None
    assert (found.other, found.near_tie) == (-1, False)


def test_probabilities_are_told_for_both_tokens_and_measures() -> None:
    row, wide = flat_logits(0), flat_logits(1)
    found = explain(row, 10, 20, wide)
    for logits, probs in ((row, found.probs), (wide, found.probs_float32)):
        right = torch.softmax(logits / PARAMS.temperature, 0)
        assert probs == pytest.approx((float(right[10]), float(right[20])), rel=1e-4)


@pytest.mark.parametrize("token", [0, 255, 256, VOCAB - 1])
def test_no_logit_is_moved_by_more_than_the_error(token: int) -> None:
    row = flat_logits()
    for moved in _nudged(row, token, 0.25):
        assert float((moved - row).abs().max()) <= 0.25 + 1e-6
        assert float(moved[token] - row[token]) == pytest.approx(0.25)
