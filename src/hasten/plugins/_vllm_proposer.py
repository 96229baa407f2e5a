"""The proposer that vLLM makes in its workers. See `hasten.plugins.vllm`."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hasten.plugins._vllm_options import VARIABLE, Options, StepCosts, read_options
from hasten.plugins._vllm_requests import Array, Entry, Requests
from hasten.plugins._vllm_step import LogitsReader, Step, watch
from hasten.plugins.session import EngineFacts, prepare

logger = logging.getLogger(__name__)

CPU_ROW_COST, GPU_ROW_COST = 0.1, 0.02
"""What a row more costs, as a share of a pass for one request, where nobody says."""

MOST_COMPLAINTS = 32


class Proposer:
    """vLLM's ``custom_class`` proposer. Subclass it to give other defaults in code::

        class MyProposer(hasten.plugins.vllm.Proposer):
            defaults = hasten.plugins.vllm.Options(method="suffix")

    Raises OptionError or CapabilityError for what ``HASTEN_VLLM`` says; the engine then doesn't
    start. Once it has started, nothing that a drafter does reaches the engine.
    """

    defaults = Options()

    def __init__(self, vllm_config: Any) -> None:
        options = read_options(os.environ.get(VARIABLE, ""), self.defaults)
        self._options = options
        self._most = int(vllm_config.speculative_config.num_speculative_tokens)
        self._max_requests = int(vllm_config.scheduler_config.max_num_seqs)
        self._costs = StepCosts(options.row_cost or _row_cost(vllm_config))
        self._facts = _facts(vllm_config, topk=watch(Proposer) and options.logits)
        self._step: Step | None = None
        self._said: set[str] = set()
        self._begin()

    def _begin(self) -> None:
        source = prepare(
            self._options.method,
            self._facts,
            most=self._most,
            costs=self._costs,
            window=self._options.window,
        )
        self._reader = LogitsReader(source.topk) if source.topk else None
        self.requests = Requests(source, self._max_requests)
        logger.info("hasten drafts with %s, %d tokens at most", source.spec, self._most)

    def load_model(self, target_module: Any, *args: Any, **kwargs: Any) -> None:
        """Called once with the target; its logits are read where the method wants them."""
        if self._reader is not None and not self._reader.attach(target_module):
            self._facts = replace(self._facts, topk=False)
            self._begin()

    def see(self, step: Step | None) -> None:
        """What the runner knows of the step whose drafts are asked for next."""
        self._step = step

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Sequence[int] | Array,
        token_ids_cpu: Array,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """For each row the tokens to try next; [] to try none. Never raises.

        sampled_token_ids   per row what was just committed; empty while a prompt is being read
        num_tokens_no_spec  per row the number of tokens, these included
        token_ids_cpu       ``(rows, max_model_len)`` integers: each row's tokens
        slot_mappings       vLLM's, for proposers that run a model
        """
        step, self._step = self._step, None
        out: list[list[int]] = [[] for _ in sampled_token_ids]
        try:
            self._costs.arrive(len(out))
            self.requests.turn()
            if step is not None and len(step.keys) != len(out):
                step = None
            topk = self._topk(step, len(out))
            for row, sampled in enumerate(sampled_token_ids):
                if sampled:
                    context = token_ids_cpu[row, : int(num_tokens_no_spec[row])]
                    entry = self.requests.find(context, None if step is None else step.keys[row])
                    most = self._most if step is None else min(self._most, step.most)
                    out[row] = self._row(entry, context, len(sampled), topk[row], most, len(out))
            self.requests.retire(None if step is None else step.alive)
            self._costs.leave()
        except Exception as error:  # the engine would die of it
            self._say("hasten", error)
        return out

    def _row(
        self,
        entry: Entry,
        context: Array,
        new: int,
        topk_ids: torch.Tensor | None,
        most: int,
        waiting: int,
    ) -> list[int]:
        """What to try in one row; a drafter that fails drafts no more in this request."""
        try:
            entry.catch_up(context, new, topk_ids, waiting)
            if entry.session is None:
                return []
            # No more than `most`, and room for a token of vLLM's: it dies of a longer draft.
            return list(entry.session.propose(most).tree.tokens[1:])
        except Exception as error:
            self._say("a drafter of hasten", error)
            entry.close()
            return []

    def _topk(self, step: Step | None, rows: int) -> list[torch.Tensor | None]:
        """Per row the largest logits of what was verified."""
        nothing: list[torch.Tensor | None] = [None] * rows
        if self._reader is None or step is None or len(step.drafts) != rows:
            return nothing
        sizes = [1 + drafts for drafts in step.drafts]
        topk = self._reader.take(sum(sizes))
        return nothing if topk is None else list(torch.split(topk, sizes))

    def _say(self, who: str, error: Exception) -> None:
        """Log a failure, each once: it may come again every step."""
        said = f"{who} failed, and the engine goes on without: {type(error).__name__}: {error}"
        if said not in self._said and len(self._said) < MOST_COMPLAINTS:
            self._said.add(said)
            logger.warning("%s", said, exc_info=error)


def _row_cost(vllm_config: Any) -> float:
    device = getattr(getattr(vllm_config, "device_config", None), "device_type", "")
    return CPU_ROW_COST if device == "cpu" else GPU_ROW_COST


def _facts(vllm_config: Any, *, topk: bool) -> EngineFacts:
    model = vllm_config.model_config
    return EngineFacts(
        name="vLLM",
        vocab_size=int(model.get_vocab_size()),
        context_limit=int(model.max_model_len),
        eos_ids=_eos_ids(model),
        topk=topk,
    )


def _eos_ids(model: Any) -> frozenset[int]:
    """Ids that end an answer by the model's configuration: drafting beyond them is only waste."""
    found = getattr(getattr(model, "hf_text_config", None), "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)
