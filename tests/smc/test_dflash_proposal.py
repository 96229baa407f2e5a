"""A DFlash drafter under a population: weights, caches and support, on a tiny random drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hasten.dflash.bank import DFlashBank
from hasten.errors import OptionError
from hasten.methods import MethodContext
from hasten.smc.dflash_proposal import DFlashProposal
from hasten.smc.laws import DraftLaw
from hasten.smc.options import SMCOptions, check_mix, prepare
from hasten.smc.run import SMCRun
from hasten.targets.base import Target
from hasten.types import SamplingParams
from tests.dflash.dflash_models import BLOCK, bank, save_for
from tests.exits import exit_models as tiny
from tests.exits.exit_requests import prompt_of

PROMPT = prompt_of(3)
WARMTH = 0.9


def run_on(target: Target, made: DFlashBank, **changes: Any) -> SMCRun:
    options = SMCOptions(
        **{"draft": "dflash", "particles": 5, "length": 3, "draft_temperature": WARMTH, **changes}
    )
    params = SamplingParams(max_new_tokens=25, temperature=0.8, ignore_eos=True)
    return SMCRun(target, PROMPT, params, options, proposal=DFlashProposal(target, made), seed=4)


def rows_of(target: Target, text: list[int], taps: tuple[int, ...] = ()) -> Any:
    sequence = target.open()
    made = target.prefill(sequence, text, taps=taps, all_logits=True)
    target.close(sequence)
    return made


def draft_laws(target: Target, made: DFlashBank, text: list[int]) -> torch.Tensor:
    """q of the slots after `text`, whose last id is the anchor, without any cache."""
    hidden = rows_of(target, text[:-1], made.config.taps).hidden
    features = torch.cat([hidden[layer] for layer in made.config.taps], 1).unsqueeze(0)
    block = target.embed([text[-1], *[made.config.mask_token_id] * (BLOCK - 1)]).unsqueeze(0)
    positions = torch.arange(len(text) - 1 + BLOCK).unsqueeze(0)
    states = made.net(block, made.net.context(features), positions)[0, 1:]
    return torch.log_softmax(made.head.local(())(states).double() / WARMTH, 1)


def test_an_answers_weight_is_its_ratio_under_laws_computed_afresh() -> None:
    target, made = tiny.target(), bank()
    run = run_on(target, made, particles=1, threshold=0.0)
    for _ in run.rounds():
        pass
    assert run.info is not None
    answer = list(run.info.answers[0].tokens)
    assert len(answer) == 25
    logits = rows_of(target, [*PROMPT, *answer]).logits[len(PROMPT) - 1 : -1]
    p = torch.log_softmax(logits.double() / 0.8, 1)
    expected = 0.0
    for start in range(0, 24, 4):  # the first token and each round's last are the target's own
        q = draft_laws(target, made, [*PROMPT, *answer[: start + 1]])
        for slot in range(3):
            at = start + 1 + slot
            expected += float(p[at, answer[at]] - q[slot, answer[at]])
    assert abs(run.info.log_evidence - expected) < 1e-3


@pytest.mark.parametrize("population", ["persistent", "committed"])
def test_every_particle_drafts_from_its_own_text_after_any_resampling(population: str) -> None:
    target, made = tiny.target(), bank()
    seen: list[int] = []

    class Checked(DFlashProposal):
        def _spread(self, logits: torch.Tensor) -> torch.Tensor:
            seen.append(len(logits))
            return super()._spread(logits)

        def draft(self, lanes: Any, length: int, choose: Any) -> int:
            laws: list[torch.Tensor] = []

            def noting(found: torch.Tensor, of: Any) -> list[int]:
                laws.append(torch.log_softmax(found.double() / WARMTH, 1))
                drawn: list[int] = choose(found, of)
                return drawn

            made_ = super().draft(lanes, length, noting)
            for at, lane in enumerate(lanes):
                ids = run._population.particles[lane.slot].ids
                fresh = draft_laws(tiny.target(), made, [*PROMPT, *ids])
                for slot, law in enumerate(laws):
                    torch.testing.assert_close(law[at], fresh[slot], atol=1e-3, rtol=1e-3)
            return made_

    options = SMCOptions(draft="dflash", particles=5, length=3, draft_temperature=WARMTH,
                         threshold=1.01, population=population)  # fmt: skip
    params = SamplingParams(max_new_tokens=22, temperature=0.8, ignore_eos=True)
    run = SMCRun(target, PROMPT, params, options, proposal=Checked(target, made), seed=7)
    for _ in run.rounds():
        pass
    assert run.info is not None
    assert run.info.copies > 3
    assert len(seen) > 12


def test_with_a_reduced_vocabulary_every_id_can_still_be_drawn() -> None:
    target = tiny.target()
    made = bank(ids=range(0, tiny.VOCAB, 2))
    proposal = DFlashProposal(target, made)
    options = SMCOptions(draft="dflash", length=3)
    assert check_mix(options, proposal) == 0.05
    with pytest.raises(OptionError, match="mix"):
        check_mix(SMCOptions(draft="dflash", length=3, mix=0.0), proposal)
    run = run_on(target, made)
    law = run._drafting._law
    assert isinstance(law, DraftLaw)
    for _ in run.rounds():
        pass
    wide = proposal._spread(torch.zeros(1, len(made.head.ids)))
    assert bool((law([PROMPT], wide) > -20).all())


def test_options_find_the_drafter_and_keep_to_its_block(tmp_path: Path) -> None:
    target = tiny.target()
    folder = save_for(tmp_path, target.info, ids=range(0, tiny.VOCAB, 2))
    context = MethodContext(target, None, None)  # type: ignore[arg-type]
    proposal = prepare(SMCOptions(draft="dflash", model=str(folder)), context)()
    assert proposal.full_support, "the whole vocabulary, unless told otherwise"
    few = SMCOptions(draft="dflash", model=str(folder), vocabulary="reduced")
    assert not prepare(few, context)().full_support
    with pytest.raises(OptionError, match="slots of a block"):
        prepare(SMCOptions(draft="dflash", model=str(folder), length=BLOCK), context)
    with pytest.raises(OptionError, match="no DFlash drafter is shipped"):
        prepare(SMCOptions(draft="dflash"), context)
