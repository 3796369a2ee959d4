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
        about = _first_comment(shipped_recipes()[name])
        table.add_row(name, recipe.rule.name, str(recipe.train.epochs), str(recipe.train.batch_size), about)
    Console(highlight=False).print(table)


def _first_comment(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    return next((line.lstrip("# ").strip() for line in lines if line.startswith("#") and line.strip("# ")), "")
