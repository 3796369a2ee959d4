"""The list of recipes: what a recipe says of itself is shown as it is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from zasgd.app.catalogue import listing

TABLES = """
model = "mlp"
data = "digits"
optimizer = { lr = 0.1 }
train = { epochs = 2, batch_size = 8 }
"""


def shown(path: Path, width: int = 300) -> str:
    """The list of one recipe, as printed on a terminal of `width` columns."""
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(listing({path.stem: path}))
    return capture.get()


@pytest.mark.parametrize(
    ("comment", "told"),
    [
        ("# One line of 1.5 words, e.g. this one.\n# And a second.", "One line of 1.5 words, e.g. this one."),
        ("# A sentence that\n#   goes on, and ends\n# there. Another.", "A sentence that goes on, and ends there."),
        ("# No full stop\n#\n# Arithmetic: none.", "No full stop"),
        ("# Before the tables\n\n# Not about the recipe.", "Before the tables"),
        ("", ""),
    ],
)  # fmt: skip
def test_a_recipe_is_described_by_the_first_sentence_after_its_launch_line(
    tmp_path: Path, comment: str, told: str
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f"# zasgd train mine\n#\n{comment}\n{TABLES}", encoding="utf-8")
    row = next(line for line in shown(path).splitlines() if "mine" in line)
    assert row.split("│")[-2].strip() == told


def test_brackets_are_text_and_no_markup(tmp_path: Path) -> None:
    path = tmp_path / "mine[red].toml"
    path.write_text(f"# zasgd train mine\n#\n# Rates [bold] and [/nonsense].\n{TABLES}", encoding="utf-8")
    assert "mine[red]" in shown(path)
    assert "Rates [bold] and [/nonsense]." in shown(path)
