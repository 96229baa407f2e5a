"""The public surface: ``hasten.load(...) -> LLM``, and what an LLM can do."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from inspect import signature
from typing import Any

from hasten import methods
from hasten.asking import as_ids, merge
from hasten.decode import decode
from hasten.decoding import Decoding
from hasten.errors import CapabilityError, ContextError, OptionError
from hasten.streams import AsyncStream, Request, Stream
from hasten.targets.base import Target
from hasten.targets.load import Loaded, load_target
from hasten.targets.load_options import Kernels
from hasten.text import TextStream
from hasten.turns import TurnLock
from hasten.types import Result, SamplingParams
from hasten.verify import Verifier, pick_verifier
from hasten.worker import Worker

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages (``{"role": ..., "content": ...}``)."""

logger = logging.getLogger(__name__)

DEFAULT_METHOD = "auto"


def load(
    model: Any = None,
    *,
    method: str | methods.MethodSpec | None = None,
    tokenizer: Any = None,
    dtype: Any = None,
    device: str | None = None,
    engine: str = "auto",
    **options: Any,
) -> LLM:
    """Load a model and make it fast.

    model      None (the embedded SmolLM2-135M-Instruct), an alias, a Hugging Face id, a folder, a
               ``.gguf`` file, a loaded transformers model (with `tokenizer`), or a pair of both
    method     how to draft: a name with options (``"prompt-lookup,nodes=12"``), see ``hasten
               methods``; default: ``auto``, which is plain decoding where the model can't be
               accelerated, which is logged. The first use of ``auto`` on a model measures what
               passes cost on this machine (about two seconds)
    dtype      ``"float32"``, ``"bfloat16"``, ``"float16"`` or a torch dtype; default: the
               checkpoint's own (float32 for the embedded model)
    device     ``"cpu"``, ``"cuda"``, ...; default: CUDA when there is one
    engine     ``"auto"``, ``"fused"`` (hasten's fast decoder) or ``"transformers"``
    options    passed on to `hasten.targets.load.load_target` (``revision``, ``trust_remote_code``,
               ``device_map``, ``attn_implementation``, ``quantize``, ``kernels``, ``kv_dtype``,
               ``exact``)

    Raises ModelError, OptionError or CapabilityError, before any pass.
    """
    spec = methods.parse(method or DEFAULT_METHOD)
    known = signature(load_target).parameters
    for name in options:
        if name not in known:
            raise OptionError(name, "no such option of load", f"Options: {', '.join(known)}")
    loaded = load_target(
        model, tokenizer=tokenizer, dtype=dtype, device=device, engine=engine, **options
    )
    return LLM(loaded, method=spec)


