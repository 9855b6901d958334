"""User turns that a chat model makes up itself, for a corpus of its own where none is at hand.

    python benchmarks/user_turns.py --model build/SmolLM2-135M-Instruct --number 10000 --output turns.jsonl
    python extract.py --model build/SmolLM2-135M-Instruct --data turns.jsonl --regenerate --output states/

The prompt is the chat template up to where the user's words begin, so the model writes what a user would say (Xu et
al. 2024, Magpie); sampled at temperature 1. Turns that repeat, do not end, or hold fewer than three words are asked
for again; how many is printed. One JSON line each: {"messages": [{"role": "user", "content": ...}]}.
"""

import argparse
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common import engine as engines  # noqa: E402
from common.capture_points import CapturePoints  # noqa: E402
from common.target import load_config, text_config  # noqa: E402
from common.tokenizing import load_tokenizer  # noqa: E402

MARK = "\N{SYMBOL FOR UNIT SEPARATOR}here\N{SYMBOL FOR UNIT SEPARATOR}"
AT_ONCE = 1024


def header_ids(tokenizer) -> list[int]:
    """Token ids of the template up to the user's words."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
    return tokenizer(text[: text.index(MARK)], add_special_tokens=False)["input_ids"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--number", type=int, default=10_000)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default=engines.available_device()[0])
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--engine-args", help="JSON object of further SGLang arguments")
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.model, args.trust_remote_code)
    layers = text_config(load_config(args.model))["num_hidden_layers"]
    settings = engines.EngineSettings(
        args.model, CapturePoints.default(layers), device=args.device, seed=args.seed,
        trust_remote_code=args.trust_remote_code, decode_graphs=True, writers=0,
        extra=engines.parse_engine_arguments(args.engine_args),
    )  # fmt: skip
    engine = engines.start_engine(settings, args.output.with_suffix(".log"))
    prompt, turns, asked, tokens, started = header_ids(tokenizer), {}, 0, 0, time.perf_counter()
    sampling = {"temperature": 1.0, "top_p": 0.98, "max_new_tokens": args.max_new_tokens}
    try:
        while len(turns) < args.number:
            wanted = min(AT_ONCE, max(16, int(1.2 * (args.number - len(turns)))))
            if asked > 10 * args.number + 10 * AT_ONCE:
                raise SystemExit(f"error: only {len(turns)} usable turns of {asked}: this model does not write them")
            replies = engine.loop.run_until_complete(
                engine.async_generate(input_ids=[prompt] * wanted, sampling_params=sampling)
            )
            asked += wanted
            for reply in replies:
                tokens += len(reply["output_ids"])
                text = tokenizer.decode(reply["output_ids"], skip_special_tokens=True).strip()
                if reply["meta_info"]["finish_reason"]["type"] == "stop" and len(text.split()) > 2:
                    turns[text] = None
            print(f"{len(turns):,} of {args.number:,}", flush=True)
    finally:
        engines.stop_engine(engine)
    seconds = time.perf_counter() - started
    with args.output.open("w") as file:
        for text in list(turns)[: args.number]:
            file.write(json.dumps({"messages": [{"role": "user", "content": text}]}, ensure_ascii=False) + "\n")
    print(f"{asked:,} asked, {args.number:,} kept; {tokens / seconds:,.0f} tokens/s for {seconds:.0f} s")


if __name__ == "__main__":
    main()
