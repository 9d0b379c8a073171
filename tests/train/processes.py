"""Two processes of a test program that find each other as under torchrun."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def two_processes(program: str, *arguments: object) -> None:
    """Run a program of `tests.train.worker` in two processes with gloo; fail with their output."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("torch is built without gloo")
    command = [sys.executable, "-W", "ignore", "-m", "tests.train.worker", program, *map(str, arguments)]
    with socket.socket() as free:  # what torchrun tells its processes
        free.bind(("localhost", 0))
        env = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    env |= {"CUDA_VISIBLE_DEVICES": "", "LOCAL_WORLD_SIZE": "2"}
    workers = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **env, "RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in "01"
    ]
    try:
        errors = [worker.communicate(timeout=400)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert all(worker.returncode == 0 for worker in workers), "\n".join(errors)[-4000:]
