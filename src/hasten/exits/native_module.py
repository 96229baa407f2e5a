"""Exit modules at exit 0 on hasten's CPU kernels: a step is one call into C++ (``exits.cpp``).

The arithmetic is that of `hasten.exits.modules` with the same products; what is between them is
float32. A request's rows, keys and values live on the other side of the call.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from hasten.errors import ModelError
from hasten.exits.modules import MOST_WAITING, ExitModule
from hasten.native import library as native
from hasten.targets.fused_native import NativeLinear

if TYPE_CHECKING:
    from hasten.exits.bank import LocalHead

Pairs = list[tuple[int, float]]
"""Ids and their probabilities, likeliest first."""


class NativeModule:
    """A module of kind ``deep`` at exit 0 over its target's embeddings ``(vocab, hidden)``.

    Requests share it and keep a `NativeRun` each.
    """

    def __init__(self, module: ExitModule, embeddings: torch.Tensor) -> None:
        config = module.config
        assert module.norm is not None
        self.module, self.embeddings = module, embeddings
        self._norm = module.norm.float().contiguous()
        self._frequencies = module.frequencies.contiguous()
        fuse, mixed, out, *mlp = [_struct(product) for product in module.products()]
        gate_up, down = mlp or (native.Linear(), native.Linear())
        self.struct = native.ExitModel(
            hidden=config.hidden,
            inner=config.inner,
            heads=config.heads,
            kv_heads=config.kv_heads,
            dim=config.head_dim,
            deep=len(config.deep),
            half=int(embeddings.dtype == torch.bfloat16),
            eps=config.eps,
            table=embeddings.data_ptr(),
            frequencies=self._frequencies.data_ptr(),
            norm=self._norm.data_ptr(),
            fuse=fuse,
            mixed=mixed,
            out=out,
            gate_up=gate_up,
            down=down,
        )


def native_module(module: ExitModule, embeddings: torch.Tensor) -> NativeModule | None:
    """The module on the kernels; None where they haven't its kind, sizes, dtype or products."""
    config = module.config
    if not config.deep or config.layer or config.head_dim % native.LANES:
        return None
    if embeddings.dtype not in (torch.float32, torch.bfloat16) or embeddings.device.type != "cpu":
        return None
    if not all(isinstance(product, NativeLinear) for product in module.products()):
        return None
    return NativeModule(module, embeddings.contiguous())


def _struct(product: object) -> native.Linear:
    assert isinstance(product, NativeLinear)
    return product.struct


