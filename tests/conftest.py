"""Fixtures that several test files share: real models small enough for a CPU, made once a session."""

import subprocess
from pathlib import Path

import pytest

import tiny_models
from common import embedded_model
from common.tokenizing import load_tokenizer
from standin_tokenizer import build

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, converted from its package on first use (about half a minute)."""
    return embedded_model.ensure(ROOT / embedded_model.DEFAULT_OUTPUT)


@pytest.fixture
def tmpfs(tmp_path):
    """Mount a tmpfs with these options and return its folder; unmounted after the test."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(options: str) -> Path:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", disk], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"mounting a tmpfs needs root: {done.stderr.strip()}")
        return disk

    yield mount
    if disk.is_mount():
        subprocess.run(["umount", "-l", disk], check=True)


@pytest.fixture(scope="session")
def standin(tmp_path_factory):
    """The Kimi-like stand-in tokenizer (tests/standin_tokenizer.py), loaded with its own code."""
    return load_tokenizer(str(build(tmp_path_factory.mktemp("standin"))), trust_remote_code=True)


@pytest.fixture(scope="session")
def small_target(smollm2, tmp_path_factory) -> Path:
    """An 8-layer Llama with random weights and the tokenizer of SmolLM2: a whole checkpoint that runs fast."""
    folder = tiny_models.llama(tmp_path_factory.mktemp("target") / "small-llama", layers=8, vocab=49152)
    return tiny_models.with_tokenizer_of(smollm2, folder)
