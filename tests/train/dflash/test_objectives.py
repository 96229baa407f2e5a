"""What moves when a batch teaches: the drafter its loss, the length head its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hasten.dflash.net import DFlashNet
from hasten.train.dflash.objectives import Drafter, Objective
from hasten.train.dflash.options import Options
from hasten.train.exits import Teacher
from tests.train.dflash.cases import options, target, texts
from tests.train.dflash.test_blocks import batch, net

IDS = sorted({token for text in texts() for token in text.output})[:60]


def objective(made: DFlashNet, chosen: Options | None = None) -> Objective:
    teacher = Teacher.of(target(), IDS, torch.float32)
    drafter = Drafter(made, teacher, target().torch_decoder.embeddings, target().ends().head)
    return Objective(drafter, chosen or options())


def norms(made: DFlashNet) -> tuple[float, float]:
    """Gradient sizes of the drafter, and of its length head."""
    drafter = head = 0.0
    for name, value in made.named_parameters():
        size = 0.0 if value.grad is None else float(value.grad.norm())
        if name.startswith("thresh_head"):
            head += size
        else:
            drafter += size
    return drafter, head


def test_the_length_heads_gradient_does_not_reach_the_drafter() -> None:
    made = net()
    objective(made).length(batch(), 0).loss.backward()
    drafter, head = norms(made)
    assert drafter == 0
    assert head > 0


@pytest.mark.parametrize("kind", ["distil", "control"])
def test_in_a_round_the_drafters_gradient_is_the_same_with_a_length_head_and_without(
    kind: str,
) -> None:
    made = net()
    grads = []
    for width in (8, 0):
        made.zero_grad(set_to_none=True)
        made.config = replace(made.config, length_head=width)
        step = getattr(objective(made), kind)(batch(), 7)
        step.loss.backward()
        assert ("length_loss" in step.facts) == bool(width)
        grads.append({n: p.grad.clone() for n, p in made.named_parameters() if p.grad is not None})
    body = [name for name in grads[0] if not name.startswith("thresh_head")]
    assert set(grads[1]) == set(body)
    for name in body:
        assert torch.equal(grads[0][name], grads[1][name])


def test_sft_leaves_the_length_head_alone() -> None:
    made = net()
    objective(made).sft(batch(), 0).loss.backward()
    drafter, head = norms(made)
    assert drafter > 0
    assert head == 0


def test_the_teacher_of_a_slot_is_the_targets_row_before_it() -> None:
    made, given = objective(net()), batch()
    drafted = made._drafted(given, 3)
    taught = made._taught(given, drafted)
    ids = torch.tensor(IDS)
    model = target()
    row = 0
    for text, block, slot in drafted.rows.nonzero().tolist():
        at = int(drafted.blocks.anchors[text, block]) + slot
        if row % 9 == 0:
            prefix = given.ids[text, :at].tolist()
            sequence = model.open()
            passed = model.prefill(sequence, prefix)
            model.close(sequence)
            assert passed.logits is not None
            # States are kept in bfloat16.
            torch.testing.assert_close(taught[row], passed.logits[-1][ids], rtol=0.05, atol=0.05)
        row += 1
    assert row == len(taught) > 9


def test_tokens_outside_the_draft_vocabulary_are_left_out_and_count_as_misses() -> None:
    given = batch()
    few = Teacher.of(target(), IDS[::2], torch.float32)
    drafter = Drafter(net(), few, target().torch_decoder.embeddings, target().ends().head)
    drafted = Objective(drafter, options())._drafted(given, 1)
    outside = drafted.blocks.inside & (few.place[drafted.blocks.labels] < 0)
    assert outside.any()
    assert not (drafted.rows & outside).any()
    assert not drafted.right[outside].any()


def test_published_head_anchors_are_in_the_prompt_too() -> None:
    chosen = options()
    everywhere = objective(net(), replace(chosen, head=replace(chosen.head, everywhere=True)))
    given = batch()
    given = replace(given, starts=given.lengths - 6)
    assert objective(net())._drafted(given, 0).blocks.anchors.min() >= given.starts.min()
    drafted = everywhere._drafted(given, 0, True)
    assert drafted.blocks.anchors[drafted.blocks.keep].min() < given.starts.min()
    assert drafted.blocks.inside[..., 1:].all()


def test_the_same_salt_draws_the_same_blocks() -> None:
    made, given = objective(net()), batch()
    first, again, other = (made.sft(given, salt).loss for salt in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_an_id_of_the_prompt_is_said_where_it_beats_the_draft_vocabulary() -> None:
    teacher = Teacher.of(target(), IDS[:5], torch.float32)
    head = target().ends().head
    drafter = Drafter(net(), teacher, target().torch_decoder.embeddings, head)
    inside, outside = IDS[2], IDS[9]
    states = torch.stack([head[inside], head[outside]]) * 100.0
    assert drafter.says(states, torch.tensor([outside])).tolist() == [inside, outside]
    none = torch.tensor([], dtype=torch.int64)
    assert set(drafter.says(states, none).tolist()) <= set(IDS[:5])
