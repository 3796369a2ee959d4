"""The shipped recipes: listed, shown, validated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import dropwhile, takewhile
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zasgd.app.serve import as_json
from zasgd.train.recipe import load_recipe, shipped_recipes

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


def recipes(source: str | None, overrides: list[str], *, json_output: bool) -> None:
    """Print the list, or one recipe with every default filled in. Raises RecipeError for an invalid one."""
    if source is not None:
        recipe = load_recipe(source, overrides)
        print(recipe.to_json() if json_output else recipe.to_toml().rstrip())
        return
    if json_output:
        found = {name: load_recipe(name) for name in shipped_recipes()}
        print(as_json({name: {"rule": r.rule.name, "epochs": r.train.epochs} for name, r in found.items()}))
        return
    Console(highlight=False).print(listing(shipped_recipes()))


def listing(files: Mapping[str, Path]) -> Table:
    """A row per recipe: its name, its main numbers, and the sentence it opens with. Raises RecipeError."""
    table = Table("recipe", "rule", "epochs", "batch", "what it is")
    for name, path in files.items():
        recipe = load_recipe(str(path))
        cells = (name, recipe.rule.name, str(recipe.train.epochs), str(recipe.train.batch_size), _about(path))
        table.add_row(*map(Text, cells))  # a str would be read as markup
    return table


def _about(path: Path) -> str:
    """The first sentence of the comment paragraph after a recipe's launch line."""
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    comments = [line.strip("# ") for line in takewhile(lambda line: line.startswith("#"), lines)]
    told = dropwhile(lambda text: not text or text.startswith("zasgd "), comments)
    return _SENTENCE_END.split(" ".join(takewhile(bool, told)), maxsplit=1)[0]
