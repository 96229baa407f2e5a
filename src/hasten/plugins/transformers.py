"""hasten inside transformers: ``model.generate(**inputs, custom_generate=speculate("auto"))``.

`generate` prepares everything as for its own loops: the prompt, the logits processors, the stopping
criteria. hasten's loop then takes the place of the token-by-token one, and what comes back is what
`generate` gives. Neither torch nor transformers is imported before `speculate` is called.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hasten.errors import OptionError

if TYPE_CHECKING:
    import torch

    from hasten.methods import MethodSpec
    from hasten.metrics import Summary
    from hasten.plugins._hf_call import Call


def speculate(
    method: str | MethodSpec = "auto",
    *,
    streamer: Any = None,
    verify: str | None = None,
    seed: int | Sequence[int] | None = None,
    engine: str = "transformers",
    tokenizer: Any = None,
    **options: Any,
) -> Speculation:
    """What to give `generate` as ``custom_generate``; it may be used for many calls and models.

    method     how to draft, as everywhere in hasten: ``"auto"``, ``"racer,nodes=24"``
    streamer   hears of each token as soon as it is certain, and of the end, also after an error.
               One given to `generate` is found too
    verify     ``"greedy"``, ``"match"`` or ``"rejection"``; default: greedy, or match when sampling
    seed       of the draws: one number, or one for each row. None: one number is drawn from torch's
               global generator when sampling, so ``torch.manual_seed`` makes calls repeatable
    engine     ``"transformers"`` runs the model object itself. ``"fused"`` and ``"auto"`` (where it
               can) run hasten's own decoder on a copy of the weights: faster on a CPU, and twice
               the memory. A copy is made anew when the model has changed
    tokenizer  the model's; only ``draft-model`` looks at it, where vocabularies differ in size
    options    the method's options as Python values: ``speculate("racer", nodes=24)``

    Raises OptionError for options that don't exist. Sampling options belong to `generate`.
    """
    from hasten.plugins._hf_call import configured
    from hasten.targets.load_options import read_engine
    from hasten.verify import pick_verifier

    spec = configured(method, options)
    read_engine(engine)
    pick_verifier(verify, greedy=verify == "greedy")
    return Speculation(
        spec, streamer=streamer, verify=verify, seed=seed, engine=engine, tokenizer=tokenizer
    )


class Speculation:
    """A decoding loop for `generate`, made by `speculate`.

    statistics  of the last call: a `hasten.metrics.Summary` for each row (also in
                ``output.hasten`` where `generate` gives a dict)
    seeds       of the last call that sampled, one a row: with its seed a row can be repeated alone
    """

    def __init__(
        self,
        spec: MethodSpec,
        *,
        streamer: Any,
        verify: str | None,
        seed: int | Sequence[int] | None,
        engine: str,
        tokenizer: Any,
    ) -> None:
        self.method = spec
        self.statistics: list[Summary] = []
        self.seeds: tuple[int, ...] = ()
        self._streamer, self._verify, self._seed = streamer, verify, _checked_seed(seed)
        self._engine, self._tokenizer = engine, tokenizer

    def __repr__(self) -> str:
        return f"speculate({str(self.method)!r})"

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Sequence[Any],
        stopping_criteria: Sequence[Any],
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """Called by `generate`.

        Gives ids ``(rows, length)`` int64 on the device of `input_ids`, or a
        `GenerateDecoderOnlyOutput`. Raises OptionError, CapabilityError or ContextError before the
        first pass for what can't be done as plain `generate` does it.
        """
        from hasten.plugins import _hf_call

        given = _hf_call.given_to_generate(self, sys._getframe(1))
        if given is None:  # called by something in between: as documented, generate has it too
            given = _hf_call.Given(self._streamer)
        streamers = {id(s): s for s in (self._streamer, given.streamer) if s is not None}
        try:
            call = _hf_call.read_call(
                model,
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                model_kwargs,
                given,
            )
            if len(streamers) > 1:
                raise OptionError("streamer", "generate has another than speculate", "Give one")
            streamer = next(iter(streamers.values()), None)
            return self._run(model, call, streamer, tell_prompt=given.streamer is None)
        finally:
            for each in streamers.values():
                each.end()

    def _run(self, model: Any, call: Call, streamer: Any, *, tell_prompt: bool) -> Any:
        """Find or make what runs the model, and answer."""
        import torch

        from hasten.methods import get
        from hasten.plugins._hf_models import llm_for
        from hasten.plugins._hf_run import run, seeds_for
        from hasten.targets.base import check_prompt
        from hasten.verify import pick_verifier

        rows = len(call.rows)
        kind = get(self.method.name)
        if kind.population or kind.arbitrates:
            how = "answers by a population" if kind.population else "decides by a rule of its own"
            raise OptionError(
                "method",
                f"{self.method.name!r} {how}, not inside generate",
                "Use hasten.load(...).generate, or another method",
            )
        if streamer is not None and rows > 1:
            raise OptionError("streamer", "can't tell the rows of a batch apart", "Give one prompt")
        pick_verifier(self._verify, greedy=not call.sample)
        self.statistics = []
        llm = llm_for(model, self.method, engine=self._engine, tokenizer=self._tokenizer)
        for row in call.rows:
            check_prompt(llm.target, row.prompt)
        seeds: tuple[int, ...] = (0,) * rows
        if call.sample:
            self.seeds = seeds = seeds_for(self._row_seed(rows), rows)
        if streamer is not None and tell_prompt:
            streamer.put(call.ids.cpu())

        def put(token: int) -> None:
            streamer.put(torch.tensor([token]))

        output, self.statistics = run(
            call,
            llm,
            self.method,
            verify=self._verify,
            seeds=seeds,
            on_token=None if streamer is None else put,
        )
        return output

    def _row_seed(self, rows: int) -> int | Sequence[int]:
        """The seed given, or one drawn from torch's global generator: one draw a call."""
        import torch

        seed = self._seed
        if seed is None:
            return int(torch.randint(2**62, (), device="cpu"))
        if not isinstance(seed, int) and len(seed) != rows:
            raise OptionError("seed", f"{len(seed)} given for {rows} rows", "Give one, or one each")
        return seed


def _checked_seed(seed: Any) -> int | tuple[int, ...] | None:
    """The seed or seeds. Raises OptionError for what isn't a whole number."""
    each = seed if isinstance(seed, (list, tuple)) else () if seed is None else (seed,)
    for number in each:
        if not isinstance(number, int) or isinstance(number, bool):
            raise OptionError("seed", f"must be a whole number, or one for each row, got {seed!r}")
    return tuple(seed) if isinstance(seed, (list, tuple)) else seed
