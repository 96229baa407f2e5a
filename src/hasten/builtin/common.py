"""What the options of several methods have in common: checks, budgets, scopes, start rows."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from hasten import phrases, start_rows
from hasten.dflash import store
from hasten.errors import OptionError
from hasten.methods import MethodContext, Shared
from hasten.policies import cost
from hasten.policies.base import FixedPolicy, Policy
from hasten.policies.budget import BudgetPolicy
from hasten.policies.cost_model import CostModel, affordable_rows
from hasten.targets.base import Target

SCOPES = ("request", "session", "global")

SHARED_ROWS = 32_768
"""Successor rows that a shared state holds at most: about 13 MB."""

_GLOBAL: OrderedDict[tuple[Any, ...], Shared] = OrderedDict()
_GLOBAL_LOCK = threading.Lock()
_GLOBAL_STATES = 8
"""Process-wide states held at most; the one asked for longest ago goes."""


NODES = "rows per pass, the root included; 0: the budget policy chooses each round"
MOST = "most rows the budget policy considers; 0: by what rows cost on this machine"
SCOPE = "who shares what is learned: request (nobody), session (this model), global (process)"
PHRASES = "draft what the model often says after the last two or three tokens (ours)"
START = "draft for tokens not seen yet by start rows, where the model has some (ours)"


def opt(default: Any, help: str) -> Any:
    """A field of an options class, with its help text."""
    return field(default=default, metadata={"help": help})


def need(option: str, ok: bool, rule: str, value: Any) -> None:
    """Raise OptionError naming `option` unless `ok`."""
    if not ok:
        raise OptionError(option, f"must be {rule}, got {value!r}")


def shared_state(
    name: str,
    scope: str,
    shape: tuple[Any, ...],
    context: MethodContext,
    make: Callable[[], Shared],
) -> dict[str, Shared]:
    """The state that requests share in this scope, by kind; states of another `shape` are apart."""
    if scope not in SCOPES:
        raise OptionError(
            f"{name}.scope", f"unknown scope {scope!r}", f"Choose one of {', '.join(SCOPES)}"
        )
    if scope == "request":
        return {}
    if scope == "session":
        return {scope: make()}
    info = context.target.info
    key = (name, info.fingerprint or info.name, *shape)
    with _GLOBAL_LOCK:
        if key not in _GLOBAL:
            _GLOBAL[key] = make()
        state = _GLOBAL[key]
        _GLOBAL.move_to_end(key)
        while len(_GLOBAL) > _GLOBAL_STATES:
            _GLOBAL.popitem(last=False)
    return {scope: state}


def start_for(wanted: bool, context: MethodContext) -> Any:
    """The target's start rows, where it has some and they are wanted."""
    return start_rows.load(context.target.info) if wanted else None


def phrases_for(wanted: bool, context: MethodContext) -> phrases.Phrases | None:
    """The target's phrases, where it has some and they are wanted."""
    return phrases.load(context.target.info) if wanted else None


def learned(shared: Mapping[str, Any]) -> Any:
    """What was learned by other requests; None where each has its own."""
    return shared.get("session", shared.get("global"))


class Policies:
    """Makes each request's policy: the fixed budget asked for (`nodes` > 0), or the budget policy
    on this machine's costs.

    most      rows that are considered at most, the root included
    stretch   consider so many times the rows that are cheap: for methods whose long copies may be
              so sure that dear rows pay
    """

    def __init__(
        self, name: str, nodes: int, most: int, context: MethodContext, *, stretch: int = 1
    ) -> None:
        need(f"{name}.nodes", nodes >= 0, "at least 1 (or 0 for the budget policy)", nodes)
        need(f"{name}.most", most >= 0, "at least 1 (or 0 for what is cheap here)", most)
        self.most = self._fixed = nodes
        if not nodes:
            table = context.costs or cost.load_or_measure(context.target)
            self._costs = CostModel(table)
            self.most = most or min(stretch * affordable_rows(table), cost.ROWS[-1])

    def __call__(self, shared: Mapping[str, Any]) -> Policy:
        """The policy of one request; `shared` holds the method's acceptance counts."""
        if self._fixed:
            return FixedPolicy(nodes=self._fixed)
        return BudgetPolicy(self._costs, shared["counts"], most=self.most)


def drafter_folder(target: Target, model: str, kind: str, name: str, method: str) -> Path:
    """The folder of a trained drafter: the one that the option `model` of `method` names, or the
    one shipped for the target. `kind` is that of the assets and of ``hasten train``, `name` what
    people call it. Raises OptionError when there is none."""
    folder = Path(model).expanduser() if model else store.shipped(target.info, kind)
    if folder is None:
        raise OptionError(
            f"{method}.model",
            f"no {name} drafter is shipped for {target.info.name}",
            f"Train one (`hasten train {kind}`) or download one made for this model, and name its "
            "folder: model=FOLDER",
        )
    if not folder.is_dir():
        problem = f"there is no folder {str(folder)!r}"
        raise OptionError(f"{method}.model", problem, "Name the drafter's folder")
    return folder
