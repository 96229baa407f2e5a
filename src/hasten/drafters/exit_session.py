"""One request's exit modules: fed with verified rows, asked about rows that aren't.

Signals of verified rows wait in a queue until their module is asked something; then they and the
row in question go through the module together. Where nobody asks for long, they are put into it by
themselves now and then, so that the queue stays short.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hasten.exits.bank import ExitBank, LocalHead
from hasten.exits.modules import MOST_WAITING, ExitModule, ExitState, cut
from hasten.exits.native_module import NativeRun, Pairs
from hasten.types import Round, RowSignals


class TorchRun:
    """A request's run of one module: verified rows up to the pending root, then scratch rows."""

    def __init__(self, module: ExitModule, embeddings: torch.Tensor) -> None:
        self.module, self.config = module, module.config
        self._embeddings = embeddings
        self._state = ExitState()
        self._tokens: list[int] = []
        self._states: list[torch.Tensor] = []
        self._deep: dict[int, list[torch.Tensor]] = {layer: [] for layer in self.config.deep}
        self._before: dict[int, torch.Tensor] | None = None
        """Deep states of the verified row before those in the queue."""
        self._parents: list[int] = []
        self._asked = torch.empty(0)
        """Parents of the rows `step` was given since the root, and the outputs ``(n, hidden)``."""

    @property
    def length(self) -> int:
        """Verified rows in the module."""
        return self._state.length

    @torch.inference_mode()
    def feed(
        self,
        tokens: Sequence[int],
        hidden: Mapping[int, torch.Tensor],
        kept: Sequence[int] | None = None,
    ) -> None:
        """Verified rows: their tokens and, in `hidden`, states ``(n, hidden)`` at the tapped
        layers: of the rows `kept` (None: of just these rows)."""
        cut(self._state)
        if not self.config.attends:
            return
        if kept is not None:
            hidden = {layer: _rows(hidden[layer], kept) for layer in self._tapped()}
        if len(self._tokens) >= MOST_WAITING:
            self.catch_up()
        self._tokens.extend(tokens)
        if self.config.layer:
            self._states.append(hidden[self.config.layer])
        for layer, queue in self._deep.items():
            queue.append(hidden[layer])

    def _tapped(self) -> set[int]:
        return {*self.config.deep, self.config.layer} - {0}

    def catch_up(self) -> None:
        """Put the waiting rows into the module."""
        if self._tokens:
            rows, features = self._take([], None)
            self.module.store(self._state, rows, features)

    def first(self, token: int, state: torch.Tensor | None) -> torch.Tensor:
        """The module's output ``(1, hidden)`` at the pending root, whose state at the exit is
        `state` ``(1, hidden)`` (None at layer 0)."""
        cut(self._state)
        if not self.config.attends:
            assert state is not None
            return self.module.run(None, state, None, verified=0, want=1)
        count = len(self._tokens)
        rows, features = self._take([token], state)
        return self.module.run(self._state, rows, features, verified=count, want=1, depths=(0,))

    def verified(self, want: int) -> torch.Tensor:
        """Outputs ``(want, hidden)`` at the last `want` verified rows, which nobody has asked about
        since they were fed."""
        rows, features = self._take([], None)
        return self.module.run(self._state, rows, features, verified=len(rows), want=want)

    def _take(
        self, more: Sequence[int], state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """States and features of the queue's rows, and of one more row; the queue is empty then."""
        if self.config.layer:
            states = [*self._states, *([] if state is None else [state])]
            rows = torch.cat(states) if len(states) > 1 else states[0]
        else:
            rows = self._embed([*self._tokens, *more])
        features = self._features(len(self._tokens), len(rows))
        self._tokens.clear()
        self._states.clear()
        return rows, features

    def more(
        self,
        tokens: Sequence[int],
        states: torch.Tensor | None,
        above: torch.Tensor,
        depths: Sequence[int],
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Outputs ``(n, hidden)`` at drafted rows; `above` ``(n, hidden)`` are the outputs at their
        parents, `depths` counts from the root, `mask` is `ExitModule.run`'s."""
        if not self.config.attends:
            assert states is not None
            return self.module.run(None, states, None, verified=0, want=len(tokens))
        if states is None:
            states = self._embed(tokens)
        features = above if self.config.deep else None
        return self.module.run(
            self._state,
            states,
            features,
            verified=0,
            want=len(tokens),
            depths=depths,
            mask=mask,
        )

    def step(self, tokens: Sequence[int], parents: Sequence[int]) -> torch.Tensor:
        """At exit 0: outputs ``(n, hidden)`` at rows of a tree, see `ExitSession.ask`."""
        if parents[0] < 0:
            self._parents, self._asked = [-1], self.first(tokens[0], None)
            return self._asked
        self._parents += parents
        paths = [self._path(row) for row in range(len(self._asked), len(self._parents))]
        mask = torch.full((len(paths), len(self._parents)), -torch.inf)
        for i, path in enumerate(paths):
            mask[i, path] = 0.0
        above = self._asked[list(parents)]
        depths = [len(path) - 1 for path in paths]
        out = self.more(tokens, None, above, depths, mask.to(above.device))
        self._asked = torch.cat([self._asked, out])
        return out

    def _path(self, row: int) -> list[int]:
        """A row and those above it."""
        path = [row]
        while (row := self._parents[row]) >= 0:
            path.append(row)
        return path

    def _embed(self, tokens: Sequence[int]) -> torch.Tensor:
        table = self._embeddings
        return table[torch.tensor(list(tokens), device=table.device)]

    def _features(self, count: int, wanted: int) -> torch.Tensor | None:
        """Features for the `count` rows of the queue and a row after them, the first `wanted` of
        them: each comes from the row before."""
        if not self.config.deep:
            return None
        before = self._before
        deep: list[torch.Tensor] = []
        for layer, kept in self._deep.items():
            parts = [*([] if before is None else [before[layer]]), *kept]
            deep.append(torch.cat(parts) if parts else self._nothing(0))
        if count:
            self._before = {layer: kept[-1][-1:] for layer, kept in self._deep.items()}
        for kept in self._deep.values():
            kept.clear()
        features = self.module.fused(deep) if len(deep[0]) else self._nothing(0)
        if before is None:  # nothing stands before a text's first row
            features = torch.cat([self._nothing(1), features])
        return features[:wanted]

    def _nothing(self, rows: int) -> torch.Tensor:
        return self._embeddings.new_zeros(rows, self.config.hidden)


ModuleRun = TorchRun | NativeRun


def _rows(value: torch.Tensor, kept: Sequence[int]) -> torch.Tensor:
    """The rows `kept` of `value`: a view where they are the first ones."""
    if list(kept) == list(range(len(kept))):
        return value[: len(kept)]
    return value[torch.tensor(list(kept), device=value.device)]


class ExitSession:
    """A request's modules and its draft head."""

    def __init__(self, bank: ExitBank) -> None:
        self.bank = bank
        self.runs: list[ModuleRun] = self._runs()
        self.head: LocalHead = bank.head.local(())

    def _runs(self) -> list[ModuleRun]:
        """A new request's, on hasten's own kernels where they have the module."""
        bank = self.bank
        return [
            NativeRun(bank.native[module.config.layer])
            if module.config.layer in bank.native
            else TorchRun(module, bank.embeddings)
            for module in bank.modules
        ]

    @torch.inference_mode()
    def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
        """A new request; `signals` are those of the prompt's last rows (perhaps of one alone)."""
        self.runs = self._runs()
        self.head = self.bank.head.local(prompt)
        if signals.hidden:
            rows = len(next(iter(signals.hidden.values())))
            for run in self.runs:
                run.feed(prompt[-rows:], signals.hidden)
                run.catch_up()  # the first draft mustn't pay for the prompt

    def observe(self, round: Round) -> None:
        """Rows that were kept are verified now."""
        tree, hidden = round.tree, round.signals.hidden
        if tree is None or not hidden:
            return
        kept = round.accepted
        tokens = [tree.tokens[node] for node in kept]
        for run in self.runs:
            run.feed(tokens, hidden, kept)

    def ask(
        self, run: ModuleRun, tokens: Sequence[int], parents: Sequence[int], width: int
    ) -> list[Pairs]:
        """The `width` likeliest ids after each of some drafted rows, by a module at exit 0.

        The rows asked about since the last root are numbered from 0, the root, in the order they
        were given; `parents` are such numbers. The root comes alone, with the parent -1; a row may
        only be asked about after its parent. A row whose logits aren't finite has no pairs.
        """
        if isinstance(run, NativeRun):
            return run.ask(self.head, tokens, parents, width)
        return self.head.candidates(self.logits(run, run.step(tokens, parents)), width)

    def logits(self, run: ModuleRun, hidden: torch.Tensor) -> torch.Tensor:
        """Draft logits of a module's outputs: float32 ``(rows, draft_vocab)``."""
        return self.head(self.bank.normed(run.module, hidden))

    def end(self) -> None:
        """Keep nothing of the request."""
        self.runs = []
        self.head = self.bank.head.local(())
