"""Recipes: what loads, what travels, and that every mistake is answered by one line that helps."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from zasgd.core.rules import RULES, GroupSpec, RuleSpec
from zasgd.train.recipe import (
    DECAYED,
    FROZEN,
    NO_DECAY,
    SHIPPED_DATA,
    SHIPPED_LOSSES,
    SHIPPED_MODELS,
    Recipe,
    RecipeError,
    RuleTable,
    _known_keys,
    load_recipe,
    shipped_recipes,
)

MINIMAL = """
model = "mlp"
data = "digits"
optimizer = { lr = 0.1 }
train = { epochs = 2, batch_size = 8 }
"""


@pytest.fixture
def write(tmp_path):
    """Writes a recipe file and returns its path."""

    def written(name: str, text: str) -> str:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return written


def refusal(source: str, *overrides: str) -> str:
    """The one line with which a recipe is refused."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(source, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- what loads ----------------------------------------------------------------------------------------


def test_shipped_recipes_load_by_name_with_dash_or_underscore():
    assert {"digits", "fashion_mnist"} <= shipped_recipes().keys()
    assert load_recipe("fashion-mnist") == load_recipe("fashion_mnist")
    assert load_recipe("digits").name == "digits"


def test_a_text_is_short_for_a_table_with_that_factory(write):
    recipe = load_recipe(write("mine.toml", MINIMAL))
    assert (recipe.name, recipe.model.factory, recipe.data.factory) == ("mine", "mlp", "digits")


def test_a_base_is_looked_for_beside_the_file_and_merged_table_by_table(write, tmp_path):
    write("base.toml", MINIMAL)
    (tmp_path / "deeper").mkdir()
    child = write("deeper/child.toml", 'base = "../base.toml"\n[train]\nepochs = 7\n')
    recipe = load_recipe(child)
    assert (recipe.train.epochs, recipe.train.batch_size, recipe.name) == (7, 8, "child")


def test_a_base_can_be_a_shipped_recipe(write):
    recipe = load_recipe(write("mine.toml", 'base = "digits"\n[run]\nworkers = 5\n'))
    assert recipe.run.workers == 5
    assert recipe.model == load_recipe("digits").model


def test_a_file_that_begins_with_a_byte_order_mark_is_read(write):
    assert load_recipe(write("mine.toml", "\ufeff" + MINIMAL)).train.epochs == 2


def test_overrides_win_and_are_read_as_toml_else_as_text():
    recipe = load_recipe(
        "digits",
        ["train.epochs=3", "optimizer.lr=1e-2", "rule.name=asgd", "model.args.hidden=[8]", 'train.loss="mse"'],
    )
    assert (recipe.train.epochs, recipe.optimizer.lr, recipe.rule.name) == (3, 0.01, "asgd")
    assert (recipe.model.args["hidden"], recipe.train.loss) == ([8], "mse")


def test_naming_another_factory_drops_the_arguments_of_the_old_one():
    assert load_recipe("digits", ["model=mine:net"]).model.args == {}
    assert load_recipe("digits", ["model.factory=mine:net", "model.args.depth=3"]).model.args == {"depth": 3}
    assert load_recipe("digits", ["model=mlp"]).model.args == load_recipe("digits").model.args


# ---- what travels ----------------------------------------------------------------------------------------


def test_json_and_toml_give_back_an_equal_recipe(write):
    awkward = 'model.args={ path = "C:\\\\x \\u007f \\"é\\"", sizes = [[1, 2], []], rate = 1e-7, on = true }'
    rule = ["rule.lam=0.5", "rule.name=dc-asgd-c+da", "rule.lag_policy=block", "rule.max_lag=3", "rule.guard=true"]
    recipe = load_recipe("digits", [awkward, *rule, "optimizer.eps=1e-7", "train.seed=9007199254740993"])
    assert Recipe.from_json(recipe.to_json()) == recipe
    assert load_recipe(write("resolved.toml", recipe.to_toml())) == recipe


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"train": 3}', "\x00"])
def test_a_recipe_that_did_not_come_from_a_recipe_is_refused(text):
    with pytest.raises(RecipeError, match="the recipe from the broker"):
        Recipe.from_json(text)


