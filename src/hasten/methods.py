"""Methods by name: ``NAME[:VARIANT][,key=value...]`` -> a drafter and a policy for each request.

A method is registered once with its options (a frozen dataclass: names, types, defaults, help),
what it needs of the target, and whether it is lossless. Third parties register through the entry
point group ``hasten.drafters``: each entry point names a `Method` (or a function that returns one).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import entry_points
from typing import Any, Protocol, get_type_hints

from hasten.errors import CapabilityError, OptionError
from hasten.policies.cost_model import CostTable
from hasten.targets.base import Capabilities, Target

logger = logging.getLogger(__name__)

ENTRY_POINTS = "hasten.drafters"

MakeRequest = Callable[[], tuple[Any, Any]]
"""Makes one request's drafter and policy (`hasten.drafters.base.Drafter`,
`hasten.policies.base.Policy`): they are never shared between requests."""


class Shared(Protocol):
    """Something a method's requests share; bounded, and emptied without a trace."""

    def reset(self) -> None:
        """Forget everything learned; requests under way go on from nothing."""
        ...

    def fork(self) -> Any:
        """A copy that shares nothing that changes."""
        ...


class RequestMaker:
    """A prepared method: called, it makes one request's drafter and policy.

    shared   what requests share, by kind: ``"counts"`` (how often drafts were kept; no text),
             ``"session"`` (learned from the requests of this loaded model), ``"global"`` (of all
             in the process)
    make     makes the pair from the mapping of what is shared
    """

    def __init__(
        self,
        make: Callable[[Mapping[str, Any]], tuple[Any, Any]],
        shared: Mapping[str, Shared] | None = None,
    ) -> None:
        self._make = make
        self._shared: dict[str, Shared] = dict(shared or {})

    def __call__(self) -> tuple[Any, Any]:
        """A new drafter and policy."""
        return self._make(self._shared)

    @property
    def shares(self) -> tuple[str, ...]:
        """Kinds of what the requests share."""
        return tuple(self._shared)

    def reset(self, *kinds: str) -> None:
        """Empty what is shared: these kinds, or all."""
        for kind, each in self._shared.items():
            if not kinds or kind in kinds:
                each.reset()

    def fork(self) -> RequestMaker:
        """The same method with copies of what is shared: neither notices the other."""
        return RequestMaker(self._make, {kind: each.fork() for kind, each in self._shared.items()})


def _no_pair(shared: Mapping[str, Any]) -> tuple[Any, Any]:
    """Whoever asks for a drafter and a policy alone would verify by the target's law, and quietly
    answer otherwise than the method."""
    raise OptionError(
        "method",
        "keeps a draft's tokens against the model by a rule, which can't be followed here",
        "Use hasten.load(...).generate, or another method",
    )


class ArbitratedMaker(RequestMaker):
    """A prepared method whose requests bring a verifier of their own, which may keep a draft's
    token against the target's (`hasten.arbitration`). Called, as other makers are, it raises
    OptionError.

    draft    identifies what drafts, as a fingerprint identifies weights
    arrange  makes a request's drafter, policy and verifier; the argument decides at mismatches
             instead of the rule of the method's options, where it isn't None
    """

    def __init__(self, draft: str, arrange: Callable[[Any], tuple[Any, Any, Any]]) -> None:
        super().__init__(_no_pair)
        self.draft, self._arrange = draft, arrange

    def arrange(self, rule: Any = None) -> tuple[Any, Any, Any]:
        """A new drafter, policy and verifier."""
        return self._arrange(rule)

    def fork(self) -> ArbitratedMaker:
        """Requests share nothing."""
        return self


@dataclass(frozen=True, slots=True)
class MethodContext:
    """What a method is prepared with, once per loaded model.

    load      loads another model (a name, folder or file) as a target: ``(target, tokenizer)``.
    costs     the target's cost table; None: the kept one, or measured when a method needs it.
    """

    target: Target
    tokenizer: Any
    load: Callable[[str], tuple[Target, Any]]
    costs: CostTable | None = None


@dataclass(frozen=True, slots=True)
class NoOptions:
    """A method without options."""


@dataclass(frozen=True, slots=True)
class Method:
    """A way to draft.

    prepare   ``(options, context) -> make`` does the heavy part (loading models) once; `make` is
              a `RequestMaker` where requests share something.
    requires  names of `Capabilities` fields without which the method is refused.
    needs     the same in words, for ``hasten methods``.
    lossless  ``"yes"``, or ``"no (...)"`` for the methods that say so.
    variants  named sets of options.
    trees     drafts may branch: on a target without tree masks they are cut to chains, which is
              said.
    population  answered by a population of particles (`hasten.smc`), not round by round with a
              verifier: `prepare` makes `(Proposal, SMCOptions)` pairs.
    arbitrates  its requests have a verifier of their own: `prepare` makes an `ArbitratedMaker`.
    """

    name: str
    summary: str
    prepare: Callable[[Any, MethodContext], MakeRequest]
    options: type = NoOptions
    requires: tuple[str, ...] = ("rollback",)
    needs: str = "nothing"
    lossless: str = "yes"
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    trees: bool = False
    population: bool = False
    arbitrates: bool = False


@dataclass(frozen=True, slots=True)
class MethodSpec:
    """A configured method; `options` are typed and checked. Made by `parse` or `configure`."""

    name: str
    variant: str = ""
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        head = f"{self.name}:{self.variant}" if self.variant else self.name
        return ",".join([head, *(f"{k}={_show(v)}" for k, v in self.options)])


_REGISTRY: dict[str, Method] = {}
_entry_points_read = False


def is_lossy(spec: MethodSpec) -> bool:
    """Whether the method may change what the model says."""
    return get(spec.name).lossless != "yes"


