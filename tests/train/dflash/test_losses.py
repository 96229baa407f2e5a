"""The losses are those written down, term by term."""

from __future__ import annotations

import math

import pytest
import torch

from hasten.train.dflash import losses

ROWS, VOCAB = 5, 11


def drawn(seed: int) -> torch.Tensor:
    return 2 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed))


WEIGHTS = torch.tensor([1.0, 0.7, 0.0, 0.3, 2.0])


def by_hand(
    student: torch.Tensor,
    teacher: torch.Tensor,
    *,
    alpha: float,
    heat: float,
    clip: float,
    in_nats: bool,
) -> float:
    total = sum(WEIGHTS.tolist()) + 1e-6
    loss = 0.0
    for row, weight in enumerate(WEIGHTS.tolist()):
        first = int(teacher[row].argmax())
        plain = torch.softmax(student[row].double(), 0)
        s = torch.softmax(student[row].double() / heat, 0).tolist()
        t = torch.softmax(teacher[row].double() / heat, 0).tolist()
        kl = heat**2 * sum(a * (math.log(a) - math.log(b)) for a, b in zip(s, t, strict=True))
        if in_nats:
            part = (min(kl, clip) if clip else kl) / total
        else:
            part = min(kl / total, clip) if clip else kl / total
        loss += alpha * weight * -math.log(float(plain[first])) / total
        loss += (1 - alpha) * weight * part
    return loss


@pytest.mark.parametrize("heat", [1.0, 2.0])
@pytest.mark.parametrize(("clip", "in_nats"), [(0.0, False), (0.3, False), (1.0, True)])
def test_reverse_kl_is_what_it_is_by_hand(heat: float, clip: float, in_nats: bool) -> None:
    student, teacher = drawn(0), drawn(1)
    found = losses.reverse_kl_loss(
        student,
        teacher,
        WEIGHTS,
        alpha=0.8,
        temperature=heat,
        clip=clip,
        clip_before_norm=in_nats,
    )
    wanted = by_hand(student, teacher, alpha=0.8, heat=heat, clip=clip, in_nats=in_nats)
    assert float(found.loss) == pytest.approx(wanted, rel=1e-5)


def test_the_published_clip_grows_with_the_batch_and_the_other_does_not() -> None:
    student, teacher = drawn(0), drawn(1)

    def cap(weights: torch.Tensor, in_nats: bool) -> float:
        return losses.reverse_kl_loss(
            student, teacher, weights, alpha=0.5, clip=0.01, clip_before_norm=in_nats
        ).cap

    assert cap(WEIGHTS, False) == pytest.approx(0.04, rel=1e-4)
    assert cap(100 * WEIGHTS, False) == pytest.approx(4.0, rel=1e-4)
    assert cap(WEIGHTS, True) == cap(100 * WEIGHTS, True) == 0.01


def test_a_clipped_slot_gives_no_gradient_and_the_others_do() -> None:
    teacher = drawn(1)
    student = teacher.clone()
    student[0] += torch.linspace(0, 0.5, VOCAB)  # near the teacher
    student[1] = teacher[1].flip(0) * 3  # far from it
    student.requires_grad_(True)
    found = losses.reverse_kl_loss(
        student, teacher, torch.ones(ROWS), alpha=0.0, clip=0.5, clip_before_norm=True
    )
    found.loss.backward()
    assert student.grad is not None
    assert float(student.grad[0].abs().sum()) > 0
    assert float(student.grad[1].abs().sum()) == 0
    assert found.clipped == pytest.approx(1 / ROWS, rel=1e-4)


def test_a_student_that_is_its_teacher_has_no_divergence_and_the_teacher_no_gradient() -> None:
    teacher = drawn(3).requires_grad_(True)
    student = teacher.detach().clone().requires_grad_(True)
    found = losses.reverse_kl_loss(student, teacher, torch.ones(ROWS), alpha=0.0, clip=0.01)
    found.loss.backward()
    assert found.kl == pytest.approx(0.0, abs=1e-6)
    assert teacher.grad is None


def test_cross_entropy_is_the_weighted_mean_over_the_weights() -> None:
    logits, labels = drawn(5), torch.arange(ROWS)
    each = [-math.log(float(torch.softmax(logits[i], 0)[i])) for i in range(ROWS)]
    wanted = sum(w * x for w, x in zip(WEIGHTS.tolist(), each, strict=True)) / float(WEIGHTS.sum())
    assert float(losses.sft_loss(logits, labels, WEIGHTS)) == pytest.approx(wanted, rel=1e-5)


def test_labels_of_the_length_are_the_shortest_verification_that_loses_nothing() -> None:
    right = torch.tensor(
        [
            [False, True, True, False],
            [False, False, True, True],
            [False, True, True, True],
        ]
    )
    kept = losses.accepted(right)
    assert kept.tolist() == [2, 0, 3]
    assert losses.length_labels(kept, 4).tolist() == [0.75, 0.25, 1.0]
    assert losses.length_labels(kept, 4, lookahead=3).tolist() == [1.0, 0.75, 1.0]


def test_blocks_that_leave_the_text_do_not_teach_the_length() -> None:
    said, labels = torch.tensor([0.5, 0.9]), torch.tensor([0.25, 0.0])
    only_first = losses.length_loss(said, labels, torch.tensor([True, False]))
    assert float(only_first) == pytest.approx(0.0625)
    assert float(losses.length_loss(said, labels, torch.tensor([False, False]))) == 0.0
