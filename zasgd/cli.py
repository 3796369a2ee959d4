"""The `zasgd` command. Every command calls something in `zasgd.app`; heavy imports wait till then."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from zasgd import __version__

Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe key; may be repeated.")
]
RecipeArg = Annotated[str, typer.Argument(help="A shipped recipe (see `zasgd recipes`) or a path to a .toml file.")]
BrokerOpt = Annotated[str, typer.Option("--broker", metavar="HOST:PORT", help="Address of the broker.")]
RunDir = Annotated[
    Path | None, typer.Option("--run-dir", help="Folder for this run's files. (default: runs/NAME-TIME)")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on the last line of stdout.")]
Device = Annotated[str, typer.Option("--device", help="auto (the GPU of the slot, else the CPU), cpu, cuda, cuda:N.")]
Threads = Annotated[int, typer.Option("--threads", min=0, help="Threads of torch; 0: a fair share of the cores.")]
ConnectTimeout = Annotated[
    float, typer.Option("--connect-timeout", min=0.1, help="Seconds to wait for the broker to appear.")
]
BrokerTimeout = Annotated[
    float, typer.Option("--broker-timeout", min=0.1, help="Seconds of silence after which the broker is given up.")
]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds to wait for the broker's answer.")]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Allow an address beyond loopback: nothing is encrypted or authenticated.")
]
Speeds = Annotated[
    str, typer.Option(metavar="KIND|FILE.csv", help="homogeneous, heterogeneous, or the times of a trace.")
]
Network = Annotated[
    str, typer.Option(metavar="MS,GBIT", help="Latency in ms one way, and Gbit/s of the server's link.")
]
Churn = Annotated[str, typer.Option(metavar="FILE.csv", help="Who joins, leaves or is killed when.")]
StepMs = Annotated[float, typer.Option("--step-ms", min=0.001, help="Mean virtual milliseconds of a batch.")]
DEFAULT_BROKER = "127.0.0.1:7470"

app = typer.Typer(
    name="zasgd",
    help="Elastic asynchronous training for PyTorch: machines come and go, nobody stops, nothing is lost.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench_app = typer.Typer(
    help="Measure this machine; every figure stands beside a physical limit of the same run.", no_args_is_help=True
)
app.add_typer(bench_app, name="bench")


def main() -> None:
    """Run the command line; what a user can mend is one line on stderr and a non-zero exit.

    A reader of the output that has gone ends it quietly with 1.
    """
    _open_standard_streams()
    try:
        try:
            _run()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
    except BrokenPipeError:
        _forget_output()
        sys.exit(1)


def _run() -> None:
    try:
        app()
    except Exception as error:
        from zasgd.app.errors import explain

        told = explain(error)
        if told is None:
            raise
        print(f"error: {told[0]}", file=sys.stderr)
        sys.exit(told[1])
    except KeyboardInterrupt:
        sys.exit(130)


def _open_standard_streams() -> None:
    """/dev/null where one was closed (`zasgd ... >&-`): else the next socket would get its number, and our output."""
    for fd, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is fd
            setattr(sys, name, os.fdopen(fd, mode, encoding="utf-8", errors="replace", closefd=False))


def _forget_output() -> None:
    """What is still buffered goes to /dev/null; the interpreter would fail on it once more at its exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        os.dup2(nowhere, fd)


def _version(value: bool) -> None:
    if value:
        print(f"zasgd {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Elastic asynchronous training for PyTorch: machines come and go, nobody stops, nothing is lost."""


@app.command()
def train(
    recipe: RecipeArg,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Worker processes. (default: the recipe's run.workers)")
    ] = None,
    servers: Annotated[
        int | None, typer.Option(min=1, help="Parameter shards. (default: the recipe's run.servers)")
    ] = None,
    set_: Set = None,
    run_dir: RunDir = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65000, help="Broker port. (default: first free block from 7470)")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Shorthand for --set train.seed=N.")] = None,
    device: Device = "auto",
    record_pushes: Annotated[
        bool, typer.Option("--record-pushes", help="Record gradients too: `zasgd replay` then computes none.")
    ] = False,
    json: Json = False,
) -> None:
    """Run a whole job on this machine: broker, shards, workers and evaluator under a supervisor."""
    from zasgd.app import local, serve

    loaded = _load(recipe, set_, workers=workers, servers=servers, seed=seed)
    folder = run_dir or serve.new_run_dir(loaded)
    options = local.Options(port, device, record_pushes)
    raise typer.Exit(local.train(loaded, folder, options, json_output=json))


