"""Layer numbers: the defaults, what every format calls them, and that SGLang's own setters agree with the table."""

import subprocess
import sys
from pathlib import Path

import pytest

from common.capture_points import SGLANG_ADDS_ONE, SGLANG_TAKES_RAW, CapturePoints
from common.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
KIMI = CapturePoints((3, 31, 59), 61)

# Runs in a process of its own, because it imports the engine: SGLang's real methods on a bare stand-in for the model.
READ_BACK = """
import os, sys
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
from types import SimpleNamespace
from sglang.srt.models.deepseek_v2 import DeepseekV2ForCausalLM
from sglang.srt.models.kimi_k25 import KimiK25ForConditionalGeneration
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.models.qwen2 import Qwen2ForCausalLM
from common.capture_points import CapturePoints

points = CapturePoints((3, 31, 59), 61)

def bare(**more):
    return SimpleNamespace(pp_group=SimpleNamespace(is_last_rank=True), config=SimpleNamespace(num_hidden_layers=61),
                           model=SimpleNamespace(layers_to_capture=[]), **more)

for name, cls in {"LlamaForCausalLM": LlamaForCausalLM, "Qwen2ForCausalLM": Qwen2ForCausalLM,
                  "Qwen3ForCausalLM": Qwen3ForCausalLM, "DeepseekV3ForCausalLM": DeepseekV2ForCausalLM}.items():
    model = bare()
    cls.set_eagle3_layers_to_capture(model, points.serving_ids(name))
    assert model.model.layers_to_capture == points.sglang_layers_to_capture(), (name, model.model.layers_to_capture)
inner = bare()
inner.set_eagle3_layers_to_capture = lambda ids: DeepseekV2ForCausalLM.set_eagle3_layers_to_capture(inner, ids)
KimiK25ForConditionalGeneration.set_eagle3_layers_to_capture(
    SimpleNamespace(language_model=inner), points.serving_ids("KimiK25ForConditionalGeneration"))
assert inner.model.layers_to_capture == [3, 31, 59]
print("agreed")
"""


def test_defaults():
    assert CapturePoints.default(61).points == (3, 31, 59)
    assert CapturePoints.default(30).points == (3, 16, 28)
    with pytest.raises(UserError, match="no default capture points"):
        CapturePoints.default(6)


def test_what_each_format_calls_3_31_59():
    assert KIMI.hooked_layers() == [2, 30, 58, 60]
    assert KIMI.speculators_v1_ids() == [2, 30, 58, 60]
    assert KIMI.sglang_layers_to_capture() == [3, 31, 59]
    assert KIMI.serving_ids("LlamaForCausalLM") == [2, 30, 58]
    assert KIMI.serving_ids("KimiK25ForConditionalGeneration") == [3, 31, 59]
    assert KIMI.names() == ["point 3", "point 31", "point 59", "last state"]


def test_a_family_is_in_one_row_only():
    assert not set(SGLANG_ADDS_ONE) & set(SGLANG_TAKES_RAW)


@pytest.mark.parametrize("points", [(), (5, 3), (3, 3), (0, 3), (3, 61)])
def test_impossible_points(points):
    with pytest.raises(UserError):
        CapturePoints(points, 61)


def test_never_guesses():
    with pytest.raises(UserError, match="not known how SGLang numbers"):
        KIMI.serving_ids("SomethingNewForCausalLM")
    with pytest.raises(UserError, match="start at 1 cannot be served"):
        CapturePoints((1, 31), 61).serving_ids("DeepseekV3ForCausalLM")


@pytest.mark.engine
def test_sglang_captures_exactly_these_points():
    done = subprocess.run([sys.executable, "-c", READ_BACK], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "agreed" in done.stdout, done.stderr[-2000:]
