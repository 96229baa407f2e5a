"""Other libraries measured in the same run, on the same weights, dtype, prompts and clock.

A peer is a row of its own, named ``peer:NAME``. One name on the command line may stand for several
peers (``transformers``: plain `generate`, and its prompt lookup), and carry an option
(``transformers-early-exit=4``: its self-speculation, left after layer 4). To add one, write a class
with the methods of `Peer` and put a function that makes it into `PEERS`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from hasten.bench import llama_cpp_peers
from hasten.bench.stats import Answer
from hasten.errors import ModelError, OptionError
from hasten.targets.base import TargetInfo
from hasten.targets.catalog import ModelSource, prepare


class Peer(Protocol):
    """One way of decoding greedily in another library."""

    name: str
    """Of its row: ``"peer:..."``."""

    def prepare(self) -> None:
        """Load what is needed; called once, before anything is timed."""
        ...

    def run(self, ids: Sequence[int], max_new_tokens: int) -> Answer:
        """Answer the prompt `ids`, timed as `hasten.bench.stats.Answer` says.

        Ends after an end-of-sequence id (which is part of the answer) or `max_new_tokens`.
        """
        ...


@dataclass(frozen=True, slots=True)
class PeerContext:
    """What peers are made for: the target's facts and where its weights came from.

    option  what followed ``=`` in the peer's name, if anything
    shared  what peers of one run share, by a name of theirs
    """

    info: TargetInfo
    source: ModelSource
    option: str = ""
    shared: dict[str, Any] = field(default_factory=dict)


# -- transformers ----------------------------------------------------------------------------------


class _Stamps:
    """A streamer that notes when tokens came out, and how many; the prompt comes first."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        """Called by `generate` with the prompt, then after every pass with its new tokens."""
        self.times.append(time.perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        """Called by `generate` at the end."""


class _SharedModel:
    """The transformers model of a context's weights, loaded by whoever asks first."""

    def __init__(self, context: PeerContext) -> None:
        self.context = context
        self._model: Any = None

    def get(self) -> Any:
        """The model, ready to generate greedily with its own defaults otherwise."""
        if self._model is None:
            self._model = self._load()
        return self._model

    def _load(self) -> Any:
        import transformers as hf

        info, source = self.context.info, self.context.source
        if source.kind == "object":
            raise OptionError(
                "peers",
                "need a model given by name or path",
                "Save the loaded model to a folder first",
            )
        folder = prepare(source)
        try:
            with _no_bars():
                model: Any = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=info.dtype)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(
                f"transformers can't load {source.name} as a peer: {error}. Leave out --peers."
            ) from error
        # Penalties or temperatures of the checkpoint's generation config would change the answers.
        ends = sorted(info.eos_ids)
        config: Any = hf.GenerationConfig
        model.generation_config = config(
            do_sample=False, eos_token_id=ends or None, pad_token_id=ends[0] if ends else 0
        )
        return model.to(info.device).eval()


@contextmanager
def _no_bars() -> Iterator[None]:
    """Without transformers' own progress bars, which would break the caller's."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging  # its functions carry no types
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


class TransformersPeer:
    """``model.generate``, greedy, with `options` of its generation config."""

    def __init__(self, name: str, shared: _SharedModel, options: Mapping[str, Any]) -> None:
        self.name = name
        self._shared, self._options = shared, dict(options)

    def prepare(self) -> None:
        """Load the model (once for all peers that share it)."""
        self._shared.get()

    def run(self, ids: Sequence[int], max_new_tokens: int) -> Answer:
        """One call of `generate`; every pass is stamped by a streamer."""
        model = self._shared.get()
        prompt = torch.tensor([list(ids)], device=model.device)
        stamps = _Stamps()
        started = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=max_new_tokens,
                streamer=stamps,
                **self._options,
            )
        tokens = tuple(out[0, len(ids) :].tolist())
        times, counts = stamps.times[1:], stamps.counts[1:]
        return Answer(
            tokens=tokens,
            decode_tokens=sum(counts[1:]),
            decode_s=times[-1] - times[0],
            ttft_s=times[0] - started,
            passes=len(times) - 1,
        )


def _shared_model(context: PeerContext) -> _SharedModel:
    made: _SharedModel = context.shared.setdefault("transformers", _SharedModel(context))
    return made


def _transformers(context: PeerContext) -> list[Peer]:
    shared = _shared_model(context)
    lookup = {"prompt_lookup_num_tokens": 10}
    return [
        TransformersPeer("peer:transformers", shared, {}),
        TransformersPeer("peer:transformers-prompt-lookup", shared, lookup),
    ]


class EarlyExitPeer(TransformersPeer):
    """Self-speculation as transformers has it, with its defaults: the first `layer` layers and the
    model's own norm and head draft, with a cache of their own, and verification runs all layers.

    It needs a model that was trained for it (LayerSkip) to gain anything.
    """

    def __init__(self, name: str, shared: _SharedModel, layer: int) -> None:
        super().__init__(name, shared, {"assistant_early_exit": layer})

    def prepare(self) -> None:
        """Load the model and try it once. Raises ModelError when transformers can't exit it
        early."""
        super().prepare()
        try:
            self.run([0, 1], 2)
        except (
            AttributeError,
            IndexError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise ModelError(
                f"transformers can't exit this model early ({error}). Leave out {self.name}"
            ) from error


def _transformers_early_exit(context: PeerContext) -> list[Peer]:
    layers, text = context.info.num_layers, context.option
    try:
        layer = int(text) if text else max(layers // 4, 1)
    except ValueError:
        layer = 0
    if not 1 <= layer < layers:
        raise OptionError(
            "peers",
            f"transformers-early-exit={text}: there is no such exit in {context.info.name}",
            f"Name a layer from 1 to {layers - 1}, or none for a quarter of them",
        )
    name = f"peer:transformers-early-exit{f'={layer}' if text else ''}"
    return [EarlyExitPeer(name, _shared_model(context), layer)]


# -- registry --------------------------------------------------------------------------------------

PEERS: dict[str, Callable[[PeerContext], list[Peer]]] = {
    "transformers": _transformers,
    "transformers-early-exit": _transformers_early_exit,
    "llama-cpp": llama_cpp_peers.make,
}
"""What ``--peers`` may name, and the peers each name stands for."""

WITH_OPTION = {"transformers-early-exit"}
"""Names that may be given as ``NAME=OPTION``."""


def check_peers(names: Sequence[str]) -> None:
    """Raise OptionError for a name that isn't in `PEERS`, an option it doesn't take, or a library
    that isn't installed."""
    for text in names:
        name, equals, _ = text.partition("=")
        if name not in PEERS:
            raise OptionError("peers", f"unknown peer {name!r}", f"Known: {', '.join(PEERS)}")
        if equals and name not in WITH_OPTION:
            raise OptionError("peers", f"{name} takes no option, got {text!r}")
        if name == "llama-cpp":
            llama_cpp_peers.package()


def make_peers(names: Sequence[str], context: PeerContext) -> list[Peer]:
    """The peers that `names` stand for; nothing is loaded yet. Raises OptionError."""
    check_peers(names)
    made = []
    for text in dict.fromkeys(names):
        name, _, option = text.partition("=")
        made += PEERS[name](replace(context, option=option))
    return made
