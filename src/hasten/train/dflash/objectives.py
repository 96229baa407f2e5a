"""One batch's loss: blocks are drawn, the drafter runs, the target's text or distribution teaches.

Only slots that are supervised, and whose token is in the draft vocabulary, go through the head. A
slot whose token isn't is left out of the loss, and counts as a miss for the length head.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from hasten.dflash.net import DFlashNet
from hasten.train.dflash import losses
from hasten.train.dflash.blocks import Blocks, draw_anchors
from hasten.train.dflash.feed import Batch
from hasten.train.dflash.options import Options
from hasten.train.exits import Teacher


@dataclass(slots=True)
class Step:
    """A batch's loss, with facts for the curve; `slots` went through the head."""

    loss: torch.Tensor
    slots: int
    blocks: int
    facts: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Drafted:
    """What the drafter made of the blocks of a batch.

    hidden   ``(b, N, B, H)``, after its last norm
    rows     bool ``(b, N, B)``: the slots of `logits` ``(rows, draft_vocab)``, in order
    places   int64 ``(rows,)``: where their tokens stand in the draft vocabulary
    right    bool ``(b, N, B)``: the slot's first choice is the text's token; slot 0 never is
    """

    blocks: Blocks
    hidden: torch.Tensor
    rows: torch.Tensor
    logits: torch.Tensor
    places: torch.Tensor
    right: torch.Tensor


