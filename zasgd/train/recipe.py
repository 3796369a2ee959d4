"""A recipe: everything that decides what a run computes, as a TOML file.

Decides which keys exist, what they may hold, and where a wrong one came from. Never imports torch or the
user's code: a broker reads recipes too.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

import zasgd
from zasgd.core.compression import Compression
from zasgd.core.rules import (
    ALGORITHMS,
    COMPENSATIONS,
    EXCHANGES,
    LAG_POLICIES,
    LOOK_AHEADS,
    MODES,
    RULES,
    SCALES,
    SHORT,
    GroupSpec,
    RuleError,
    RuleSpec,
    check,
    stages_of,
)
from zasgd.core.schedule import Schedule

DECAYED, NO_DECAY, FROZEN = 0, 1, 2
"""Positions in `Recipe.group_specs()`: the parameter groups that `zasgd.torch.flat` assigns."""

SHIPPED_MODELS = ("mlp", "small-cnn", "resnet8")
SHIPPED_DATA = ("digits", "fashion-mnist")
SHIPPED_LOSSES = ("cross_entropy", "mse")
"""The names that need no module; what they stand for is known only where torch may be imported."""

_INT64_MAX = (1 << 63) - 1
_FLOAT32_MAX = 3.4e38
_LEAST_EPS = 1e-30
_MOST_EPOCHS = 10**9  # of 2**32 samples each, their count still fits 63 bits
_LONGEST_S = 10**6


class RecipeError(ValueError):
    """A recipe that cannot be used; the text is one line: where, what, and what is wanted instead."""


# ---- the schema ------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """Accept what TOML and JSON can both hold."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, int) and abs(value) > _INT64_MAX:
        raise ValueError("should hold only integers of 64 bits, as TOML does")
    if not isinstance(value, (str, int, float)) or value in (float("inf"), float("-inf")) or value != value:
        raise ValueError("should hold only texts, finite numbers, booleans, lists and tables")
    return value


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _rising_fractions(value: tuple[float, ...]) -> tuple[float, ...]:
    if any(not 0 < m < 1 for m in value) or list(value) != sorted(set(value)):
        raise ValueError("should be rising fractions of the run between 0 and 1, such as [0.5, 0.75]")
    return value


def _factory(value: str) -> str:
    module, colon, name = value.partition(":")
    if not value or (colon and not (module and name)):
        raise ValueError('should be a shipped name or "package.module:factory"')
    return value