def test_the_core_gets_its_own_types():
    recipe = load_recipe("digits", ["optimizer.momentum=0.9", "optimizer.nesterov=true", "rule.lam=1.5"])
    assert recipe.rule_spec() == RuleSpec("dc-asgd-a", 1.5, 0.95)
    staged = load_recipe("digits", ["rule.name=asgd", "rule.compensate=constant", "rule.lam=1", "rule.max_lag=7"])
    assert staged.rule_spec() == RuleSpec("asgd", 1.0, compensate="constant", max_lag=7)
    schedule = recipe.schedule_spec()
    assert (schedule.lr, schedule.epochs, schedule.kind) == (recipe.optimizer.lr, recipe.train.epochs, "step")
    groups = recipe.group_specs()
    assert (groups[DECAYED].momentum, groups[DECAYED].nesterov) == (0.9, True)
    assert groups[DECAYED].weight_decay == recipe.optimizer.weight_decay > 0
    assert (groups[NO_DECAY].momentum, groups[NO_DECAY].weight_decay) == (0.9, 0.0)
    assert (groups[FROZEN].lr_scale, groups[FROZEN].weight_decay) == (0.0, 0.0)


def test_a_rule_has_the_keys_and_defaults_of_the_cores_and_absent_ones_are_as_the_name_says():
    assert list(RuleTable.model_fields) == [f.name for f in fields(RuleSpec)]
    assert {k: f.default for k, f in RuleTable.model_fields.items()} == {f.name: f.default for f in fields(RuleSpec)}
    for name in (*RULES, "dana+ga", "dc-asgd-a+da"):
        momentum = 0.9 if "dana" in name else 0.0
        recipe = load_recipe("digits", [f'rule={{name = "{name}"}}', "rule.lam=0.25", f"optimizer.momentum={momentum}"])
        assert recipe.rule_spec() == RuleSpec(name, 0.25)


def test_adamw_has_its_constants_in_both_trained_groups_and_a_frozen_parameter_nothing():
    adamw = ["optimizer.algorithm=adamw", "optimizer.beta1=0.8", "optimizer.beta2=0.99", "optimizer.eps=1e-6"]
    groups = load_recipe("digits", adamw).group_specs()
    expected = GroupSpec(weight_decay=1e-4, algorithm="adamw", beta1=0.8, beta2=0.99, eps=1e-6)
    assert groups == (expected, replace(expected, weight_decay=0.0), GroupSpec(lr_scale=0.0))


DOCUMENTED = Path(__file__).parents[2] / "docs" / "recipes.md"


def documented() -> dict[str, str]:
    """Key -> what its row says of the default, of all tables in docs/recipes.md; `a.b`, `.c` in one row are two."""
    found = {}
    for keys, default in re.findall(r"^\| (`.*?) \| (.*?) *\|", DOCUMENTED.read_text(encoding="utf-8"), re.MULTILINE):
        names = re.findall(r"`([^`]*)`", keys)
        table = names[0].partition(".")[0]
        found |= {table + name if name.startswith(".") else name: default.strip("`") for name in names}
    return found


def test_every_key_is_documented():
    assert documented().keys() == {key for key in _known_keys() if "." in key}


@pytest.mark.parametrize("table", ["rule", "optimizer"])
def test_the_documented_defaults_are_those_of_the_schema(table):
    said = documented()
    for name, field in Recipe.model_fields[table].annotation.model_fields.items():
        default = "required" if field.is_required() else json.dumps(field.default).strip('"')
        assert said[f"{table}.{name}"] == default.replace("null", "as the name says"), name


