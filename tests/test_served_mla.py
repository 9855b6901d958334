"""A drafter with latent attention from capture to SGLang's engine, by the three scripts, on a small DeepSeek-V3.

Only a GPU serves EAGLE-3, so none of it runs without one; the module and its loading are compared with SGLang's on the
CPU in tests/test_sglang_module.py, and the training in tests/test_train_mla.py.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import tiny_models

ROOT = Path(__file__).resolve().parent.parent
ENGINE = {"attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none",
          "max_total_tokens": 65536}  # fmt: skip


def program(*arguments) -> None:
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.engine
@pytest.mark.timeout(2400)
def test_offline_and_engine_agree_on_a_drafter_with_latent_attention(smollm2, tmp_path):
    target = tiny_models.deepseek_v3(tmp_path / "target", layers=8, vocab=49152, **tiny_models.DEEPSEEK_ON_GPU)
    tiny_models.with_tokenizer_of(smollm2, target)
    chats = ROOT / "configs" / "demo_chats.jsonl"
    program("extract.py", "--model", target, "--data", chats, "--regenerate", "--max-new-tokens", 128,
            "--output", tmp_path / "states", "--dtype", "bfloat16", "--engine-args", json.dumps(ENGINE))  # fmt: skip
    # nothing is held out, and the engine answers the same prompts: a target of random weights is learnt by heart or not
    program("train_drafter.py", "--data", tmp_path / "states", "--output", tmp_path / "drafter", "--drafter-type",
            "mla", "--tokens-per-step", 4096, "--learning-rate", 3e-3, "--max-steps", 800, "--eval-fraction", 0,
            "--ttt-steps", 3, "--tensorboard", "False")  # fmt: skip
    served = json.dumps(ENGINE | {"dtype": "bfloat16"})
    program("eval_acceptance.py", "--drafter", tmp_path / "drafter", "--model", target, "--prompts", chats,
            "--max-new-tokens", 128, "--batch-sizes", 4, "--check-parity", "--engine-args", served,
            "--output", tmp_path / "report")  # fmt: skip
    content = json.loads((tmp_path / "report" / "report.json").read_text())
    (run,) = content["engine"]
    assert content["parity"]["agrees"] and run["speculative"]["tau"] > 1.2, content["parity"]["lines"]