def register(method: Method) -> None:
    """Add a method. Raises OptionError when the name is taken."""
    if method.name in _REGISTRY:
        raise OptionError(
            "method",
            f"{method.name!r} is registered already",
            "Choose another name for the new one",
        )
    _REGISTRY[method.name] = method


def all_methods() -> dict[str, Method]:
    """Every method by name, those of installed plug-ins included."""
    from hasten.builtin import registry

    for method in registry.METHODS:
        _REGISTRY.setdefault(method.name, method)
    _read_entry_points()
    return dict(_REGISTRY)


def _read_entry_points() -> None:
    """Load plug-ins once; a broken one is reported and left out, so that it can't break the
    others."""
    global _entry_points_read
    if _entry_points_read:
        return
    _entry_points_read = True
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            loaded = entry.load()
            register(loaded if isinstance(loaded, Method) else loaded())
        except Exception as error:
            logger.warning("plug-in %s (%s) was not loaded: %s", entry.name, entry.value, error)


def get(name: str) -> Method:
    """The method called `name`. Raises OptionError naming the known ones."""
    known = all_methods()
    if name not in known:
        raise OptionError(
            "method",
            f"unknown method {name!r}",
            f"Known: {', '.join(known)} (see `hasten methods`)",
        )
    return known[name]


def configure(name: str, /, *, variant: str = "", **options: Any) -> MethodSpec:
    """A method with options given as Python values: ``configure("prompt-lookup", nodes=8)``."""
    method = get(name)
    if variant and variant not in method.variants:
        known = ", ".join(method.variants) or "none"
        raise OptionError(
            "method", f"{name!r} has no variant {variant!r}", f"Known variants: {known}"
        )
    hints = get_type_hints(method.options)
    typed = tuple((key, _typed(name, key, value, hints)) for key, value in options.items())
    return MethodSpec(name, variant, typed)


def parse(text: str | MethodSpec) -> MethodSpec:
    """``NAME[:VARIANT][,key=value...]`` as a `MethodSpec`. Raises OptionError."""
    if isinstance(text, MethodSpec):
        return text
    if not isinstance(text, str):
        raise OptionError("method", f"must be a name or a MethodSpec, got {type(text).__name__}")
    head, *pairs = [part.strip() for part in text.split(",")]
    name, _, variant = head.partition(":")
    options: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise OptionError("method", f"{pair!r} in {text!r} isn't key=value")
        if key.strip() in options:
            raise OptionError("method", f"option {key.strip()!r} is given twice in {text!r}")
        options[key.strip()] = value.strip()
    return configure(name.strip(), variant=variant.strip(), **options)


def split(text: str) -> list[str]:
    """Split ``"racer,nodes=24,ar"`` between names only: ``["racer,nodes=24", "ar"]``."""
    out: list[str] = []
    for part in (p.strip() for p in text.split(",")):
        if not part:
            continue
        if "=" in part and ":" not in part.partition("=")[0] and out:
            out[-1] += f",{part}"
        else:
            out.append(part)
    return out


def prepare(spec: MethodSpec, context: MethodContext) -> RequestMaker:
    """Check the target and do the heavy part. Raises CapabilityError before any pass."""
    method = get(spec.name)
    check_capabilities(method, context.target)
    values = {**method.variants.get(spec.variant, {}), **dict(spec.options)}
    make = method.prepare(method.options(**values), context)
    return make if isinstance(make, RequestMaker) else RequestMaker(lambda _: make())


def check_capabilities(method: Method, target: Target) -> None:
    """Refuse a method that the target can't carry; announce when trees become chains."""
    have: Capabilities = target.capabilities
    why = "; ".join(have.notes[:1]) or "see `hasten info MODEL`"
    for name in method.requires:
        if not getattr(have, name):
            raise CapabilityError(
                f"method {method.name!r} needs a target with {name.replace('_', ' ')}, which "
                f"{target.info.name} ({target.info.engine} engine) lacks: {why}. "
                "Use method 'ar', plain decoding"
            )
    if method.trees and have.rollback and not have.tree:
        logger.warning(
            "%s: %s drafts chains instead of trees. %s", target.info.name, method.name, why
        )


def check_verify(method: Method, verify: str | None) -> None:
    """Refuse a verifier's name beside a method that verifies in its own way. Raises OptionError."""
    if verify is not None and (method.population or method.arbitrates):
        why = "rejects nothing" if method.population else "has a rule of its own"
        raise OptionError("verify", f"plays no part in {method.name}, which {why}", "Leave it out")


_WORDS = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}


def _typed(name: str, key: str, value: Any, hints: Mapping[str, type]) -> Any:
    """`value` (text or Python) as the option's type. Raises OptionError naming ``name.key``."""
    if key not in hints:
        raise OptionError(
            f"{name}.{key}", "no such option", f"{name} takes {', '.join(hints) or 'no options'}"
        )
    want = hints[key]
    try:
        if want is bool:
            return value if isinstance(value, bool) else _WORDS[str(value).lower()]
        if want in (int, float) and isinstance(value, bool):
            raise ValueError("a switch, not a number")
        if want is int and isinstance(value, float) and not value.is_integer():
            raise ValueError("not whole")
        return want(value)
    except (KeyError, ValueError, TypeError):
        words = {bool: "on or off", int: "a whole number", float: "a number", str: "text"}.get(
            want, want.__name__
        )
        raise OptionError(f"{name}.{key}", f"must be {words}, got {value!r}") from None


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def option_help(method: Method) -> list[tuple[str, str, str]]:
    """For each option: name, default, help."""
    made = method.options()
    return [
        (f.name, _show(getattr(made, f.name)), f.metadata.get("help", ""))
        for f in fields(method.options)
    ]