# ---- what is refused, and how ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.epocs=3", "unknown key train.epocs; the nearest is train.epochs"),
        ("trian.epochs=3", "unknown key trian; the nearest is train"),
        ("train.lr=3", "unknown key train.lr; the nearest is optimizer.lr"),
        ("epochs=3", "unknown key epochs; the nearest is train.epochs"),
        ("train.epochs=many", 'train.epochs is "many", but should be a valid integer'),
        ("train.epochs=2.5", "train.epochs is 2.5, but should be a valid integer"),
        ('train.epochs="3"', 'train.epochs is "3", but should be a valid integer'),
        ("train.epochs=true", "train.epochs is true, but should be a valid integer"),
        ("train.epochs=0", "train.epochs is 0, but should be greater than or equal to 1"),
        ("train.epochs=99999999999999999999999", "but should be less than or equal to 1000000000"),
        ("train.batch_size=0", "train.batch_size is 0"),
        ("train.batch_size=2147483649", "train.batch_size is 2147483649"),
        ("train.seed=9223372036854775808", "train.seed is 9223372036854775808"),
        ("train=3", "train is 3, but should be a table"),
        ("model=5", 'model is 5, but should be a table, or a text: a shipped name or "package.module:factory"'),
        ("data=[1]", 'data is [1], but should be a table, or a text: a shipped name or "package.module:factory"'),
        ("model=foo", 'model.factory is "foo", but should be one of mlp, small-cnn, resnet8, or "package.module:'),
        ("model=mpl", "did you mean mlp?"),
        ("data=fashion_mnist", "did you mean fashion-mnist?"),
        ("train.loss=cross-entropy", "did you mean cross_entropy?"),
        ("optimizer.lr=0", "optimizer.lr is 0, but should be greater than 0"),
        ("optimizer.lr=inf", "but should be a finite number"),
        ("optimizer.lr=nan", "but should be a finite number"),
        ("optimizer.lr=1e39", "optimizer.lr is 1e+39"),
        ("optimizer.clip_norm=1e39", "optimizer.clip_norm is 1e+39"),
        ("optimizer.momentum=1", "optimizer.momentum is 1"),
        ("optimizer.nesterov=true", "nesterov needs a momentum above 0"),
        ("optimizer.weight_decay=1e39", "optimizer.weight_decay is 1e+39"),
        ("optimizer.algorithm=adam", "did you mean adamw?"),
        ("optimizer.bata1=0.9", "unknown key optimizer.bata1; the nearest is optimizer.beta1"),
        ("optimizer.beta2=1", "optimizer.beta2 is 1"),
        ("optimizer.eps=0", "optimizer.eps is 0, but should be at least 1e-30"),
        ("rule.name=dan", "or several of them joined by +; did you mean dana?"),
        ("rule.name=dana+gaa", "did you mean ga?"),
        ("rule.name=dana+dana", "should join rules that go together: dana does not go together with what stands"),
        ("rule.name=easgd+ga", "ga does not go together with what stands before it"),
        ("rule.push_evry=3", "unknown key rule.push_evry; the nearest is rule.push_every"),
        ("rule.push_every=0", "rule.push_every is 0, but should be greater than or equal to 1"),
        ("rule.gap_aware=1", "rule.gap_aware is 1, but should be a valid boolean"),
        ("rule.mode=synch", "should be one of async, sync, buffer; did you mean sync?"),
        ("rule.lag_policy=wait", "rule.lag_policy is \"wait\", but should be one of drop, damp, block"),
        ("rule.delay_share=1.5", "rule.delay_share is 1.5"),
        ("rule.mode=buffer", "rule: mode buffer needs quorum"),
        ("rule.name=dana-slim+ga", "rule: look_ahead on the worker pushes momentum"),
        ("rule.name=dana", "rule: dana looks ahead by momentum: set optimizer.momentum above 0"),
        ("rule.name=dc-asgd", "rule.name is \"dc-asgd\", but should be one of asgd, dc-asgd-c, dc-asgd-a"),
        ("rule.lam=-1", "rule.lam is -1"),
        ("schedule.milestones=[0.7, 0.5]", "should be rising fractions of the run"),
        ("schedule.milestones=[30]", "should be rising fractions of the run"),
        ("schedule.milestones=[]", 'kind = "step" and milestones need each other'),
        ("schedule.kind=cosine", 'kind = "step" and milestones need each other'),
        ("model.factory=mine:", "should be a shipped name or"),
        ("model.args.when=1979-05-27", "should hold only texts, finite numbers"),
        ("model.args.x=[nan]", "should hold only texts, finite numbers"),
        ("model.args.x=0x8000000000000000", "should hold only integers of 64 bits"),
        ("run.workers=0", "run.workers is 0"),
        ("run.workers=65537", "run.workers is 65537"),
        ("run.servers=1025", "run.servers is 1025"),
        ("run.evaluate_every=1000000001", "run.evaluate_every is 1000000001"),
        ("run.window_bytes=1099511627777", "run.window_bytes is 1099511627777"),
        ("run.lease_s=1e300", "run.lease_s is 1e+300"),
        ("run.min_step_s=1e300", "run.min_step_s is 1e+300"),
        ("schedule.warmup_epochs=1e300", "schedule.warmup_epochs is 1e+300"),
        ("base=digits", "a base can only be named inside a file"),
        ("train.epochs", "should look like table.key=value"),
        ("=3", "should look like table.key=value"),
    ],
)  # fmt: skip
def test_a_wrong_override_is_named_with_its_path_and_what_is_wanted(override, words):
    said = refusal("digits", override)
    assert said.startswith(f"--set {override}: ")
    assert words in said


