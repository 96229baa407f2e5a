"""All families of tasks, by name."""

from __future__ import annotations

from hasten.tasks import arithmetic, calendar, lookups, texts
from hasten.tasks.base import Family

FAMILIES: dict[str, Family] = {
    family.name: family
    for module in (arithmetic, calendar, texts, lookups)
    for family in module.FAMILIES
}
