"""transformers' own DFlash generator drafts what hasten drafts, from the same tensors.

transformers (5.24) has the generator (``speculation_type="dflash"``) and one model of this
architecture, in which two tensors have other names; it can't read a DFlash folder by itself.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hasten.decode import decode
from hasten.decoding import Decoding
from hasten.dflash.bank import assemble
from hasten.dflash.lengths import BlockLength
from hasten.drafters.dflash import DFlash
from hasten.policies.length import LengthPolicy
from hasten.targets.fused_weights import make_linear
from hasten.targets.transformers import TransformersTarget
from hasten.types import SamplingParams
from hasten.verify import VERIFIERS
from tests.dflash.dflash_models import BLOCK, config, loaded, net
from tests.dflash.test_net import reference
from tests.targets import tiny_models as tiny

TOKENS = 24


def test_both_draft_the_same_tokens_after_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    generation: Any = pytest.importorskip(
        "transformers.generation.candidate_generator", reason="needs transformers with drafts"
    )
    if not hasattr(generation, "DFlashTokenCandidateGenerator"):
        pytest.skip("this version of transformers has no DFlash")
    model, prompt = tiny.build(tiny.llama, attention="sdpa"), tiny.random_ids(11)
    made = config(num_target_layers=3, target_layer_ids=(0, 1))
    with torch.random.fork_rng():
        assistant = reference(made, net(made).state_dict())
    theirs: dict[int, list[int]] = {}
    kind = generation.DFlashTokenCandidateGenerator
    propose = kind.get_candidates

    def spied(self: Any, input_ids: torch.Tensor, **more: Any) -> Any:
        ids, logits = propose(self, input_ids, **more)
        if logits is not None:
            theirs[input_ids.shape[1]] = ids[0, input_ids.shape[1] :].tolist()
        return ids, logits

    monkeypatch.setattr(kind, "get_candidates", spied)
    with torch.no_grad():
        answer = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            assistant_model=assistant,
            speculation_type="dflash",
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()

    target = TransformersTarget(model, name="tiny", eos_ids=frozenset())
    length = BlockLength(LengthPolicy(BLOCK, policy="fixed"))
    drafter = DFlash(assemble(target, loaded(made), make_linear), length)
    params = SamplingParams(max_new_tokens=TOKENS)
    asked = Decoding(
        target, prompt, params, drafter=drafter, policy=length, verifier=VERIFIERS["greedy"]
    )
    at, ours, got = len(prompt), {}, []
    for _, each in decode([asked]):
        if each.tree is not None:
            ours[at] = list(each.tree.tokens[1:])
        got += each.emitted
        at += len(each.emitted)
    assert got == answer
    assert len(ours) > 10
    both = ours.keys() & theirs.keys()
    assert len(both) > 10
    for at in both:
        assert ours[at] == theirs[at][: len(ours[at])], at
