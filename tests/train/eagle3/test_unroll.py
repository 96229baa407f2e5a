"""Training-time test says at every row and step what serving says there, and learns from that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hasten.eagle3.net import Eagle3Net
from hasten.train.dflash.feed import Batch
from hasten.train.eagle3.unroll import unrolled
from tests.eagle3.eagle3_models import KINDS, config, reference, said
from tests.eagle3.eagle3_models import net as random_net
from tests.train.dflash.cases import target
from tests.train.eagle3.cases import IDS, batch, objective, options, pupil

KINDS_TRAINED = [kind for kind in KINDS if kind not in ("sliding", "five taps")]
EMBEDDINGS = target().torch_decoder.embeddings


def slow(made: Eagle3Net, given: Batch, row: int, pair: int, step: int) -> torch.Tensor:
    """Logits after `pair` of a text and `step` drafted tokens: the sequence really fed, token by
    token, by the plain reference."""
    tokens = given.ids[row, 1 : pair + 2 + step]
    embeds = F.embedding(tokens, EMBEDDINGS)
    return said(made, reference(made, embeds, given.features[row, : pair + 1], drafted=step)[-1])


@pytest.mark.parametrize("kind", KINDS_TRAINED)
def test_every_row_of_every_step_is_what_serving_gives(kind: str) -> None:
    made, given = random_net(config(**KINDS[kind])), batch()
    with torch.no_grad():
        outs = list(unrolled(made, EMBEDDINGS, given.ids, given.features, 4))
        for step, out in enumerate(outs):
            for row, pair in ((0, 0), (1, 3), (2, 9)):
                want = slow(made, given, row, pair, step)
                torch.testing.assert_close(made.logits(out[row, pair]), want, atol=1e-3, rtol=1e-3)


def test_what_stands_behind_a_text_changes_none_of_its_rows() -> None:
    made, given = pupil(), batch()
    short = int(given.lengths.min())
    row = int(given.lengths.argmin())
    assert short < given.ids.shape[1]
    features = given.features.clone()
    features[row, short:] += 1.0
    with torch.no_grad():
        one = list(unrolled(made, EMBEDDINGS, given.ids, given.features, 3))
        two = list(unrolled(made, EMBEDDINGS, given.ids, features, 3))
    for step, (a, b) in enumerate(zip(one, two, strict=True)):
        used = slice(0, short - 2 - step)
        assert torch.equal(a[row, used], b[row, used])


def slow_loss(made: Eagle3Net, given: Batch, unroll: int, decay: float) -> tuple[float, int]:
    """The loss by its definition, sequence by sequence, and how many rows the first step has."""
    final, place = given.final, {token: at for at, token in enumerate(IDS)}
    assert final is not None
    ends = target().ends()
    loss, rows = 0.0, 0
    for step in range(unroll):
        each = []
        for text in range(len(given.ids)):
            start, length = int(given.starts[text]), int(given.lengths[text])
            # Drafted behind pair t with the pending token t + 1, which is one of the answer.
            for pair in range(start - 1, length):
                label = pair + 2 + step
                if label >= length or int(given.ids[text, label]) not in place:
                    continue
                state = final[text, label - 1]
                normed = F.rms_norm(state, state.shape, ends.norm.float(), ends.eps)
                taught = torch.softmax(ends.head[IDS].float() @ normed, 0)
                logits = slow(made, given, text, pair, step)
                each.append(-(taught * torch.log_softmax(logits, 0)).sum())
        loss += decay**step * float(torch.stack(each).mean())
        rows = rows or len(each)
    return loss, rows


def test_the_loss_is_that_of_sequences_really_fed() -> None:
    made, given = pupil(), batch(2)
    given = replace(given, starts=given.lengths - torch.tensor([16, 12]))
    chosen = options()
    chosen = replace(chosen, sft=replace(chosen.sft, unroll=3, decay=0.7))
    with torch.no_grad():
        want, rows = slow_loss(made, given, 3, 0.7)
        step = objective(made, chosen)(given, 0)
    assert step.slots == rows > 5
    assert float(step.loss) == pytest.approx(want, rel=1e-4)
    assert {"right_1", "right_2", "right_3"} == set(step.facts)


def test_later_steps_teach_earlier_outputs() -> None:
    """Gradients flow through a step's own outputs: a loss on step 3 alone moves what step 1 says,
    and reaches every tensor."""
    made, given = pupil(), batch(2)
    outs = list(unrolled(made, EMBEDDINGS, given.ids, given.features, 3))
    outs[0].retain_grad()
    made.logits(outs[2][0, 2]).square().sum().backward()
    grad = outs[0].grad
    assert grad is not None
    assert grad[0, 2].abs().sum() > 0
    assert grad[0, 3:].abs().sum() == 0
    assert grad[0, :2].abs().sum() == 0
    for name, value in made.named_parameters():
        assert value.grad is not None, name
        assert value.grad.abs().sum() > 0, name


def test_a_token_outside_the_draft_vocabulary_is_left_out() -> None:
    given, made = batch(), pupil()
    whole = objective(made)
    text, at, places = whole.learned(given)
    labels = given.ids[text, at + 1]
    assert torch.equal(torch.tensor(IDS)[places], labels)
    inside = {
        (row, position)
        for row in range(len(given.ids))
        for position in range(int(given.starts[row]), int(given.lengths[row]) - 1)
        if int(given.ids[row, position + 1]) in IDS
    }
    assert set(zip(text.tolist(), at.tolist(), strict=True)) == inside
    assert len(inside) < int((given.lengths - given.starts - 1).sum())


def test_a_batch_without_a_row_to_learn_is_no_error() -> None:
    given, made = batch(), pupil()
    given = replace(given, starts=given.lengths - 1)
    step = objective(made)(given, 0)
    assert step.slots == 0
    step.loss.backward()  # type: ignore[no-untyped-call]
    grads: Any = [value.grad for value in made.parameters() if value.grad is not None]
    assert all(float(grad.abs().sum()) == 0 for grad in grads)
