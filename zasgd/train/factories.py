"""Names in a recipe to callables: shipped ones by their name, a user's own by "package.module:factory".

Decides where a name is looked up and says so in one line when nothing is there. Never hides an error of the
user's own code: what a factory raises passes through.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zasgd.train.recipe import RecipeError


def resolve(key: str, name: str, shipped: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The callable that the recipe's `key` names. Raises RecipeError if there is none."""
    module_name, colon, attribute = name.partition(":")
    if not colon:
        if name not in shipped:
            known = ", ".join(shipped)
            raise RecipeError(f'{key} is "{name}", but should be one of {known}, or "package.module:factory"')
        return shipped[name]
    found = getattr(_module(key, name, module_name), attribute, None)
    if not callable(found):
        raise RecipeError(f'{key} is "{name}", but module {module_name} has no callable {attribute}')
    return found


def call(key: str, factory: Callable[..., Any], args: Mapping[str, Any]) -> Any:
    """`factory(**args)`. Raises RecipeError naming `key`.args where they do not fit its signature."""
    try:
        inspect.signature(factory).bind(**args)
    except TypeError as e:
        name = getattr(factory, "__qualname__", repr(factory))
        raise RecipeError(f"{key}.args: {name}(): {e}") from None
    return factory(**args)


def _module(key: str, name: str, module_name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does; a console script's path begins elsewhere
    try:
        return importlib.import_module(module_name)
    except ImportError as e:
        raise RecipeError(f'{key} is "{name}", but it cannot be imported from {here}: {e}') from e