@app.command()
def demo(run_dir: RunDir = None, json: Json = False) -> None:
    """Train digits while a worker joins after epoch 2 and is killed with SIGKILL soon after its 20th push."""
    from zasgd.app import demo as demo_app

    raise typer.Exit(demo_app.run(run_dir, json_output=json))


@app.command()
def broker(
    recipe: RecipeArg,
    servers: Annotated[
        int | None, typer.Option(min=1, help="The run opens when this many servers have joined.")
    ] = None,
    bind: Annotated[str, typer.Option(help="HOST:PORT for control; data uses the port after it.")] = DEFAULT_BROKER,
    insecure: Insecure = False,
    set_: Set = None,
    run_dir: RunDir = None,
    json: Json = False,
    supervised: Annotated[bool, typer.Option("--supervised", hidden=True)] = False,
) -> None:
    """Serve a run by hand: the one address that servers and workers need."""
    from zasgd.app import by_hand

    loaded = _load(recipe, set_, servers=servers)
    raise typer.Exit(by_hand.broker(loaded, bind, run_dir, insecure=insecure, json_output=json, supervised=supervised))


@app.command()
def server(
    broker: BrokerOpt = DEFAULT_BROKER,
    bind: Annotated[str, typer.Option(help="HOST:PORT for data. (default: first free port after the broker's)")] = "",
    advertise: Annotated[str, typer.Option(help="HOST[:PORT] under which others reach this server.")] = "",
    insecure: Insecure = False,
    connect_timeout: ConnectTimeout = 60.0,
    broker_timeout: BrokerTimeout = 60.0,
    record: Annotated[
        Path | None, typer.Option("--record", metavar="DIR", help="Write what moves the parameters there, for replay.")
    ] = None,
    record_pushes: Annotated[bool, typer.Option("--record-pushes", help="Record gradients too.")] = False,
) -> None:
    """Hold one shard of the parameters for the broker's run. Needs no torch."""
    from zasgd.app import by_hand

    options = by_hand.ServerOptions(bind, advertise, insecure, connect_timeout, broker_timeout, record, record_pushes)
    raise typer.Exit(by_hand.server(broker, options))


@app.command()
def worker(
    broker: BrokerOpt = DEFAULT_BROKER,
    name: Annotated[str, typer.Option(help="Keeps the worker's id across restarts.")] = "",
    device: Device = "auto",
    threads: Threads = 0,
    connect_timeout: ConnectTimeout = 60.0,
    broker_timeout: BrokerTimeout = 30.0,
    data_path: Annotated[
        str, typer.Option(help="auto, arena (shared memory), direct (to the shards) or relay. (default: the recipe's)")
    ] = "",
) -> None:
    """Compute gradients for the broker's run. May join and leave (Ctrl-C, SIGTERM) at any moment."""
    from zasgd.app import by_hand

    raise typer.Exit(by_hand.worker(broker, name, device, threads, connect_timeout, broker_timeout, data_path))


@app.command("eval")
def evaluate(
    broker: BrokerOpt = DEFAULT_BROKER,
    run_dir: RunDir = None,
    device: Device = "auto",
    threads: Threads = 0,
    connect_timeout: ConnectTimeout = 60.0,
    broker_timeout: BrokerTimeout = 30.0,
) -> None:
    """Score the model after each epoch and write model.safetensors for the broker's run."""
    from zasgd.app import by_hand

    raise typer.Exit(by_hand.evaluate(broker, run_dir, device, threads, connect_timeout, broker_timeout))


@app.command()
def status(broker: BrokerOpt = DEFAULT_BROKER, json: Json = False, timeout: Timeout = 5.0) -> None:
    """Show workers, shards and progress of a run."""
    from zasgd.app import by_hand

    by_hand.status(broker, timeout, json_output=json)


@app.command()
def drain(
    worker: Annotated[str, typer.Argument(help="Name or id, as `zasgd status` shows it.")],
    broker: BrokerOpt = DEFAULT_BROKER,
    json: Json = False,
    timeout: Timeout = 5.0,
) -> None:
    """Let a worker finish its batch and leave."""
    from zasgd.app import by_hand

    by_hand.drain(broker, worker, timeout, json_output=json)


