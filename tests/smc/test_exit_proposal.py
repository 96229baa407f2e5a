"""The exit proposal against modules fed one text at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hasten.drafters.exit_session import ExitSession
from hasten.exits.bank import ExitBank
from hasten.smc import exit_proposal
from hasten.smc.exit_proposal import ExitProposal, whole_vocabulary
from hasten.smc.options import SMCOptions
from hasten.smc.proposals import Choose, Lane
from hasten.smc.run import SMCRun
from hasten.targets.fused import FusedTarget
from hasten.types import RowSignals, SamplingParams
from tests.exits import exit_models as tiny
from tests.exits.exit_requests import EVEN, prompt_of

KINDS = (("deep", 0), ("deep", 2), ("adapter", 2), ("affine", 4), ("lens", 4))
PROMPT = prompt_of(0)
PARAMS = SamplingParams(max_new_tokens=24, temperature=0.8)


class Recorded(ExitProposal):
    """Remembers each question: the text verified then, the tokens drafted after its root."""

    def __init__(self, target: FusedTarget, bank: ExitBank) -> None:
        super().__init__(target, bank)
        self.asked: list[tuple[list[int], list[int], torch.Tensor]] = []
        self.most_rows = 0
        self.run: Any = None

    def draft(self, lanes: Sequence[Lane], length: int, choose: Choose) -> int:
        texts = {p.slot: [*PROMPT, *p.ids] for p in self.run._population.particles}
        drafts: list[list[int]] = [[] for _ in lanes]

        def heard(logits: torch.Tensor, of: Sequence[int]) -> list[int]:
            assert set(of) == set(range(len(logits))), "a row that nobody asked for"
            for lane, draft, row in zip(lanes, drafts, of, strict=True):
                assert texts[lane.slot][-1] == lane.root
                self.asked.append((texts[lane.slot], list(draft), logits[row].clone()))
            tokens = choose(logits, of)
            for draft, token in zip(drafts, tokens, strict=True):
                draft.append(token)
            self.most_rows = max(self.most_rows, self._state.scratch)
            return tokens

        return super().draft(lanes, length, heard)


def alone(
    target: FusedTarget, bank: ExitBank, text: Sequence[int], draft: Sequence[int]
) -> torch.Tensor:
    """Logits after `draft`, drafted below the root ``text[-1]``, from nothing."""
    verified, layer = list(text[:-1]), bank.layers[0]
    sequence = target.open()
    taps = bank.taps
    passed = target.prefill(sequence, verified, taps=taps)
    session = ExitSession(bank)
    session.begin(verified, RowSignals(hidden=passed.hidden))
    run = session.runs[0]
    states = [None] * (len(draft) + 1) if not layer else []
    if layer:
        rows = target.prefill(sequence, [text[-1], *draft], taps=(layer,)).hidden[layer]
        states = [rows[at : at + 1] for at in range(len(rows))]
    target.close(sequence)
    out = run.first(text[-1], states[0])
    for depth, token in enumerate(draft, 1):
        out = run.more([token], states[depth], out, [depth])
    head = bank.head.local(PROMPT)  # the session's would know the answer's ids too
    return head.spread(head(bank.normed(bank.modules[0], out))[0])


def run_with(
    bank: ExitBank, *, seed: int = 0, over: FusedTarget | None = None, **changes: Any
) -> Recorded:
    over = over or tiny.target()
    proposal = Recorded(over, bank)
    options = SMCOptions(**{"particles": 5, "length": 3, "threshold": 0.9, **changes})
    run = SMCRun(over, PROMPT, PARAMS, options, proposal=proposal, seed=seed)
    proposal.run = run
    before = over.layer_rows
    for _ in run.rounds():
        over.check()
    info = run.info
    assert info is not None
    assert info.copies > 0
    ran = len(PROMPT) + info.target_rows
    assert over.layer_rows - before == over.info.num_layers * ran, "a row ran a layer twice"
    assert over.bytes_in_use == 0
    return proposal


@torch.inference_mode()
def compare(proposal: Recorded, bank: ExitBank, every: int = 1) -> None:
    target = tiny.target()
    known = torch.isfinite(proposal.asked[0][2])
    for text, draft, got in proposal.asked[::every]:
        want = alone(target, bank, text, draft)
        assert torch.equal(torch.isfinite(want), known)
        torch.testing.assert_close(got[known], want[known], atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}")
def test_every_particle_drafts_as_its_text_alone_would(kind: tuple[str, int]) -> None:
    bank = tiny.bank([kind])
    compare(run_with(bank), bank, every=3)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}")
def test_particles_of_one_lineage_share_rows_and_draft_alike(kind: tuple[str, int]) -> None:
    bank = tiny.bank([kind])
    apart, shared = run_with(bank), run_with(bank, population="committed")
    assert shared.most_rows <= apart.most_rows
    compare(shared, bank, every=3)


def test_a_reduced_vocabulary_and_a_pruned_memory_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bank = tiny.bank([("deep", 2)], ids=EVEN)
    loose = run_with(bank, threshold=1.01)
    monkeypatch.setattr(exit_proposal, "_COLUMNS", 8)
    tidy = run_with(bank, threshold=1.01)
    assert tidy.most_rows < loose.most_rows
    assert [text for text, _, _ in tidy.asked] == [text for text, _, _ in loose.asked]
    compare(tidy, bank, every=3)


def test_a_reduced_vocabulary_can_be_made_whole() -> None:
    bank = tiny.bank([("deep", 0)], ids=EVEN)
    target = tiny.target()
    assert not ExitProposal(target, bank).full_support
    whole = whole_vocabulary(target, bank)
    assert ExitProposal(target, whole).full_support
    assert whole.modules == bank.modules
    compare(run_with(whole), whole, every=7)


def test_a_prompt_of_which_a_part_is_cached_drafts_from_the_rest() -> None:
    target = tiny.target()
    bank = tiny.bank([("deep", 2)])
    lent = target.open()
    target.prefill(lent, PROMPT[:5])
    options = SMCOptions(particles=3, length=2)
    run = SMCRun(target, PROMPT, PARAMS, options, proposal=ExitProposal(target, bank), seed=1)
    run.lend(lent)
    count = sum(len(made.emitted) for made in run.rounds())
    assert count == PARAMS.max_new_tokens
    assert lent.length == len(PROMPT)
    target.close(lent)
    assert target.bytes_in_use == 0
