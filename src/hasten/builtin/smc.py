"""`smc`: options and how it is put together."""

from __future__ import annotations

from hasten.methods import Method, MethodContext, RequestMaker
from hasten.smc.options import SMCOptions, prepare


def _smc(options: SMCOptions, context: MethodContext) -> RequestMaker:
    make = prepare(options, context)
    return RequestMaker(lambda shared: (make(), options))


METHODS = (
    Method(
        name="smc",
        summary="SMC-SD: a population of drafted answers, weighed by the model and resampled",
        prepare=_smc,
        options=SMCOptions,
        requires=("rollback", "fork"),
        needs="a draft with probabilities: exit modules or a draft model; temperature above 0",
        lossless="no (bounded)",
        population=True,
    ),
)
