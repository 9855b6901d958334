"""Fixtures that several test files share: real models small enough for a CPU, made once a session."""

import shutil
from pathlib import Path

import pytest

import tiny_models
from common import embedded_model

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, converted from its package on first use (about half a minute)."""
    return embedded_model.ensure(ROOT / embedded_model.DEFAULT_OUTPUT)


@pytest.fixture(scope="session")
def small_target(smollm2, tmp_path_factory) -> Path:
    """An 8-layer Llama with random weights and the tokenizer of SmolLM2: a whole checkpoint that runs fast."""
    folder = tiny_models.llama(tmp_path_factory.mktemp("target") / "small-llama", layers=8, vocab=49152)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        if (smollm2 / name).exists():
            shutil.copy(smollm2 / name, folder / name)
    return folder