@app.command()
def stop(broker: BrokerOpt = DEFAULT_BROKER, json: Json = False, timeout: Timeout = 5.0) -> None:
    """End a run now: the model is evaluated and written, every process exits."""
    from zasgd.app import by_hand

    by_hand.stop(broker, timeout, json_output=json)


@app.command()
def clean(json: Json = False) -> None:
    """Remove shared memory that killed runs have left behind; what a process still uses stays."""
    from zasgd.app import clean as clean_app

    clean_app.clean(json_output=json)


@app.command()
def replay(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run of `zasgd train`.")],
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch, as each worker of the run had.")] = 1,
    json: Json = False,
) -> None:
    """Recompute a run on one process from its shards' records, and compare every bit of the parameters."""
    from zasgd.app import replay as replay_app

    raise typer.Exit(replay_app.replay(run_dir, threads, json_output=json))


@app.command()
def recipes(
    recipe: Annotated[str | None, typer.Argument(help="Show and validate this one, resolved.")] = None,
    set_: Set = None,
    json: Json = False,
) -> None:
    """List the shipped recipes, or show and validate one."""
    from zasgd.app import catalogue

    catalogue.recipes(recipe, set_ or [], json_output=json)


@app.command()
def rules(
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Show what combines with what, and why the rest not.")
    ] = False,
    markdown: Annotated[
        Path | None,
        typer.Option("--markdown", metavar="FILE", exists=True, dir_okay=False, help="Write both into FILE's markers."),
    ] = None,
    json: Json = False,
) -> None:
    """Show every update rule: formula, defaults, what it keeps in memory, source and use."""
    from zasgd.app import rules as rules_app

    rules_app.show(matrix=matrix, markdown=markdown, json_output=json)


@app.command()
def simulate(
    recipe: RecipeArg,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Workers from the start. (default: the recipe's run.workers)")
    ] = None,
    rule: Annotated[
        str | None, typer.Option(help="Such as dana+ga, sync or asgd[momentum=0.9 lr=0.02]. (default: the recipe's)")
    ] = None,
    speeds: Speeds = "homogeneous",
    network: Network = "0.2,10",
    churn: Churn = "",
    seed: Annotated[int, typer.Option(min=0, help="Of initial parameters, data order, speeds and schedule.")] = 0,
    step_ms: StepMs = 500.0,
    curve: Annotated[bool, typer.Option("--curve", help="Score the parameters after each epoch too.")] = False,
    set_: Set = None,
    json: Json = False,
) -> None:
    """Train in virtual time: real gradients and the real server code, simulated machines and network."""
    from zasgd.app import simulate as simulate_app

    scene = simulate_app.Scene(workers or 0, speeds, network, churn, step_ms / 1000, seed)
    simulate_app.run(recipe, rule, set_ or [], scene, curve=curve, json_output=json)


@app.command()
def compare(
    recipe: RecipeArg,
    rules: Annotated[str, typer.Option(metavar="A,B,C", help="Rules as --rule of simulate takes them; or sequential.")],
    out: Annotated[Path, typer.Option(help="Folder for results.csv, table.md and plot.png; one that exists goes on.")],
    workers: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of workers, rising.")] = "1,4,8,16,32",
    speeds: Speeds = "homogeneous",
    network: Network = "0.2,10",
    churn: Churn = "",
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each cell, with seeds from 0.")] = 3,
    step_ms: StepMs = 500.0,
    jobs: Annotated[int, typer.Option(min=0, help="Cells at a time; 0: one for each core.")] = 0,
    curve: Annotated[bool, typer.Option(help="Score after each epoch, for error against virtual time.")] = True,
    target_loss: Annotated[
        float | None, typer.Option(help="Add a table of the virtual time until this train loss.")
    ] = None,
    set_: Set = None,
    json: Json = False,
) -> None:
    """Simulate rules by numbers of workers by seeds on all cores; write a table and a picture."""
    from zasgd.app import compare as compare_app

    scene = compare_app.Scene(0, speeds, network, churn, step_ms / 1000)
    compare_app.run(
        recipe, rules, workers, seeds, set_ or [], scene, out, jobs=jobs, curve=curve, target_loss=target_loss,
        json_output=json,
    )  # fmt: skip


