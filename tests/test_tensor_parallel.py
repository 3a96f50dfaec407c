"""examples/tensor_parallel.py on processes of this machine: 200 rounds, with KDTREE_TEST_FULL=1
the 2,000 of the example. What the example compares is listed in its output."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support import FULL, missing_backends, torch

pytestmark = pytest.mark.skipif("torch" in missing_backends(), reason="torch is not installed")

EXAMPLES = Path(__file__).parents[1] / "examples"
ROUNDS = 2000 if FULL else 200


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "tensor_parallel.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_output(text: str, rounds: int, ranks: int) -> None:
    assert len(re.findall(r"^  ok ", text, re.M)) == 7
    assert "FAILED" not in text
    numbers = re.match(r"(\d+) rounds on (\d+) ranks, (\d+) draft tokens accepted", text)
    assert numbers
    assert [int(n) for n in numbers.groups()[:2]] == [rounds, ranks]
    assert int(numbers[3]) > rounds  # of at most 15 a round
    if ranks > 1:  # the inputs are such that the ranks would part without a gather
        alone = re.search(r"that differ by ulps, (\d+) would", text)
        assert alone
        assert int(alone[1]) > rounds // 4


def test_on_the_cpu():
    text = run("--device", "cpu", "--ranks", "4", "--rounds", str(ROUNDS), "--batch", "2")
    check_output(text, ROUNDS, 4)
    batch, *numbers = text.splitlines()[-1].replace(",", "").split()
    assert batch == "2"
    assert len(numbers) == 4 + 6
    assert all(float(number) > 0 for number in numbers)


@pytest.mark.skipif(
    "torch-cuda" in missing_backends(), reason=missing_backends().get("torch-cuda", "")
)
def test_on_the_gpus():
    ranks = 1 << (torch.cuda.device_count().bit_length() - 1)
    text = run("--ranks", str(ranks), "--rounds", str(ROUNDS), "--batch", "1")
    check_output(text, ROUNDS, ranks)


SABOTAGE = """
import sys, tensor_parallel
gather = tensor_parallel.all_gather
def one_sided(received, sent):
    gather(received, sent)
    if len(sent) < 5000 and sent.dtype.itemsize == 1 and {rank} == 1:
        received[: len(sent)] = received[-len(sent) :]
tensor_parallel.all_gather = one_sided
sys.argv[1:] = ["--device", "cpu", "--rounds", "4", "--batch"]
tensor_parallel.main()
"""


def test_a_difference_is_found():
    """Two ranks, of which one takes its own candidates for the other's."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SABOTAGE.format(rank=rank)],
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=EXAMPLES,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    texts = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [1, 1], texts
    assert re.search(r"FAILED 4 differ between ranks", texts[0][0]), texts


@pytest.mark.parametrize(
    "arguments",
    [
        ("--ranks", "3"),
        ("--vocab", "63", "--ranks", "4"),
        *((name, "0") for name in ("--ranks", "--rounds", "--batch", "--heads", "--prefix")),
    ],
)
def test_refuses(arguments):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "tensor_parallel.py"), "--device", "cpu", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert f"{arguments[0]}: expected" in done.stderr
