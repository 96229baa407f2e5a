"""A batch's loss: at every draft step the target's own distribution, over the draft vocabulary.

The target's law after a token is softmax over its logits of the draft vocabulary. A row whose token
in the text isn't in that vocabulary is left out. (The reference leaves out rows whose *likeliest*
token isn't, and divides by all rows; on greedy text the same rows are learned.)
"""

from __future__ import annotations

import torch

from hasten.eagle3.net import Eagle3Net
from hasten.train.dflash.feed import Batch
from hasten.train.dflash.objectives import Step
from hasten.train.eagle3.options import Options
from hasten.train.eagle3.unroll import unrolled
from hasten.train.exits import Teacher


class Objective:
    """The loss of `options`.

    teacher     the target's head over the draft vocabulary
    embeddings  the table the drafter reads tokens from ``(vocab, hidden)``
    """

    def __init__(
        self, net: Eagle3Net, teacher: Teacher, embeddings: torch.Tensor, options: Options
    ) -> None:
        self.net, self.teacher, self.embeddings = net, teacher, embeddings
        self._options = options

    def __call__(self, batch: Batch, salt: int) -> Step:
        """The loss over all rows of the answers; nothing is drawn, so that `salt` plays no part."""
        sft = self._options.sft
        text, at, places = self.learned(batch)
        taught = self._taught(batch, text, at)
        depth = at - batch.starts[text]
        loss, facts = torch.zeros((), device=text.device), {}
        outs = unrolled(self.net, self.embeddings, batch.ids, batch.features, sft.unroll)
        for step, out in enumerate(outs):
            rows = depth >= step
            logits = self.net.logits(out[text[rows], at[rows] - 1 - step])
            each = -(taught[rows] * torch.log_softmax(logits, -1)).sum(-1)
            loss = loss + sft.decay**step * each.sum() / max(len(each), 1)
            right = (logits.detach().argmax(-1) == places[rows]).sum()
            facts[f"right_{step + 1}"] = float(right / max(len(each), 1))
        return Step(loss, len(at), len(batch.ids), facts)

    def learned(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The target's rows that teach: numbers of their texts, their positions, and the places of
        the tokens that follow them in the draft vocabulary; int64 ``(rows,)`` each.

        They are those of an answer's tokens but the last: what is drafted comes after a pending
        token of the answer."""
        place = self.teacher.place[batch.ids[:, 1:]]
        at = torch.arange(place.shape[1], device=place.device)
        inside = (at >= batch.starts.unsqueeze(1)) & (at + 1 < batch.lengths.unsqueeze(1))
        text, at = (inside & (place >= 0)).nonzero(as_tuple=True)
        return text, at, place[text, at]

    @torch.no_grad()
    def _taught(self, batch: Batch, text: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """The target's law after each of these rows ``(rows, draft_vocab)``, float32."""
        assert batch.final is not None
        return self.teacher.probs(batch.final[text, at])