def test_what_does_not_combine_is_blamed_on_whoever_spoke_last_of_rule_or_optimizer(write):
    nesterov = "optimizer={momentum = 0.9, nesterov = true}"
    said = refusal("digits", "rule.name=dana+ga", nesterov, "train.epochs=3")
    assert said == (f"--set {nesterov}: rule: dana+ga implies Nesterov's look-ahead: set optimizer.nesterov to false")
    adamw = write("mine.toml", 'base = "digits"\nrule.name = "ga"\noptimizer.algorithm = "adamw"\n')
    assert refusal(adamw).startswith(f"{adamw}: rule: gap-aware measures the gap in steps of SGD")
    slow = write("slow.toml", MINIMAL + 'rule = { name = "easgd" }\n')
    assert refusal(slow, "rule.scale=delay") == (
        "--set rule.scale=delay: rule: easgd pushes what local steps led to, not a gradient: leave out scale"
    )


def test_a_number_of_thousands_of_digits_is_refused_wherever_it_stands(write):
    path = write("mine.toml", MINIMAL.replace("epochs = 2", f"epochs = {'9' * 5000}"))
    assert refusal(path).startswith(f"{path}: not TOML: ")
    assert "train.epochs is too long a number" in refusal("digits", f"train.epochs=0x{'f' * 5000}")
    assert "but should be a valid integer" in refusal("digits", f"train.epochs={'9' * 5000}")


def test_the_shipped_names_are_those_of_the_shipped_factories():
    from zasgd.train.datasets import DATASETS
    from zasgd.train.models import MODELS
    from zasgd.train.trainer import LOSSES

    assert (tuple(MODELS), tuple(DATASETS), tuple(LOSSES)) == (SHIPPED_MODELS, SHIPPED_DATA, SHIPPED_LOSSES)


def test_the_file_that_holds_the_mistake_is_named_not_the_one_that_includes_it(write):
    base = write("base.toml", MINIMAL.replace("epochs", "epocs"))
    child = write("child.toml", 'base = "base.toml"\n')
    assert refusal(child).startswith(f"{base}: unknown key train.epocs; the nearest is train.epochs")


def test_what_is_missing_is_named(write):
    path = write("mine.toml", MINIMAL.replace("epochs = 2, ", ""))
    assert refusal(path) == f"{path}: train.epochs is missing"


def test_bases_in_a_circle_are_refused(write):
    first = write("first.toml", 'base = "second.toml"\n')
    write("second.toml", 'base = "first.toml"\n')
    assert "go round in a circle" in refusal(first)
    assert "go round in a circle" in refusal(write("own.toml", 'base = "own.toml"\n'))


def test_files_that_cannot_be_read_are_named(write, tmp_path):
    assert refusal("nowhere.toml") == "nowhere.toml: no such recipe file"
    assert refusal("some/where") == "some/where: no such recipe file"
    syntax = write("syntax.toml", "[train]\nepochs = = 3\n")
    assert refusal(syntax).startswith(f"{syntax}: not TOML: ")
    assert "line 2" in refusal(syntax)
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b"# \xe9\n")
    assert refusal(str(latin)) == f"{latin}: not TOML: it is not UTF-8 text"


def test_a_base_that_cannot_be_found_is_named_with_the_file_that_wants_it(write, tmp_path):
    lost = write("lost.toml", 'base = "nowhere.toml"\n')
    assert refusal(lost) == f"{lost}: base: {tmp_path / 'nowhere.toml'}: no such recipe file"
    three = write("three.toml", "base = 3\n")
    assert refusal(three) == f"{three}: base is 3, but should be a recipe's name or path"


def test_a_name_that_is_nearly_right_is_suggested():
    assert "did you mean digits?" in refusal("digist")
    assert "shipped are digits, digits_dana, digits_nag, fashion_dana, fashion_mnist, fashion_resnet8" in refusal("zzz")


def test_reading_a_recipe_imports_no_torch():
    code = "import sys; from zasgd.train.recipe import load_recipe; load_recipe('digits').to_json(); "
    code += "sys.exit('torch' in sys.modules or 'zmq' in sys.modules or 'numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, cwd=Path("/")).returncode == 0