class NativeRun:
    """A request's run of a module: verified rows up to the pending root, then drafted rows.

    Every method raises ModelError where memory is short.
    """

    def __init__(self, made: NativeModule) -> None:
        self.module, self.config = made.module, made.module.config
        self.length = 0
        """Verified rows in the module."""
        self.waiting = 0
        """Verified rows that aren't."""
        self._made = made
        self._drafted = 0
        self._dtype = made.embeddings.dtype
        self._kernels = native.library()
        self._run = self._kernels.exit_open()
        if not self._run:
            raise ModelError("there is no memory for another request's exit module")
        weakref.finalize(self, self._kernels.exit_close, self._run)
        self._model_at = ctypes.byref(made.struct)
        self._step = native.ExitStep()
        self._step_at = ctypes.byref(self._step)
        self._head: LocalHead | None = None
        self._ids, self._chances = array("q"), array("f")

    # -- verified rows

    def feed(
        self,
        tokens: Sequence[int],
        hidden: Mapping[int, torch.Tensor],
        kept: Sequence[int] | None = None,
    ) -> None:
        """Verified rows: their tokens and, in `hidden`, states ``(n, hidden)`` at the deep layers:
        of the rows `kept` (None: of just these rows). Drafted rows are forgotten."""
        states = [self._states(hidden[layer]) for layer in self.config.deep]
        rows = array("q", range(len(tokens)) if kept is None else kept)
        least = min([each.shape[0] for each in states])
        if len(rows) != len(tokens) or (rows and max(rows) >= least):
            raise ModelError(f"{len(tokens)} verified rows came with the states of others")
        places = array("Q", [each.data_ptr() for each in states])
        for start in range(0, len(rows), MOST_WAITING):
            if self.waiting >= MOST_WAITING:
                self.catch_up()
            part = slice(start, start + MOST_WAITING)
            ids, some = array("q", tokens[part]), rows[part]
            code = self._kernels.exit_feed(
                self._model_at, self._run, _at(ids), _at(places), _at(some), len(ids)
            )
            _check(code)
            self.waiting += len(ids)
            self._drafted = 0

    def _states(self, states: torch.Tensor) -> torch.Tensor:
        if states.dtype != self._dtype or not states.is_contiguous():
            states = states.to(self._dtype).contiguous()
        return states

    def catch_up(self) -> None:
        """Put the waiting rows into the module."""
        if self.waiting:
            self._go(array("q"), array("i"), 0)

    # -- questions

    def ask(
        self, head: LocalHead, tokens: Sequence[int], parents: Sequence[int], width: int
    ) -> list[Pairs]:
        """The likeliest ids after drafted rows: see `ExitSession.ask`."""
        count, width = len(tokens), min(width, len(head.ids))
        if len(self._ids) < count * width:
            self._ids = array("q", bytes(8 * count * width))
            self._chances = array("f", bytes(4 * count * width))
        step = self._step
        step.width, step.head = width, self._head_for(head)
        step.ids, step.chances = _at(self._ids), _at(self._chances)
        self._go(array("q", tokens), array("i", parents), count)
        ids, chances = self._ids[: count * width], self._chances[: count * width]
        pairs = list(zip(ids, chances, strict=True))
        return [
            pairs[at : at + width] if ids[at] >= 0 else [] for at in range(0, len(pairs), width)
        ]

    def first(self, token: int, state: torch.Tensor | None = None) -> torch.Tensor:
        """The module's output ``(1, hidden)`` at the pending root."""
        assert state is None, "a row is its embedding at exit 0"
        return self._outputs([token], [-1], 1)

    def more(
        self,
        tokens: Sequence[int],
        states: torch.Tensor | None,
        above: torch.Tensor,
        depths: Sequence[int],
    ) -> torch.Tensor:
        """Outputs ``(1, hidden)`` at a row that continues the drafted ones as a chain; `above`
        ``(1, hidden)`` is the output at its parent, `depths` its depth below the root."""
        assert states is None, "a row is its embedding at exit 0"
        assert list(depths) == [self._drafted], "a chain"
        return self._outputs(tokens, [self._drafted - 1], 1, above.float().contiguous())

    def verified(self, want: int) -> torch.Tensor:
        """Outputs ``(want, hidden)`` at the last `want` verified rows, which nobody has asked about
        since they were fed."""
        assert want <= self.waiting, "the module has them already"
        return self._outputs([], [], want)

    def _outputs(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        want: int,
        above: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = torch.empty((want, self.config.hidden), dtype=torch.float32)
        step = self._step
        step.head, step.hidden = None, out.data_ptr()
        step.above = None if above is None else above.data_ptr()
        try:
            self._go(array("q", tokens), array("i", parents), want)
        finally:
            step.above = step.hidden = None
        return out.to(self._dtype)

    def _go(self, tokens: array[int], parents: array[int], want: int) -> None:
        """Take the waiting rows and these drafted ones."""
        step = self._step
        step.drafted, step.want, step.threads = len(tokens), want, torch.get_num_threads()
        step.tokens, step.parents = _at(tokens), _at(parents)
        _check(self._kernels.exit_step(self._model_at, self._run, self._step_at))
        self.length += self.waiting
        self.waiting = 0
        self._drafted = len(tokens) + (self._drafted if not parents or parents[0] >= 0 else 0)

    def _head_for(self, head: LocalHead) -> ctypes._Pointer[native.Head]:
        if head is not self._head:
            self._head, self._head_at = head, ctypes.pointer(head_struct(head))
        return self._head_at


def head_struct(head: LocalHead) -> native.Head:
    """A request's draft head, whose product is a `NativeLinear`; it points into `head`."""
    extra = head.extra
    return native.Head(
        product=_struct(head.product),
        extra=None if extra is None else extra.data_ptr(),
        extras=0 if extra is None else len(extra),
        ids=head.ids.data_ptr(),
    )


def _at(numbers: array[int] | array[float]) -> int:
    return numbers.buffer_info()[0]


def _check(code: int) -> None:
    if code:
        raise ModelError("there is no memory for a step of an exit module")