@app.command()
def doctor(
    recipe: Annotated[str | None, typer.Argument(help="Does its rule bear its workers?")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="As many workers instead of the recipe's.")] = None,
    set_: Set = None,
    warm: Annotated[bool, typer.Option("--warm", help="Compile the kernels of every rule.")] = False,
    json: Json = False,
) -> None:
    """Print versions, what is available here, and what is wrong. Exits 1 when a run could not work."""
    from zasgd.app import doctor as doctor_app

    loaded = _load(recipe, set_) if recipe else None
    raise typer.Exit(doctor_app.run(loaded, workers, warm=warm, json_output=json))


@bench_app.command()
def roundtrip(
    params: Annotated[int, typer.Option(min=16, help="Parameters of the model.")] = 10_000,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of each measurement.")] = 2.0,
    repeats: Annotated[int, typer.Option(min=1, help="Alternating repetitions; medians are printed.")] = 5,
    json: Json = False,
) -> None:
    """Push+pull round trips, direct and through the relay, beside a bare echo and a bare relay of the same bytes."""
    from zasgd.app import bench

    bench.roundtrip(params, seconds, repeats, json_output=json)


@bench_app.command()
def kernels(
    params: Annotated[int, typer.Option(min=16, help="Parameters of the slice.")] = 25_000_000,
    repeats: Annotated[int, typer.Option(min=1, help="Alternating repetitions; medians are printed.")] = 5,
    rules: Annotated[str, typer.Option(metavar="A,B,C", help="Rules to measure. (default: all)")] = "",
    json: Json = False,
) -> None:
    """The update kernels, one core, beside a plain copy of the same bytes in the same run."""
    from zasgd.app import bench

    bench.kernels(params, repeats, rules, json_output=json)


@bench_app.command()
def step(
    path: Annotated[str, typer.Option(metavar="arena|direct|relay", help="How data goes to the shards.")] = "arena",
    params: Annotated[int, typer.Option(min=16, help="Parameters of the model.")] = 25_000_000,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 4,
    servers: Annotated[int, typer.Option(min=1, help="Parameter shards.")] = 2,
    rule: Annotated[str, typer.Option(help="Rule that the shards apply.")] = "dc-asgd-c",
    write_grads: Annotated[
        bool, typer.Option("--write-grads", help="Workers write their gradients; else they lie in place.")
    ] = False,
    compress: Annotated[str, typer.Option(metavar="CODEC", help="Of pushes that travel.")] = "none",
    compress_pull: Annotated[
        str, typer.Option("--compress-pull", metavar="CODEC", help="Of answers that travel.")
    ] = "none",
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of each measurement.")] = 5.0,
    repeats: Annotated[int, typer.Option(min=1, help="Alternating repetitions; medians are printed.")] = 3,
    json: Json = False,
) -> None:
    """Steps per second of all workers at once, and where their time goes, beside the bare kernel or bare sockets."""
    from zasgd.app import bench

    bench.step(
        path, params, workers, servers, rule, seconds, repeats,
        write_grads=write_grads, compress=compress, compress_pull=compress_pull, json_output=json,
    )  # fmt: skip


@bench_app.command()
def scale(
    workers: Annotated[str, typer.Option(metavar="A,B,C", help="Numbers of workers.")] = "1,2,4,8",
    step_ms: Annotated[float, typer.Option("--step-ms", min=0.001, help="Mean milliseconds of compute.")] = 500.0,
    params: Annotated[int, typer.Option(min=16, help="Parameters of the model.")] = 25_000_000,
    servers: Annotated[int, typer.Option(min=1, help="Parameter shards.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each worker that are measured.")] = 20,
    json: Json = False,
) -> None:
    """How much faster more workers are when sleeps, drawn from a Gamma distribution, stand for their GPUs."""
    from zasgd.app import bench

    bench.scale(workers, step_ms, params, servers, steps, json_output=json)


def _load(source: str, overrides: list[str] | None, **shorthands: int | None):  # type: ignore[no-untyped-def]
    """The recipe with `--set` and the options that are shorthands for it."""
    from zasgd.train.recipe import load_recipe

    keys = {"workers": "run.workers", "servers": "run.servers", "seed": "train.seed"}
    given = [f"{keys[name]}={value}" for name, value in shorthands.items() if value is not None]
    return load_recipe(source, [*(overrides or []), *given])


if __name__ == "__main__":
    main()
