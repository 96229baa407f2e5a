"""A stand-in of vLLM's V1 engine as a custom proposer sees it.

It batches, reads prompts in parts, condenses and reorders its rows, preempts, drops drafts near the
limit, verifies greedily and keeps the books: what breaks vLLM (a draft that is too long, a list too
few, an exception) fails here. Its target is a function of the prefix (`fake_texts`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from tests.plugins.fake_texts import VOCAB, NextToken

MAX_LEN = 256


def config(most: int = 6, max_len: int = MAX_LEN, max_seqs: int = 8, device: str = "cpu") -> Any:
    """A VllmConfig, as far as a proposer reads it."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=most),
        model_config=SimpleNamespace(
            max_model_len=max_len,
            get_vocab_size=lambda: VOCAB,
            hf_text_config=SimpleNamespace(eos_token_id=VOCAB - 1),
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=max_seqs),
        device_config=SimpleNamespace(device_type=device),
    )


class Target:
    """The target module: its logits are one-hot, and their neighbours a little less likely."""

    def compute_logits(self, choices: Sequence[int]) -> torch.Tensor:
        logits = torch.zeros(len(choices), VOCAB)
        for row, choice in enumerate(choices):
            for place in range(8):
                logits[row, (choice + place) % VOCAB] = 9.0 - place
        return logits


def runner_module() -> ModuleType:
    """A module like vLLM's, with a fresh class in it: the plug-in wraps the class."""

    class GPUModelRunner(Runner):
        def propose_draft_token_ids(
            self,
            scheduler_output: Any,
            sampled_token_ids: list[list[int]],
            sampling_metadata: Any,
            hidden_states: Any,
            sample_hidden_states: Any,
            aux_hidden_states: Any,
            spec_decode_metadata: Any,
            common_attn_metadata: Any,
            slot_mappings: Any,
        ) -> list[list[int]]:
            return self.drafter.propose(
                sampled_token_ids,
                self.input_batch.num_tokens_no_spec,
                self.input_batch.token_ids_cpu,
                slot_mappings=slot_mappings,
            )

    module = ModuleType("gpu_model_runner")
    module.GPUModelRunner = GPUModelRunner  # type: ignore[attr-defined]
    return module


@dataclass
class Request:
    """A request in the engine."""

    key: str
    prompt: list[int]
    count: int
    answer: list[int] = field(default_factory=list)
    read: int = 0
    """Tokens that have been run."""
    draft: list[int] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *self.answer]

    @property
    def done(self) -> bool:
        return len(self.answer) >= self.count or len(self.ids) >= MAX_LEN


class Runner:
    """The worker's side: the batch's rows, and the proposer."""

    def __init__(self, drafter: Any, target: Target, max_seqs: int) -> None:
        self.drafter, self.target = drafter, target
        self.requests: dict[str, Request] = {}
        self.input_batch = SimpleNamespace(
            req_ids=[],
            num_tokens_no_spec=np.zeros(max_seqs, dtype=np.int32),
            token_ids_cpu=np.zeros((max_seqs, MAX_LEN), dtype=np.int32),
        )