class Drafter:
    """The network with what it shares with the target.

    teacher     the head over the draft vocabulary
    embeddings  the target's ``(vocab, hidden)``; head: its whole head ``(vocab, hidden)``, from
                which ids of a prompt that the draft vocabulary hasn't take their rows
    """

    def __init__(
        self, net: DFlashNet, teacher: Teacher, embeddings: torch.Tensor, head: torch.Tensor
    ) -> None:
        self.net, self.teacher, self.head = net, teacher, head
        self._embeddings = embeddings

    def context(self, batch: Batch) -> torch.Tensor:
        """Context rows ``(b, S, H)``."""
        return self.net.context(batch.features)

    def blocks(self, batch: Batch, anchors: torch.Tensor, keep: torch.Tensor) -> Blocks:
        """Blocks at these anchors."""
        config, device = self.net.config, batch.ids.device
        return Blocks.at(
            anchors.to(device),
            keep.to(device),
            batch.ids,
            batch.starts,
            batch.lengths,
            block=config.block_size,
            mask_token=config.mask_token_id,
        )

    def states(self, blocks: Blocks, context: torch.Tensor) -> torch.Tensor:
        """Run the blocks: ``(b, N, B, H)``, after the last norm."""
        slots = F.embedding(blocks.tokens, self._embeddings).to(context.dtype)
        hidden: torch.Tensor = self.net(slots, context, blocks.positions, mask=blocks.mask)
        return hidden.view(*blocks.labels.shape, -1)

    def draft(self, blocks: Blocks, context: torch.Tensor) -> Drafted:
        """Run the blocks, and the head where there is something to learn."""
        hidden = self.states(blocks, context)
        places = self.teacher.place[blocks.labels]
        rows = blocks.inside & (places >= 0)
        logits, right = self.teacher.logits(hidden[rows]), torch.zeros_like(rows)
        right[rows] = logits.detach().argmax(-1) == places[rows]
        return Drafted(blocks, hidden, rows, logits, places[rows], right)

    def says(self, hidden: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
        """What slots with the states ``(n, H)`` say, as serving reads them: int64 ids ``(n,)``, of
        the draft vocabulary or of `extra` (int64, `hasten.exits.bank.local_ids`)."""
        best, at = self.teacher.logits(hidden).max(-1)
        said = self.teacher.ids[at]
        if len(extra):
            rows = self.head[extra].to(self.teacher.head.dtype)
            more, at = F.linear(hidden.to(rows.dtype), rows).max(-1)
            said = torch.where(more > best, extra[at], said)
        return said


class Objective:
    """Losses of batches; `seed` and `salt` fix the anchors."""

    def __init__(self, drafter: Drafter, options: Options) -> None:
        self.drafter, self._options = drafter, options

    def sft(self, batch: Batch, salt: int) -> Step:
        """The target's text, slots weighted by their distance from the anchor."""
        made = self._drafted(batch, salt)
        weights = made.blocks.weights(self._options.sft.gamma)[made.rows]
        loss = losses.sft_loss(made.logits, made.places, weights)
        return self._step(made, loss)

    def distil(self, batch: Batch, salt: int) -> Step:
        """The target's first choice and its distribution (reverse KL), and the length head."""
        rounds = self._options.rounds
        made = self._drafted(batch, salt)
        found = losses.reverse_kl_loss(
            made.logits,
            self._taught(batch, made),
            made.blocks.weights(self._options.sft.gamma)[made.rows],
            alpha=rounds.alpha,
            temperature=rounds.temperature,
            clip=rounds.clip,
            clip_before_norm=rounds.clip_before_norm,
        )
        step = self._step(made, found.loss)
        facts = {"ce": found.ce, "kl": found.kl, "cap_nats": found.cap, "clipped": found.clipped}
        step.facts |= {name: value for name, value in facts.items() if value != float("inf")}
        return self._with_length(batch, made, step)

    def control(self, batch: Batch, salt: int) -> Step:
        """`sft` on a round's text, the length head learning as in `distil`."""
        made = self._drafted(batch, salt)
        weights = made.blocks.weights(self._options.sft.gamma)[made.rows]
        step = self._step(made, losses.sft_loss(made.logits, made.places, weights))
        return self._with_length(batch, made, step)

    def length(self, batch: Batch, salt: int) -> Step:
        """The length head alone; the drafter isn't part of the graph."""
        with torch.no_grad():
            made = self._drafted(batch, salt, self._options.head.everywhere)
        step = Step(torch.zeros((), device=batch.ids.device), *self._sizes(made))
        return self._with_length(batch, made, step)

    def _drafted(self, batch: Batch, salt: int, everywhere: bool = False) -> Drafted:
        """Blocks drawn from the answers: an anchor is a token of the answer with one after it. Or
        from whole texts, without the first and the last B tokens."""
        generator = torch.Generator().manual_seed(salt)
        lengths, block = batch.lengths.tolist(), self.drafter.net.config.block_size
        first, last = batch.starts.tolist(), [length - 2 for length in lengths]
        starts = batch.starts
        if everywhere:
            first, last = [block] * len(lengths), [length - block - 1 for length in lengths]
            starts = torch.zeros_like(starts)
        anchors, keep = draw_anchors(first, last, self._options.sft.anchors, generator)
        blocks = self.drafter.blocks(replace(batch, starts=starts), anchors, keep)
        return self.drafter.draft(blocks, self.drafter.context(batch))

    @torch.no_grad()
    def _taught(self, batch: Batch, made: Drafted) -> torch.Tensor:
        """The target's logits ``(rows, draft_vocab)`` for each supervised slot: those of the row
        before the slot's position."""
        assert batch.final is not None
        at = made.blocks.anchors.unsqueeze(2) - 1
        at = at + torch.arange(made.blocks.size, device=at.device)
        text = torch.arange(len(at), device=at.device).view(-1, 1, 1).expand_as(at)
        teacher = self.drafter.teacher
        final = batch.final[text[made.rows], at[made.rows]]
        normed = F.rms_norm(final, final.shape[-1:], teacher.norm, teacher.eps)
        return teacher.logits(normed)

    def _with_length(self, batch: Batch, made: Drafted, step: Step) -> Step:
        net = self.drafter.net
        if not net.config.length_head:
            return step
        valid = made.blocks.whole(batch.lengths)
        kept = losses.accepted(made.right)
        labels = losses.length_labels(kept, made.blocks.size, net.config.lookahead)
        # Detached: the head never moves the drafter.
        said = net.worth(made.hidden.detach().flatten(0, 1)).view_as(labels)
        loss = losses.length_loss(said, labels, valid)
        step.loss = step.loss + loss
        step.facts |= {"length_loss": float(loss.detach())}
        return step

    def _step(self, made: Drafted, loss: torch.Tensor) -> Step:
        return Step(loss, *self._sizes(made), {"first": self._first(made)})

    @staticmethod
    def _first(made: Drafted) -> float:
        """How often slot 1 is right, of those there are."""
        wanted = made.blocks.inside[..., 1]
        return float((made.right[..., 1] & wanted).sum() / wanted.sum().clamp(min=1))

    @staticmethod
    def _sizes(made: Drafted) -> tuple[int, int]:
        return len(made.places), int(made.blocks.keep.sum())
