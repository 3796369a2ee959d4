"""What a user can get wrong: one clear line, no traceback, exit code 2 or 3."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import zmq
from e2e_counting import write_recipe
from e2e_job import Job, Process

from zasgd.core import wire
from zasgd.core.messages import Status


def _listening(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(1)
    return listener


# ---- a wrong request -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("train", "digits", "--set", "train.epoch=3"), ("train.epoch", "train.epochs")),
        (("train", "digits", "--set", "train.epochs=many"), ("train.epochs", "many", "integer")),
        (("train", "nowhere/recipe.toml"), ("nowhere/recipe.toml",)),
        (("train", "digitz"), ("digitz", "digits")),
        (("broker", "digits", "--bind", "0.0.0.0:29999"), ("0.0.0.0:29999", "--insecure")),
        (("status", "--broker", "nonsense:port"), ("nonsense:port", "HOST:PORT")),
    ],
)
def test_a_wrong_request_is_one_line(job: Job, arguments: tuple[str, ...], names: tuple[str, ...]) -> None:
    command = job.run(*arguments)
    assert command.ends() == 2, command
    line = command.error_line()
    assert command.stderr.splitlines() == [line]
    assert command.stdout == ""
    assert all(name in line for name in names), line


def test_a_recipe_with_a_wrong_value_is_named_with_its_path(job: Job) -> None:
    recipe = write_recipe(job.folder, samples=100, batch=10, epochs=1)
    recipe.write_text(recipe.read_text().replace("lr = 1.0", 'lr = "fast"'))
    command = job.run("train", recipe)
    assert command.ends() == 2
    assert f"{recipe}: optimizer.lr" in command.error_line()


# ---- ports and brokers -----------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 1], ids=["control", "relay"])
def test_a_broker_on_a_port_in_use_names_port_and_owner(job: Job, offset: int) -> None:
    with _listening(job.port + offset):
        command = job.run("broker", "digits", "--bind", job.address, "--run-dir", job.run_dir)
    _expect_the_owner_named(command, job.port + offset)


@pytest.mark.parametrize("offset", [0, 3], ids=["control", "server"])
def test_a_run_on_ports_in_use_ends_naming_port_and_owner(job: Job, offset: int) -> None:
    with _listening(job.port + offset):
        command = job.train("digits", "--set", "train.epochs=1")
        command.ends()
    _expect_the_owner_named(command, job.port + offset)
    job.expect_nothing_left()


def _expect_the_owner_named(command: Process, port: int) -> None:
    assert command.ends() == 2, command
    assert f":{port}: the port is in use by pid {os.getpid()} (" in command.error_line()


@pytest.mark.parametrize("role", ["status", "stop", "server", "eval"])
def test_no_broker_is_one_line_that_names_the_address(job: Job, role: str) -> None:
    patience = "--timeout" if role in ("status", "stop") else "--connect-timeout"
    command = job.run(role, "--broker", job.address, patience, "0.3")
    assert command.ends() == 3, command
    assert job.address in command.error_line()


def test_a_broker_of_another_protocol_version_is_one_line(job: Job) -> None:
    frames = [bytes(frame) for frame in wire.encode(Status(run=1, report={}))]
    assert frames[0][2] == 1
    frames[0] = frames[0][:2] + b"\x02" + frames[0][3:]
    with zmq.Context() as ctx, ctx.socket(zmq.ROUTER) as stranger:
        stranger.linger = 0
        stranger.bind(f"tcp://{job.address}")
        command = job.start("status", "--broker", job.address)
        assert stranger.poll(20_000)
        stranger.send_multipart([stranger.recv_multipart()[0], b"", *frames])
        assert command.ends() == 3, command
    assert "version" in command.error_line()


# ---- user code -------------------------------------------------------------------------------------


def test_a_model_that_raises_ends_the_run_and_names_the_log_with_its_traceback(job: Job) -> None:
    recipe = write_recipe(
        job.folder, samples=100, batch=10, epochs=1, workers=1, servers=1, net="counting_recipe:raising_net"
    )
    command = job.train(recipe)
    assert command.ends() == 1, command
    log = job.log("worker-0")
    assert "ZeroDivisionError: a bug of the user" in command.error_line()
    assert str(log) in command.error_line()
    assert command.stderr.count("restarted (") == 3
    said = log.read_text()
    assert said.count("Traceback") == 4
    assert "counting_recipe.py" in said
    job.expect_nothing_left()


def test_a_module_that_is_not_there_is_one_line(job: Job) -> None:
    recipe = write_recipe(job.folder, samples=100, batch=10, epochs=1, workers=1, servers=1, net="no_such_module:net")
    command = job.train(recipe)
    assert command.ends() == 2, command
    assert 'model.factory is "no_such_module:net"' in command.error_line()
    assert "No module named 'no_such_module'" in command.error_line()
    job.expect_nothing_left()


# ---- torch is missing ------------------------------------------------------------------------------


def test_training_without_torch_names_the_extra(job: Job, without_torch: dict[str, str]) -> None:
    command = job.train("digits", env=without_torch)
    assert command.ends() == 2, command
    assert "torch is not installed" in command.error_line()
    assert "zasgd[train]" in command.error_line()
    job.expect_nothing_left()


def test_a_worker_without_torch_names_the_extra(job: Job, without_torch: dict[str, str], tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, samples=100, batch=10, epochs=1)
    job.start("broker", recipe, "--servers", "1", "--bind", job.address, "--run-dir", job.run_dir, env=without_torch)
    worker = job.run("worker", "--broker", job.address, env=without_torch)
    assert worker.ends() == 2, worker
    assert "zasgd[train]" in worker.error_line()


@pytest.mark.parametrize("arguments", [("recipes",), ("doctor",), ("--help",)])
def test_what_needs_no_torch_works_without_it(
    job: Job, without_torch: dict[str, str], arguments: tuple[str, ...]
) -> None:
    assert job.run(*arguments, env=without_torch).ends() == 0