class Engine:
    """Serves requests with drafts of `drafter`, whose runner is `runner` (None: a plain one).

    part      most tokens of a prompt read in a step
    shuffle   put the rows in another order each step
    dynamic   most drafts scheduled, step by step, in turn; None: as many as the proposer may
    """

    def __init__(
        self,
        drafter: Any,
        after: NextToken,
        *,
        module: ModuleType | None = None,
        most: int = 6,
        max_seqs: int = 8,
        part: int = 64,
        shuffle: bool = False,
        dynamic: Sequence[int] | None = None,
    ) -> None:
        self.after, self.most, self.max_seqs, self.part = after, most, max_seqs, part
        self.target = Target()
        drafter.load_model(self.target)
        kind = (module or runner_module()).GPUModelRunner
        self.runner = kind(drafter, self.target, max_seqs)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.finished: dict[str, list[int]] = {}
        self.random = random.Random(1) if shuffle else None
        self.dynamic = dynamic
        self.steps = self.drafted = self.accepted = self.passes = 0
        self.lengths: list[int] = []

    def add(self, key: str, prompt: Sequence[int], count: int) -> None:
        """A new request."""
        self.waiting.append(Request(key, list(prompt), count))

    def preempt(self, key: str) -> None:
        """Take a request out of the batch; it is read again later."""
        request = next(r for r in self.running if r.key == key)
        self.running.remove(request)
        request.read, request.draft = 0, []
        self.waiting.append(request)

    def abort(self, key: str) -> None:
        """The client has gone."""
        self.running = [r for r in self.running if r.key != key]
        self.runner.requests.pop(key, None)

    def run(self, steps: int = 10_000) -> dict[str, list[int]]:
        """Steps until all is answered, `steps` at most; the answers so far."""
        while (self.waiting or self.running) and steps:
            self.step()
            steps -= 1
        return self.finished

    def step(self) -> None:
        """One step: schedule, run, verify, ask for drafts."""
        self.steps += 1
        for request in [r for r in self.running if r.done]:
            self.running.remove(request)
            del self.runner.requests[request.key]
            self.finished[request.key] = request.answer[: request.count]
        while self.waiting and len(self.running) < self.max_seqs:
            request = self.waiting.pop(0)
            self.running.append(request)
            self.runner.requests[request.key] = request
        if not self.running:
            return
        if self.random is not None:
            self.random.shuffle(self.running)
        sampled = [self._verify(request) for request in self.running]
        self._draft(sampled)

    def _verify(self, request: Request) -> list[int]:
        """Run a row: part of a prompt, or the pending token and its draft."""
        ids = request.ids
        if request.read < len(ids) - 1:
            request.read = min(request.read + self.part, len(ids))
            request.scheduled = []  # type: ignore[attr-defined]
            if request.read < len(ids):
                return []
        else:
            self.passes += 1
            request.scheduled = list(request.draft)  # type: ignore[attr-defined]
        draft: list[int] = request.scheduled  # type: ignore[attr-defined]
        request.before = ids  # type: ignore[attr-defined]
        new: list[int] = []
        for token in [*draft, None]:
            new.append(self.after([*ids, *new]))
            if token != new[-1]:
                break
        self.drafted += len(draft)
        self.accepted += len(new) - 1
        request.answer += new
        request.read = len(request.ids) - 1
        return new

    def _choices(self, request: Request, sampled: list[int]) -> list[int]:
        """What the target finds best at each row of a request."""
        if not sampled:
            return [0]
        ids, draft = request.before, request.scheduled  # type: ignore[attr-defined]
        return [self.after([*ids, *draft[:at]]) for at in range(len(draft) + 1)]

    def _draft(self, sampled: list[list[int]]) -> None:
        batch = self.runner.input_batch
        batch.req_ids = [request.key for request in self.running]
        choices: list[int] = []
        for row, request in enumerate(self.running):
            ids = request.ids
            batch.num_tokens_no_spec[row] = len(ids)
            batch.token_ids_cpu[row] = 0
            batch.token_ids_cpu[row, : len(ids[:MAX_LEN])] = ids[:MAX_LEN]
            choices += self._choices(request, sampled[row])
        self.target.compute_logits(choices)
        longest = max(len(request.ids) for request in self.running)
        if longest + self.most > MAX_LEN:  # vLLM asks for no drafts at all then
            for request in self.running:
                request.draft = []
            return
        counts = [
            len(request.scheduled)  # type: ignore[attr-defined]
            for request in self.running
        ]
        most = self.dynamic[self.steps % len(self.dynamic)] if self.dynamic else self.most
        drafts = self.runner.propose_draft_token_ids(
            SimpleNamespace(num_spec_tokens_to_schedule=most),
            sampled,
            None,
            None,
            None,
            None,
            SimpleNamespace(num_draft_tokens=counts) if any(counts) else None,
            None,
            {},
        )
        assert type(drafts) is list
        assert len(drafts) == len(self.running)
        for request, new, draft in zip(self.running, sampled, drafts, strict=True):
            assert len(draft) <= most, "vLLM dies of a draft that is too long"
            assert all(type(token) is int and 0 <= token < VOCAB for token in draft)
            assert len(request.ids) + len(draft) < MAX_LEN
            assert new or not draft, "a prompt that isn't read yet has no drafts"
            self.lengths.append(len(draft))
            request.draft = draft


Make = Callable[..., Any]
