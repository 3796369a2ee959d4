"""The shipped recipes: listed, shown, validated."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from zasgd.app.serve import as_json
from zasgd.train.recipe import load_recipe, shipped_recipes


def recipes(source: str | None, overrides: list[str], *, json_output: bool) -> None:
    """Print the list, or one recipe with every default filled in. Raises RecipeError for an invalid one."""
    if source is not None:
        recipe = load_recipe(source, overrides)
        print(recipe.to_json() if json_output else recipe.to_toml().rstrip())
        return
    found = {name: load_recipe(name) for name in shipped_recipes()}
    if json_output:
        print(as_json({name: {"rule": r.rule.name, "epochs": r.train.epochs} for name, r in found.items()}))
        return
    table = Table("recipe", "rule", "epochs", "batch", "what it is")
    for name, recipe in found.items():
        epochs, batch_size = str(recipe.train.epochs), str(recipe.train.batch_size)
        table.add_row(name, recipe.rule.name, epochs, batch_size, _about(shipped_recipes()[name]))
    Console(highlight=False).print(table)


def _about(path: Path) -> str:
    """A recipe's first comment after its launch line."""
    comments = [line.strip("# \n") for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    return next((text for text in comments if text and not text.startswith("zasgd ")), "")