class LLM:
    """A loaded model with a default method. Requests from several threads take turns."""

    def __init__(
        self, loaded: Loaded, *, method: str | methods.MethodSpec = DEFAULT_METHOD
    ) -> None:
        self._loaded = loaded
        self.target: Target = loaded.target
        self.tokenizer = loaded.tokenizer
        self._lock = TurnLock()
        self._worker: Worker | None = None
        self._worker_made = threading.Lock()
        self._prepared: dict[methods.MethodSpec, methods.RequestMaker] = {}
        self._models: dict[str, Loaded] = {}
        self._kept: tuple[list[int], Any] | None = None
        self.method = methods.parse(method)
        self.prepare(self.method)

    # -- one prompt ------------------------------------------------------------------------------

    def generate(self, prompt: Prompt, **options: Any) -> Result:
        """Answer one prompt.

        prompt     text (put into the chat template where the tokenizer has one), ids, or messages
        method     another method than the LLM's, for this request
        verify     ``"greedy"``, ``"match"`` or ``"rejection"``; default greedy at temperature 0,
                   else match
        template   False: text goes in as it is
        system     a system message put before a text prompt
        params     a `SamplingParams`; or its fields as keywords (``max_new_tokens=100,
                   temperature=0.7``)
        trace      keep the rounds in ``result.rounds``
        rule       with ``cospec``: a `hasten.arbitration.rules.Rule` instead of the method's
        """
        return self.stream(prompt, **options).finish()

    def stream(self, prompt: Prompt, **options: Any) -> Stream:
        """Answer one prompt piece by piece: iterate for text; ``.result`` is there at the end.

        Options as in `generate`. The first piece comes after the prompt has run; nothing runs
        before the first `next`. Dropping the iterator ends the request.
        """
        return Stream(self, self._request(prompt, **options))

    def chat(self, messages: Sequence[Mapping[str, str]], **options: Any) -> Result:
        """Answer a conversation. The cache of the last conversation is kept, so the next turn runs
        only what is new (`forget` frees it); options as in `generate`."""
        return self.chat_stream(messages, **options).finish()

    def chat_stream(self, messages: Sequence[Mapping[str, str]], **options: Any) -> Stream:
        """`chat`, piece by piece."""
        return Stream(self, self._request(messages, **options).kept())

    def forget(self) -> None:
        """Free the cache kept for the next turn of a conversation, and what methods with
        ``scope=session`` learned from this model's requests."""
        with self._lock:
            self._drop_kept()
            for maker in self._prepared.values():
                maker.reset("session")

    def _drop_kept(self) -> None:
        if self._kept is not None:
            self.target.close(self._kept[1])
            self._kept = None

    def reset_state(self, method: str | methods.MethodSpec | None = None) -> None:
        """Empty everything that requests of `method` (None: of every method used so far) share:
        learned text of any scope, and counts of how often drafts were kept. Requests start cold."""
        with self._lock:
            specs = list(self._prepared) if method is None else [self.prepare(method)]
            for spec in specs:
                self._prepared[spec].reset()

    # -- from an event loop ----------------------------------------------------------------------

    def astream(self, prompt: Prompt, **options: Any) -> AsyncStream:
        """`stream` for ``async for``: the loop never waits, and requests under way share passes.

        Options as in `generate`; they are checked here. Nothing runs before the first piece is
        asked for; dropping the stream, or cancelling the task, ends the request.
        """
        return AsyncStream(self._request(prompt, **options), self._shared_worker())

    async def agenerate(self, prompt: Prompt, **options: Any) -> Result:
        """`generate` for ``await``; requests under way share passes."""
        return await self.astream(prompt, **options).finish()

    def _shared_worker(self) -> Worker:
        with self._worker_made:
            if self._worker is None:
                self._worker = Worker(self, waiting=1_000_000, cache_tokens=0)
            return self._worker

    # -- many prompts ----------------------------------------------------------------------------

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        *,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[Result]:
        """Answer several prompts together; answer i is that of prompt i alone.

        `params` may be one for all or one for each. Without a seed each request draws its own, so
        ``[prompt] * n`` gives n different sampled answers; the prompt runs, and is held, once.
        Passes are shared where the target packs sequences, else requests take turns.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise OptionError("prompts", f"must be a list, got {prompts!r}", "Or use generate")
        each: list[SamplingParams | None]
        if params is None or isinstance(params, SamplingParams):
            each = [params] * len(prompts)
        else:
            each = list(params)
        if len(each) != len(prompts):
            raise OptionError(
                "params",
                f"{len(each)} given for {len(prompts)} prompts",
                "Give one, or one for each",
            )
        requests = [
            self._request(p, params=s, **options) for p, s in zip(prompts, each, strict=True)
        ]
        self._answer(requests)
        return [r.result() for r in requests]

    def _answer(self, requests: Sequence[Request]) -> None:
        """Run requests of one method together to their end."""
        with self._lock, ExitStack() as opened:
            self._share_prompts(requests, opened)
            for index, made in decode([r.decoding for r in requests]):
                requests[index].take(made)

    def _share_prompts(self, requests: Sequence[Request], opened: ExitStack) -> None:
        """Run a prompt given several times only once: each of its requests continues a fork, and
        is lent what was read of the prompt's rows. `opened` closes the sequences.
        """
        if not self.target.capabilities.fork or self.target.info.whole_prompt:
            return
        groups: dict[tuple[int, ...], list[Decoding]] = {}
        for request in requests:
            if request.decoding.finish is None and isinstance(request.decoding, Decoding):
                groups.setdefault(tuple(request.ids), []).append(request.decoding)
        for ids, group in groups.items():
            if len(group) == 1 or len(ids) == 1:
                continue
            base = self.target.open()
            opened.callback(self.target.close, base)
            # All requests have the same method, so their drafters want the same.
            _, signals = group[0].read(base, ids[:-1])
            for decoding in group:
                fork = self.target.open(base)
                opened.callback(self.target.close, fork)
                decoding.lend(fork, signals)

    # -- methods and tokens ----------------------------------------------------------------------

    def prepare(self, method: str | methods.MethodSpec) -> methods.MethodSpec:
        """Check a method against the model and load what it needs, once. Raises OptionError,
        CapabilityError, VocabularyError or ModelError."""
        spec = methods.parse(method)
        with self._lock:  # preparing may run passes
            if spec not in self._prepared:
                context = methods.MethodContext(self.target, self.tokenizer, self._load_other)
                self._prepared[spec] = methods.prepare(spec, context)
        return spec

    def _load_other(self, name: str) -> tuple[Target, Any]:
        """Another model for a drafter: the target's dtype, device and kernels, loaded once."""
        if name not in self._models:
            info = self.target.info
            kernels: Kernels = "torch" if info.kernels == "torch" else "auto"
            self._models[name] = load_target(
                name, dtype=info.dtype, device=str(info.device), kernels=kernels
            )
        loaded = self._models[name]
        return loaded.target, loaded.tokenizer

    def tokenize(
        self, prompt: Prompt, *, template: bool = True, system: str | None = None
    ) -> list[int]:
        """Ids of a prompt as `generate` runs them."""
        ids = as_ids(prompt)
        if ids is not None:
            if system is not None:
                raise OptionError(
                    "system", "can't be put before token ids", "Give text or messages"
                )
            return ids
        if self.tokenizer is None:
            raise OptionError(
                "prompt",
                "is text, and the model came without a tokenizer",
                "Pass tokenizer=, or token ids",
            )
        if isinstance(prompt, str):
            if not prompt:
                raise ContextError("prompt: is empty. Give some text or token ids")
            if not (template and getattr(self.tokenizer, "chat_template", None)):
                if system is not None:
                    raise OptionError(
                        "system", "needs a chat template", "Leave it out, or put it into the prompt"
                    )
                return self._encode(prompt, special=True)
            prompt = [{"role": "user", "content": prompt}]
        elif not template:
            raise OptionError("template", "messages can't go in without it", "Give text or ids")
        messages: list[Any] = list(prompt)
        if system is not None:
            messages = [{"role": "system", "content": system}, *messages]
        return self._apply_template(messages)

    def _apply_template(self, messages: Sequence[Any]) -> list[int]:
        if not getattr(self.tokenizer, "chat_template", None):
            raise OptionError(
                "prompt",
                "holds messages, and the tokenizer has no chat template",
                "Give text instead",
            )
        for message in messages:
            if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
                raise OptionError("messages", f"each needs a role and a content, got {message!r}")
            if message["content"] is None:
                raise OptionError("messages", f"a content is None in {message!r}", "Give text")
        try:
            text = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # whatever the model's own template raises
            raise OptionError("messages", f"the chat template refuses them: {error}") from error
        return self._encode(text, special=False)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        try:
            return list(self.tokenizer(text, add_special_tokens=special)["input_ids"])
        except (TypeError, UnicodeError) as error:
            raise OptionError("prompt", f"isn't text the tokenizer takes: {error}") from error

    # -- requests --------------------------------------------------------------------------------

    def _request(
        self,
        prompt: Prompt,
        *,
        method: str | methods.MethodSpec | None = None,
        verify: str | None = None,
        params: SamplingParams | None = None,
        template: bool = True,
        system: str | None = None,
        trace: bool = False,
        rule: Any = None,
        **options: Any,
    ) -> Request:
        """Check everything and build the request; nothing has run yet."""
        params = merge(params, options)
        spec = self.method if method is None else self.prepare(method)
        verifier: Verifier | None = None
        kind = methods.get(spec.name)
        if not (kind.population or kind.arbitrates):
            _, verifier = pick_verifier(verify, greedy=params.is_greedy)
        methods.check_verify(kind, verify)
        if rule is not None and not kind.arbitrates:
            raise OptionError("rule", f"plays no part in {spec.name}", "It is for cospec")
        ids = self.tokenize(prompt, template=template, system=system)
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        text = (
            TextStream(self.tokenizer, params.stop, params.min_new_tokens)
            if self.tokenizer is not None
            else None
        )
        maker = self._prepared[spec]
        if isinstance(maker, methods.ArbitratedMaker):
            *drafting, verifier = maker.arrange(rule)
        else:
            drafting = list(maker())
        return Request(self, ids, params, seed, str(spec), drafting, verifier, text, trace)

    def _borrow(self, ids: Sequence[int]) -> Any:
        """The kept sequence cut to its common prefix with `ids`; None when it is of no use."""
        if self._kept is None:
            return None
        held, sequence = self._kept
        common = next(
            (i for i, (a, b) in enumerate(zip(held, ids, strict=False)) if a != b),
            min(len(held), len(ids)),
        )
        common = min(common, len(ids) - 1)
        if common < 1 or (common < sequence.length and not self.target.capabilities.rollback):
            self._drop_kept()
            return None
        self._kept = None
        try:
            if common < sequence.length:
                self.target.truncate(sequence, common)
        except CapabilityError:  # a window that has slid can't be cut back: start anew
            self.target.close(sequence)
            return None
        return sequence

    def _keep(self, ids: Sequence[int], sequence: Any) -> None:
        """Hold a finished request's sequence for the next turn."""
        self._drop_kept()
        self._kept = (list(ids[: sequence.length]), sequence)
