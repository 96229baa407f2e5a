"""llama.cpp as a peer, through llama-cpp-python (extra: ``llama-cpp``), on the very same GGUF file.

Needs that package, which is built from C++ source where it is installed: about ten minutes. Three
rows: llama.cpp's fastest way (raw decode calls), the package's generator, and that with its prompt
lookup. The file's own 4-bit weights are run, so answers may differ from plain decoding's: such
differences are counted as unexplained.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hasten.bench.stats import Answer
from hasten.environment import usable_cores
from hasten.errors import ModelError, OptionError
from hasten.targets.catalog import source_gguf

if TYPE_CHECKING:
    from hasten.bench.peers import Peer, PeerContext

logger = logging.getLogger(__name__)

TRIALS = 16
"""Decode calls of one token that a thread count is timed by."""


def package() -> Any:
    """The module ``llama_cpp``. Raises OptionError, saying how to install it, where it is missing
    or its library doesn't load."""
    try:
        return import_module("llama_cpp")
    except (ImportError, OSError, RuntimeError) as error:
        raise OptionError(
            "peers",
            f"llama-cpp needs llama-cpp-python, which can't be imported ({error})",
            "Install it: pip install 'hasten[llama-cpp]' (builds llama.cpp, about ten minutes)",
        ) from error


def make(context: PeerContext) -> list[Peer]:
    """The three peers; nothing is loaded yet."""
    return [
        RawPeer("peer:llama-cpp", context),
        GeneratorPeer("peer:llama-cpp-python", context),
        LookupPeer("peer:llama-cpp-prompt-lookup", context),
    ]


class GeneratorPeer:
    """``Llama.generate``, greedy, with an empty cache and the thread count that is fastest here."""

    def __init__(self, name: str, context: PeerContext) -> None:
        self.name = name
        self._info, self._source, self._shared = context.info, context.source, context.shared
        self._llama: Any = None
        self._passes = 0

    def prepare(self) -> None:
        """Load the model. Raises OptionError where it comes from no GGUF file."""
        if self._source.kind not in ("embedded", "gguf"):
            raise OptionError(
                "peers",
                "llama-cpp reads GGUF files only",
                "Use the embedded model or a .gguf file",
            )
        threads = torch.get_num_threads()
        try:
            self._llama = package().Llama(
                model_path=str(source_gguf(self._source.location)),
                n_ctx=self._info.context_limit,
                n_threads=threads,
                n_threads_batch=threads,
                n_gpu_layers=-1 if self._info.device.type == "cuda" else 0,
                draft_model=self._draft_model(),
                # With a draft the package writes logits of every token, into room for one batch's
                # unless told.
                logits_all=self._draft_model() is not None,
                verbose=False,
            )
        except (ValueError, RuntimeError) as error:
            raise ModelError(
                f"llama.cpp can't load {self._source.name}: {error}. Leave out this peer."
            ) from error
        self._set_threads()
        self._count_passes()

    def _set_threads(self) -> None:
        """Use as many threads as decode one token fastest; tried once for all peers of a run."""
        lib, context = package(), self._llama.ctx
        best = self._shared.get("llama-cpp threads")
        if best is None:
            counts = _thread_counts()
            times = {count: self._decode_s(count) for count in counts}
            best = self._shared["llama-cpp threads"] = min(counts, key=times.__getitem__)
            tried = ", ".join(f"{count}: {1e3 * times[count]:.1f} ms" for count in counts)
            logger.info("llama.cpp decodes a token fastest with %d threads (%s)", best, tried)
        lib.llama_set_n_threads(context, best, best)

    def _decode_s(self, threads: int) -> float:
        """Median seconds of a decode call of one token."""
        lib, context = package(), self._llama.ctx
        lib.llama_set_n_threads(context, threads, threads)
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        seconds = []
        for _ in range(TRIALS):
            started = time.perf_counter()
            self._decode([0])
            seconds.append(time.perf_counter() - started)
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        return statistics.median(seconds)

    def _decode(self, part: Sequence[int]) -> None:
        """One raw decode call."""
        lib = package()
        array = (lib.llama_token * len(part))(*part)
        code = lib.llama_decode(self._llama.ctx, lib.llama_batch_get_one(array, len(part)))
        if code != 0:
            raise ModelError(f"llama.cpp's decode call failed with code {code}")

    def _draft_model(self) -> Any:
        return None

    def _count_passes(self) -> None:
        """`generate` runs the model by this one method."""
        run = self._llama.eval

        def counted(tokens: Sequence[int]) -> None:
            self._passes += 1
            run(tokens)

        self._llama.eval = counted

    def _tokens(self, ids: Sequence[int]) -> Iterator[int]:
        """The answer's tokens, without an end."""
        self._llama.reset()  # else a common prefix with the last prompt is not run again
        made: Iterator[int] = self._llama.generate(list(ids), temp=0.0, repeat_penalty=1.0)
        return made

    def run(self, ids: Sequence[int], max_new_tokens: int) -> Answer:
        """Take tokens until the first end-of-sequence id, or `max_new_tokens` of them."""
        taken: list[int] = []
        started = first = last = time.perf_counter()
        before = self._passes
        for token in self._tokens(ids):
            last = time.perf_counter()
            if not taken:
                first, before = last, self._passes
            taken.append(int(token))
            if len(taken) >= max_new_tokens or taken[-1] in self._info.eos_ids:
                break
        return Answer(
            tokens=tuple(taken),
            decode_tokens=len(taken) - 1,
            decode_s=last - first,
            ttft_s=first - started,
            passes=self._passes - before,
        )


class LookupPeer(GeneratorPeer):
    """`GeneratorPeer` with the package's own prompt lookup, as it comes."""

    def _draft_model(self) -> Any:
        return import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding()


class RawPeer(GeneratorPeer):
    """llama.cpp's own decode call for each token, and the argmax of its logits."""

    def _tokens(self, ids: Sequence[int]) -> Iterator[int]:
        lib, llama = package(), self._llama
        context, vocabulary, most = llama.ctx, llama.n_vocab(), llama.n_batch
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        due = list(ids)
        while True:
            for start in range(0, len(due), most):
                self._decode(due[start : start + most])
            self._passes += 1
            logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, -1), (vocabulary,))
            due = [int(logits.argmax())]
            yield due[0]


def _thread_counts() -> list[int]:
    """Thread counts worth a try: powers of two, all cores, and torch's own."""
    cores = usable_cores()
    powers = {1 << bit for bit in range(cores.bit_length())}
    return sorted(count for count in {*powers, cores, torch.get_num_threads()} if count <= cores)
