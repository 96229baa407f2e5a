"""Every error hasten raises on purpose; each message says what to do.

HastenError
|-- OptionError          an option is unknown, out of range, or contradicts another
|-- ModelError           a model can't be found, read, fetched or recognised
|-- CapabilityError      the target can't do what the method needs (cache, mask, layers)
|-- VocabularyError      two models don't speak the same token ids
|-- ContextError         the prompt leaves no room in the context
|-- OverloadError        too many requests wait already
|-- DrafterError         a drafter broke its contract or raised
    `-- CacheStateError      a sequence of a target was used against its contract
"""

from __future__ import annotations


class HastenError(Exception):
    """Root of all errors raised by hasten on purpose."""


class OptionError(HastenError, ValueError):
    """An option is unknown, out of range or contradicts another one.

    `option` names it as the user wrote it (``"temperature"``, ``"racer.nodes"``).
    """

    def __init__(self, option: str, problem: str, hint: str = "") -> None:
        self.option = option
        super().__init__(f"{option}: {problem}" + (f". {hint}" if hint else ""))


class ModelError(HastenError):
    """A model can't be found, read, fetched or recognised."""


class CapabilityError(HastenError):
    """The target can't do what the method needs; raised before the first pass."""


class VocabularyError(HastenError, ValueError):
    """Two models that must share token ids don't."""


class ContextError(HastenError, ValueError):
    """The prompt is empty or leaves no room in the target's context."""


class OverloadError(HastenError):
    """Too many requests wait already: nothing of this one was done."""


class DrafterError(HastenError):
    """A drafter broke its contract (bad ids, duplicate siblings, too many nodes) or raised."""


class CacheStateError(HastenError, RuntimeError):
    """A sequence was used against its contract: a fault of hasten or its caller, not bad input."""
