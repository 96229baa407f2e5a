"""Held-out figures count what serving would do."""

from __future__ import annotations

import pytest
import torch

from hasten.exits.bank import local_ids
from hasten.train.dflash.evaluate import Walk, evaluate
from hasten.train.dflash.feed import Feed, FreshStates
from hasten.train.dflash.objectives import Drafter
from hasten.train.exits import Teacher
from tests.train.dflash.cases import BLOCK, target, texts
from tests.train.dflash.test_blocks import net


def test_a_walk_goes_from_anchor_to_anchor_and_never_beyond_the_text() -> None:
    walk = Walk()
    # At anchor 0 two drafts are right: three tokens. At 3 none: one. At 4 three, but only one
    # token is left.
    walk.over([2, 9, 9, 0, 3], [4, 4, 4, 4, 4])
    assert (walk.tokens, walk.rounds, walk.verified) == (5, 3, 12)
    assert walk.tau == pytest.approx(5 / 3)
    assert walk.rows == pytest.approx(12 / 5)


def test_rows_that_are_not_verified_emit_nothing() -> None:
    walk = Walk()
    walk.over([3, 3, 3, 3], [2, 4, 1, 4])  # two tokens, then one, then one
    assert (walk.tokens, walk.rounds, walk.verified) == (4, 3, 7)


def feed(count: int = 4) -> Feed:
    states = FreshStates(target(), texts())
    device = torch.device("cpu")
    return Feed(states, range(count), (2, 3, 5), last=0, device=device, size=2)


def test_figures_are_those_of_one_block_after_another() -> None:
    made, model = net(), target()
    ids = sorted({token for text in texts(4) for token in text.output})
    teacher = Teacher.of(model, ids, torch.float32)
    drafter = Drafter(made, teacher, model.torch_decoder.embeddings, model.ends().head)
    # A drafter that is right now and then: its head says what stands in the text more often.
    found = evaluate(drafter, feed())
    hits, there, anchors = [0] * BLOCK, [0] * BLOCK, 0
    for number in range(4):
        batch = feed().load([number])
        context = drafter.context(batch)
        start, length = int(batch.starts[0]), int(batch.lengths[0])
        for anchor in range(start, length - 1):
            anchors += 1
            at, keep = torch.tensor([[anchor]]), torch.tensor([[True]])
            with torch.no_grad():
                drafted = drafter.draft(drafter.blocks(batch, at, keep), context)
                extra = local_ids(texts(4)[number].prompt, teacher.place >= 0)
                says = drafter.says(drafted.hidden[0, 0], extra).tolist()
            for slot in range(1, BLOCK):
                if anchor + slot < length:
                    there[slot] += 1
                    hits[slot] += says[slot] == int(batch.ids[0, anchor + slot])
    whole = found["all"]
    assert whole.anchors == anchors
    assert whole.slots == pytest.approx([h / n for h, n in zip(hits[1:], there[1:], strict=True)])
    assert sum(hits) > 0
    assert found["math"].texts + found["chat"].texts == whole.texts == 4
    assert whole.covered == 1.0
