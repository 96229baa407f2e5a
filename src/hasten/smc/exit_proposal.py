"""The target's own lower layers, and an exit module on top of them, draft for a population.

Rows that draft run the layers below the exit only; the target's pass resumes them, so that every
row passes every layer once. All particles share one run of the module: the prompt's rows are its
verified rows, and what particles add are scratch rows that only their own lineage sees. So a copy
of a particle copies a row of a mask, no keys or values, and a step is one call for all particles.
Particles on one sequence share rows where they drafted the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hasten.exits.bank import ExitBank, assemble
from hasten.exits.modules import ExitState
from hasten.smc.forest import Forest
from hasten.smc.proposals import Choose, Lane, run_rows
from hasten.targets.base import Target
from hasten.targets.fused_native import draft_linear

_COLUMNS = 256
"""The mask grows by so many scratch rows; fewer than these are never tidied up."""


def whole_vocabulary(target: Target, bank: ExitBank) -> ExitBank:
    """The same modules over a head with every id of the target: a head of its own to read for each
    drafted token, and q reaches whatever p does."""
    return assemble(target, bank.modules, None, draft_linear)


class ExitProposal:
    """Drafts from the one module of `bank` over `target`, whose lower layers it runs."""

    name = "early-exit"

    def __init__(self, target: Target, bank: ExitBank) -> None:
        assert len(bank.modules) == 1, "one exit"
        self._target, self._bank = target, bank
        self._module = bank.modules[0]
        self._config = self._module.config
        self.taps = bank.taps
        self.full_support = len(bank.head.ids) >= target.info.vocab_size
        self._start((), 0)

    def _start(self, prompt: Sequence[int], count: int) -> None:
        """Nothing has been drafted yet."""
        self._head = self._bank.head.local(prompt)
        self._state = ExitState()
        self._seen = self._nothing_seen(count, _COLUMNS)
        """What each slot sees of the scratch rows, ``(N, columns)``: 0, or -inf."""
        self._depth = [0] * count
        """Rows that each slot has verified after the prompt."""
        self._before = self._zeros(count)
        """The fused deep states of each slot's last verified row, ``(N, hidden)``."""
        self._queue: list[tuple[torch.Tensor, torch.Tensor | None, list[int]]] = []
        """Verified rows that the module hasn't got: states, features, depths."""
        self._queued = 0
        self._steps: list[dict[int, torch.Tensor]] = []
        """Taps of each step's rows up to the exit, ``(rows, hidden)``."""
        self._tokens: list[list[int]] = []
        """Each step's tokens, one a lane: the roots, then the drafted ones."""
        self._forest = Forest(())
        """Which row of a step is whose."""
        self._places: dict[int, int] = {}
        self._kept_columns = 0
        """Scratch rows that stay; drafts are written after them and dropped."""

    def room(self, length: int) -> int:
        """Up to the target's context."""
        return self._target.info.context_limit - length

    @torch.inference_mode()
    def begin(self, prompt: Sequence[int], hidden: Mapping[int, torch.Tensor], count: int) -> None:
        """Put the prompt's rows (those that `hidden` has) into the module."""
        self._start(prompt, count)
        if not self._config.attends:
            return
        some = next(iter(hidden.values()), None)
        ids = list(prompt) if some is None else list(prompt)[-len(some) :]
        states = hidden[self._config.layer] if self._config.layer else self._embed(ids)
        features = None
        if self._config.deep:
            fused = self._fused(hidden)
            features = torch.cat([self._zeros(1), fused[:-1]])
            self._before = fused[-1:].repeat(count, 1)
        self._module.store(self._state, states, features)

    @torch.inference_mode()
    def draft(self, lanes: Sequence[Lane], length: int, choose: Choose) -> int:
        """Step by step for all lanes: lower layers, module, head, a token."""
        self._tokens = [[lane.root for lane in lanes]]
        self._places = {lane.slot: at for at, lane in enumerate(lanes)}
        self._forest = Forest(lanes)
        self._steps = [self._run_lower()]
        slots = [lane.slot for lane in lanes]
        above: torch.Tensor | None = None
        for step in range(length):
            above = self._outputs(slots, step, above)
            logits = self._head(self._bank.normed(self._module, above))
            self._tokens.append(choose(self._spread(logits), self._forest.levels[step].of))
            self._forest.grow(self._tokens[-1])
            if step + 1 < length or self._config.layer:
                self._steps.append(self._run_lower())
        self._forget_drafts()
        return self._config.layer

    def _run_lower(self) -> dict[int, torch.Tensor]:
        """Run the last level's rows up to the exit; their taps on the way, the exit's own
        included."""
        layer = self._config.layer
        if not layer:
            return {}
        taps = sorted({layer, *(t for t in self.taps if t < layer)})
        passes = run_rows(self._target, self._forest.last_rows(), (0, layer), taps)
        return {tap: torch.cat([each.hidden[tap] for each in passes]) for tap in taps}

    def _outputs(self, slots: Sequence[int], step: int, above: torch.Tensor | None) -> torch.Tensor:
        """The module's outputs ``(rows, hidden)`` at this step's rows; `above` are those at the
        step before, None at the roots."""
        level = self._forest.levels[step]
        states = self._states(step)
        count, owners = len(level.firsts), [slots[at] for at in level.firsts]
        if not self._config.attends:
            return self._module.run(None, states, None, verified=0, want=count)
        features = None
        if self._config.deep:
            features = self._before[owners] if above is None else above[self._parents(step)]
        depths = [self._depth[slot] + step for slot in owners]
        if above is None:
            states, features, depths = self._with_queue(states, features, depths)
        first = self._state.scratch + len(depths) - count
        self._show(slots, [first + row for row in level.of])
        seen = self._seen[owners, : first + count]
        out = self._module.run(
            self._state, states, features, verified=0, want=count, depths=depths, mask=seen
        )
        if above is None:  # verified rows came before them: they stay
            self._kept_columns = self._state.scratch
        return out

    def _parents(self, step: int) -> list[int]:
        """The numbers of the rows above this step's."""
        of = self._forest.levels[step - 1].of
        return [of[at] for at in self._forest.levels[step].firsts]

    def _states(self, step: int) -> torch.Tensor:
        layer = self._config.layer
        if layer:
            return self._steps[step][layer]
        return self._embed([self._tokens[step][at] for at in self._forest.levels[step].firsts])

    def _with_queue(
        self, states: torch.Tensor, features: torch.Tensor | None, depths: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None, list[int]]:
        """The queue's rows before these; the queue is empty then."""
        queue, self._queue, self._queued = self._queue, [], 0
        states = torch.cat([*(rows for rows, _, _ in queue), states])
        if features is not None:
            features = torch.cat([*(each for _, each, _ in queue if each is not None), features])
        return states, features, [*(d for _, _, each in queue for d in each), *depths]

    def _show(self, slots: Sequence[int], columns: Sequence[int]) -> None:
        """Each slot sees one more scratch row."""
        need = max(columns) + 1
        if need > self._seen.shape[1]:
            more = self._nothing_seen(len(self._seen), need - self._seen.shape[1] + _COLUMNS)
            self._seen = torch.cat([self._seen, more], 1)
        self._seen[list(slots), list(columns)] = 0.0

    def _forget_drafts(self) -> None:
        """Drop the drafted scratch rows: verified ones take their place when they are known."""
        if self._config.attends:
            self._seen[:, self._kept_columns :] = -math.inf
            self._state.scratch = self._kept_columns

    @torch.inference_mode()
    def observe(
        self, lanes: Sequence[Lane], kept: int, hidden: Sequence[Mapping[int, torch.Tensor]]
    ) -> None:
        """Queue the verified rows below the roots, which the module has already."""
        if not self._config.attends:
            return
        slots = [lane.slot for lane in lanes]
        places = [self._places[slot] for slot in slots]
        fused = self._fused(self._verified(places, kept, hidden)) if self._config.deep else None
        for step in range(1, kept):
            features = None if fused is None else fused[step - 1 :: kept]
            self._enqueue(slots, places, step, features)
        if fused is not None:
            self._before[slots] = fused[kept - 1 :: kept]
        for slot in slots:
            self._depth[slot] += kept

    def _verified(
        self, places: Sequence[int], kept: int, hidden: Sequence[Mapping[int, torch.Tensor]]
    ) -> dict[int, torch.Tensor]:
        """The deep layers' outputs at the kept rows, lane by lane, ``(n * kept, hidden)``."""
        out = {}
        for layer in self._config.deep:
            if layer in self._steps[0]:
                rows = [self._rows(layer, step, places) for step in range(kept)]
                out[layer] = torch.stack(rows, 1).flatten(0, 1)
            else:
                out[layer] = torch.cat([each[layer][:kept] for each in hidden])
        return out

    def _enqueue(
        self, slots: Sequence[int], places: Sequence[int], step: int, features: torch.Tensor | None
    ) -> None:
        """Queue this step's rows of these slots; they see them from now on."""
        if self._config.layer:
            states = self._rows(self._config.layer, step, places)
        else:
            states = self._embed([self._tokens[step][at] for at in places])
        self._queue.append((states, features, [self._depth[slot] + step for slot in slots]))
        first = self._state.scratch + self._queued
        self._show(slots, range(first, first + len(slots)))
        self._queued += len(slots)

    def _rows(self, layer: int, step: int, places: Sequence[int]) -> torch.Tensor:
        """What these lanes' rows of a step were at a layer, ``(n, hidden)``."""
        of = self._forest.levels[step].of
        return self._steps[step][layer][[of[at] for at in places]]

    @torch.inference_mode()
    def retire(self, slots: Sequence[int]) -> None:
        """They see nothing any more."""
        self._seen[list(slots)] = -math.inf

    @torch.inference_mode()
    def fork(self, copies: Mapping[int, int]) -> None:
        """Copy what the sources see; rows that nobody sees go where they are many."""
        if not copies:
            return
        to, source = list(copies), list(copies.values())
        self._seen[to] = self._seen[source]
        self._before[to] = self._before[source]
        for slot, other in copies.items():
            self._depth[slot] = self._depth[other]
        self._tidy()

    def _tidy(self) -> None:
        """Drop scratch rows that no particle sees, where they are more than half."""
        state, count = self._state, self._state.scratch
        used = (self._seen == 0).any(0)
        kept = used[:count].nonzero().squeeze(1)
        if count <= _COLUMNS or len(kept) * 2 > count:
            return
        cache = state.cache
        assert cache is not None
        cache[:, state.length : state.length + len(kept)] = cache[:, state.length + kept]
        state.scratch = self._kept_columns = len(kept)
        self._seen = torch.cat([self._seen[:, kept], self._seen[:, count:]], 1)

    def close(self) -> None:
        """Keep nothing of the request."""
        self._start((), 0)

    # tensors

    def _spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Draft logits ``(n, draft_vocab)`` by the target's ids."""
        return logits if self.full_support else self._head.spread(logits)

    def _fused(self, hidden: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return self._module.fused([hidden[layer] for layer in self._config.deep])

    def _embed(self, ids: Sequence[int]) -> torch.Tensor:
        table = self._bank.embeddings
        return table[torch.tensor(list(ids), device=table.device)]

    def _zeros(self, rows: int) -> torch.Tensor:
        return self._bank.embeddings.new_zeros(rows, self._config.hidden)

    def _nothing_seen(self, rows: int, columns: int) -> torch.Tensor:
        device: Any = self._bank.embeddings.device
        return torch.full((rows, columns), -math.inf, device=device)