def _near(value: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(value, list(known), 1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def _one_of(shipped: tuple[str, ...]) -> AfterValidator:
    """A shipped name, or a factory of the user's own, which only a process with torch looks up."""

    def known(value: str) -> str:
        if ":" in _factory(value) or value in shipped:
            return value
        raise ValueError(f'should be one of {", ".join(shipped)}, or "package.module:factory"{_near(value, shipped)}')

    return AfterValidator(known)


def _choice(known: tuple[str, ...]) -> AfterValidator:
    def chosen(value: str) -> str:
        if value in known:
            return value
        raise ValueError(f"should be one of {', '.join(known)}{_near(value, known)}")

    return AfterValidator(chosen)


def _rule(value: str) -> str:
    for part in value.split("+"):
        if SHORT.get(part, part) not in RULES:
            near = _near(part, [*RULES, *SHORT])
            raise ValueError(f"should be one of {', '.join(RULES)}, or several of them joined by +{near}")
    try:
        stages_of(value)
    except RuleError as e:
        raise ValueError(f"should join rules that go together: {str(e).partition(': ')[2]}") from None
    return value


def _above_nothing(value: float) -> float:
    if value < _LEAST_EPS:  # an element that never had a gradient, such as padding, would become 0 / 0
        raise ValueError(f"should be at least {_LEAST_EPS:g}")
    return value


RuleName = Annotated[str, AfterValidator(_rule)]
Args = Annotated[dict[str, Any], AfterValidator(_plain)]
ModelFactory = Annotated[str, _one_of(SHIPPED_MODELS)]
DataFactory = Annotated[str, _one_of(SHIPPED_DATA)]
Loss = Annotated[str, _one_of(SHIPPED_LOSSES)]
Milestones = Annotated[tuple[float, ...], BeforeValidator(_as_tuple), AfterValidator(_rising_fractions)]


class Table(BaseModel):
    """One table of a recipe: no unknown keys, no conversion of a text to a number, no infinities."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelTable(Table):
    """What is trained: `factory` is a shipped name or "package.module:factory", called with `args`."""

    factory: ModelFactory
    args: Args = Field(default_factory=dict)


class DataTable(Table):
    """What it is trained on: the factory returns (train, test), two map-style datasets."""

    factory: DataFactory
    args: Args = Field(default_factory=dict)


class RuleTable(Table):
    """What a shard makes of a late push: the fields of core.rules.RuleSpec; absent ones are as the name says."""

    name: RuleName = "dc-asgd-a"
    lam: float | None = Field(None, ge=0, le=_FLOAT32_MAX)
    ms_decay: float = Field(0.95, ge=0, lt=1)
    compensate: Annotated[str, _choice(COMPENSATIONS)] | None = None
    look_ahead: Annotated[str, _choice(LOOK_AHEADS)] | None = None
    gap_aware: bool | None = None
    gap_decay: float = Field(0.999, ge=0, lt=1)
    scale: Annotated[str, _choice(SCALES)] | None = None
    delay_limit: float = Field(4.0, ge=0, le=_FLOAT32_MAX)
    max_lag: int = Field(0, ge=0, le=1 << 31)
    lag_policy: Annotated[str, _choice(LAG_POLICIES)] = "drop"
    mode: Annotated[str, _choice(MODES)] = "async"
    quorum: int = Field(0, ge=0, le=1 << 31)
    push_every: int = Field(1, ge=1, le=1 << 31)
    exchange: Annotated[str, _choice(EXCHANGES)] | None = None
    outer_lr: float | None = Field(None, ge=0, le=_FLOAT32_MAX)
    outer_momentum: float | None = Field(None, ge=0, lt=1)
    outer_mean: bool = True
    elasticity: float = Field(0.9, ge=0, le=_FLOAT32_MAX)
    delay_share: float = Field(0.0, ge=0, le=1)
    guard: bool = False

    @model_validator(mode="after")
    def _stages_go_together(self) -> RuleTable:
        self.spec()
        return self

    def spec(self) -> RuleSpec:
        """The same as the core's value. Raises RuleError."""
        return RuleSpec(**dict(self))


class OptimizerTable(Table):
    """SGD or AdamW as in torch. clip_norm: largest norm of the whole gradient, 0 for no limit.

    decay_norm_and_bias: whether one-dimensional parameters decay too, as they do in torch.
    """

    algorithm: Annotated[str, _choice(ALGORITHMS)] = "sgd"
    lr: float = Field(gt=0, le=_FLOAT32_MAX)
    momentum: float = Field(0.0, ge=0, lt=1)
    nesterov: bool = False
    weight_decay: float = Field(0.0, ge=0, le=_FLOAT32_MAX)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    eps: Annotated[float, AfterValidator(_above_nothing)] = Field(1e-8, le=_FLOAT32_MAX)
    clip_norm: float = Field(0.0, ge=0, le=_FLOAT32_MAX)
    decay_norm_and_bias: bool = True

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> OptimizerTable:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")
        if self.algorithm == "adamw" and self.momentum:
            raise ValueError("adamw has beta1 for momentum: set momentum to 0")
        return self


class ScheduleTable(Table):
    """The learning rate over the run: see core.schedule.Schedule."""

    kind: Literal["constant", "step", "cosine"] = "constant"
    milestones: Milestones = ()
    gamma: float = Field(0.1, gt=0, le=1)
    warmup_epochs: float = Field(0.0, ge=0, le=_MOST_EPOCHS)
    warmup_from: float = Field(0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _milestones_are_steps(self) -> ScheduleTable:
        if (self.kind == "step") != bool(self.milestones):
            raise ValueError('kind = "step" and milestones need each other')
        return self


class TrainTable(Table):
    """How much, in what portions. loss: `cross_entropy`, `mse` or "package.module:function" (a mean)."""

    epochs: int = Field(ge=1, le=_MOST_EPOCHS)
    batch_size: int = Field(ge=1, le=1 << 31)
    seed: int = Field(0, ge=0, le=_INT64_MAX)
    loss: Loss = "cross_entropy"


class RunTable(Table):
    """How it runs; none of it changes what is computed per batch.

    min_step_s: a worker's step takes at least this long. lease_s: how long a silent worker counts as alive.
    evaluate_every: epochs between evaluations. window_bytes: unacknowledged push bytes per worker and shard. data_path:
    how workers reach the shards, one of DATA_PATHS. inflight: pushes on their way while the next gradient is computed.
    compress_push, compress_pull: codecs of what travels over a network; top_k: the part of a vector that topk sends.
    """

    workers: int = Field(2, ge=1, le=65536)
    servers: int = Field(1, ge=1, le=1024)
    min_step_s: float = Field(0.0, ge=0, le=_LONGEST_S)
    lease_s: float = Field(10.0, gt=0, le=_LONGEST_S)
    evaluate_every: int = Field(1, ge=1, le=_MOST_EPOCHS)
    window_bytes: int = Field(64 << 20, ge=1, le=1 << 40)
    data_path: Literal["auto", "arena", "direct", "relay"] = "auto"
    inflight: int = Field(0, ge=0, le=1)
    compress_push: Literal["none", "bf16", "fp16", "int8", "topk"] = "none"
    compress_pull: Literal["none", "bf16", "fp16", "int8", "topk"] = "none"
    top_k: float = Field(0.01, gt=0, le=1)


class Recipe(Table):
    """A whole recipe, resolved: bases merged, overrides applied, defaults filled in."""

    name: str = ""
    model: ModelTable
    data: DataTable
    rule: RuleTable = RuleTable()
    optimizer: OptimizerTable
    schedule: ScheduleTable = ScheduleTable()
    train: TrainTable
    run: RunTable = RunTable()

    @model_validator(mode="after")
    def _core_accepts_it(self) -> Recipe:
        self.schedule_spec()
        try:
            check(self.rule_spec(), self.group_specs(), self.run.inflight)
        except RuleError as e:
            raise RuleError(f"rule: {e}") from None
        return self

    def schedule_spec(self) -> Schedule:
        """The learning rate on the sample clock."""
        s = self.schedule
        return Schedule(
            lr=self.optimizer.lr,
            epochs=self.train.epochs,
            kind=s.kind,
            milestones=s.milestones,
            gamma=s.gamma,
            warmup_epochs=s.warmup_epochs,
            warmup_from=s.warmup_from,
        )

    def rule_spec(self) -> RuleSpec:
        """The update rule of a shard."""
        return self.rule.spec()

    def group_specs(self) -> tuple[GroupSpec, ...]:
        """The parameter groups at positions DECAYED, NO_DECAY and FROZEN, whether or not a model uses them.

        A frozen parameter has rate 0 and no decay, so a shard holds it bit for bit.
        """
        o = self.optimizer
        adam: dict[str, Any] = {"algorithm": o.algorithm, "beta1": o.beta1, "beta2": o.beta2, "eps": o.eps}
        return (
            GroupSpec(1.0, o.momentum, o.nesterov, o.weight_decay, **adam),
            GroupSpec(1.0, o.momentum, o.nesterov, 0.0, **adam),
            GroupSpec(0.0),
        )

    def push_compression(self) -> Compression:
        """How gradients are compressed where they travel."""
        return Compression(self.run.compress_push, self.run.top_k)

    def pull_compression(self) -> Compression:
        """How what a push is answered with is compressed where it travels."""
        return Compression(self.run.compress_pull, self.run.top_k)

    def to_json(self) -> str:
        """What travels to servers, workers and the evaluator."""
        return json.dumps(self.model_dump(mode="json"), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """The inverse of to_json; raises RecipeError for anything else."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as e:
            raise _explained(e, [_Layer("the recipe from the broker", {})]) from None

    def to_toml(self) -> str:
        """The resolved recipe as a file that load_recipe reads back to an equal recipe."""
        tables = self.model_dump(mode="json", exclude_none=True)
        lines = [f"name = {_toml_value(tables.pop('name'))}"]
        for table, content in tables.items():
            lines += ["", f"[{table}]", *(f"{key} = {_toml_value(value)}" for key, value in content.items())]
        return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)


# ---- loading ---------------------------------------------------------------------------------------


class _Layer(NamedTuple):
    """One source of keys: a file or an override, and what it says."""

    origin: str
    content: dict[str, Any]


def shipped_recipes() -> dict[str, Path]:
    """Name -> file of the recipes that come with zasgd: inside an installed wheel, else of the checkout."""
    package = Path(zasgd.__file__).parent
    folder = next((f for f in (package / "recipes", package.parent / "recipes") if f.is_dir()), None)
    return {} if folder is None else {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load_recipe(source: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a shipped recipe (`digits`) or a .toml file and its bases; apply `--set` overrides (`a.b=v`).

    Raises RecipeError.
    """
    path = _find(source, Path())
    layers = [*_layers(path, ()), *(_override(text) for text in overrides)]
    merged: dict[str, Any] = {"name": path.stem}
    for layer in layers:
        merged = _merged(merged, layer.content)
    try:
        return Recipe.model_validate(merged)
    except ValidationError as e:
        raise _explained(e, layers) from None


def _find(source: str, beside: Path) -> Path:
    """The file that `source` names; a relative path counts from the folder `beside`."""
    shipped = shipped_recipes()
    is_name = not source.endswith(".toml") and "/" not in source
    if is_name and source.replace("-", "_") in shipped:
        return shipped[source.replace("-", "_")]
    path = beside / source
    if path.is_file():
        return path
    if not is_name:
        raise RecipeError(f"{path}: no such recipe file")
    near = difflib.get_close_matches(source, shipped, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    names = ", ".join(shipped) or "none"
    raise RecipeError(f"no recipe is named {source!r}; {hint}shipped are {names}; or give the path of a .toml file")


def _layers(path: Path, below: tuple[Path, ...]) -> Iterator[_Layer]:
    """What a file and its bases say, base first."""
    if path.resolve() in (p.resolve() for p in below):
        chain = " -> ".join(str(p) for p in (*below, path))
        raise RecipeError(f"{below[0]}: its bases go round in a circle: {chain}")
    content = _read(path)
    if "base" in content:
        base = content.pop("base")
        if not isinstance(base, str):
            raise RecipeError(f"{path}: base is {_shown(base)}, but should be a recipe's name or path")
        yield from _layers(_find_base(base, path), (*below, path))
    yield _Layer(str(path), content)


def _find_base(base: str, path: Path) -> Path:
    try:
        return _find(base, path.parent)
    except RecipeError as e:
        raise RecipeError(f"{path}: base: {e}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        return _tables(tomllib.loads(path.read_text(encoding="utf-8-sig")))  # some editors begin with a BOM
    except UnicodeDecodeError:
        raise RecipeError(f"{path}: not TOML: it is not UTF-8 text") from None
    except ValueError as e:  # TOMLDecodeError, or an integer of thousands of digits
        raise RecipeError(f"{path}: not TOML: {e}") from None
    except OSError as e:
        raise RecipeError(f"{path}: {e.strerror}") from None


def _override(text: str) -> _Layer:
    key, equals, raw = text.partition("=")
    names = [name.strip() for name in key.split(".")]
    origin = "--set " + " ".join(text.split())
    if not equals or not all(names):
        raise RecipeError(f"{origin}: should look like table.key=value")
    if names == ["base"]:
        raise RecipeError(f"{origin}: a base can only be named inside a file")
    content: Any = _toml_or_text(raw)
    for name in reversed(names):
        content = {name: content}
    return _Layer(origin, _tables(content))


def _toml_or_text(raw: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except ValueError:  # TOMLDecodeError, or an integer of thousands of digits
        return raw.strip()
    return parsed["value"] if len(parsed) == 1 else raw


def _tables(content: dict[str, Any]) -> dict[str, Any]:
    """`model = "x"` is short for `[model] factory = "x"`, and the same for data."""
    for table in ("model", "data"):
        if isinstance(content.get(table), str):
            content[table] = {"factory": content[table]}
    return content


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`, table by table; naming another factory drops the arguments of the old one."""
    if over.get("factory", base.get("factory")) != base.get("factory"):
        base = {key: value for key, value in base.items() if key != "args"}
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


# ---- saying what is wrong ----------------------------------------------------------------------------

_WANTED = {
    "model_type": "should be a table",
    "dict_type": "should be a table",
    "tuple_type": "should be a list",
}


def _explained(error: ValidationError, layers: Sequence[_Layer]) -> RecipeError:
    """The first fault as one line; an unknown key first, since it often causes the others."""
    faults = sorted(error.errors(include_url=False), key=lambda fault: fault["type"] != "extra_forbidden")
    fault = faults[0]
    path = [str(part) for part in fault["loc"]]
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    of_a_rule = isinstance(fault.get("ctx", {}).get("error"), RuleError)
    concerned = [["rule"], ["optimizer"]] if of_a_rule and not path else [path]
    return RecipeError(f"{_origin(concerned, layers)}: {_fault(fault, path)}{more}")


def _fault(fault: Any, path: list[str]) -> str:
    where = ".".join(path)
    if fault["type"] == "extra_forbidden":
        return f"unknown key {where}; the nearest is {_nearest(path)}"
    if fault["type"] == "missing":
        return f"{where} is missing"
    if fault["type"] == "json_invalid":
        return "it is not JSON"
    if fault["type"] == "value_error" and isinstance(fault["input"], dict):
        return f"{where}{': ' if where else ''}{fault['ctx']['error']}"
    said = str(fault["msg"]).removeprefix("Value error, ").replace("Input should", "should")
    wanted = _WANTED.get(str(fault["type"]), said)
    if path in (["model"], ["data"]):
        wanted += ', or a text: a shipped name or "package.module:factory"'
    return f"{where} is {_shown(fault['input'])}, but {wanted}"


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except ValueError:  # Python writes no integer of more than some thousand digits
        text = "too long a number"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _origin(paths: Sequence[list[str]], layers: Sequence[_Layer]) -> str:
    """The last source that says something about one of the keys; where none does, the recipe's own file."""
    saying = [origin for origin, content in layers if any(_mentions(content, path) for path in paths)]
    files = [origin for origin, _ in layers if not origin.startswith("--set ")]
    return saying[-1] if saying else files[-1]


def _mentions(content: Any, path: list[str]) -> bool:
    for name in path:
        if not isinstance(content, dict):
            return True  # the fault lies inside this value, a list
        if name not in content:
            return False
        content = content[name]
    return True


def _nearest(path: list[str]) -> str:
    """The known key most like an unknown one: the same name in another table, else the nearest beside it."""
    keys = list(_known_keys())
    elsewhere = [key for key in keys if key.rpartition(".")[2] == path[-1]]
    if elsewhere:
        return elsewhere[0]
    table = ".".join(path[:-1])
    beside = [key for key in keys if key.rpartition(".")[0] == table]
    return difflib.get_close_matches(".".join(path), beside, 1, cutoff=0.0)[0]


def _known_keys() -> Iterator[str]:
    yield "base"
    for name, field in Recipe.model_fields.items():
        yield name
        table = field.annotation
        if isinstance(table, type) and issubclass(table, Table):
            yield from (f"{name}.{key}" for key in table.model_fields)
