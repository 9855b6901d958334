"""How fast states reach the disk: this suite's capture beside plain prefill and beside the ways people use now.

    python benchmarks/extraction.py --dims kimi --ram /tmp/ram --disk /data/bench          # one H200, about 8 minutes
    python benchmarks/extraction.py --model build/SmolLM2-135M-Instruct --data chats.jsonl --prompts 4000 --ram R
    python benchmarks/extraction.py --dims tiny --device cpu --prompts 8 --tokens 64 --ram /tmp/bench    # tries it here

One engine, one process order, the same prompts for every row:

    plain       prefill alone: the engine with idle hooks, all prompts at once
    capture     what extract.py does after tokenizing: Capture and RunDirectory, durable and checksummed shards, every
                self-check on; into --ram (the path itself) and into --disk (with the disk's own speed beside it)
    per request a hook that copies the states to the CPU and saves one .pt a request, synchronously, into --ram
    returned    `return_hidden_states=True`: the last layer's states as Python lists, on --returned prompts

`plain` and `capture` run --rounds times in turn; ratios are of the sums, and printed for each round. The slow rows
take half of the prompts, or --returned of them. `--dims kimi` is a DeepSeek-V3 class model of 61 layers and hidden size
7168 with dummy weights, 8 of 8 experts active: the 32 B active parameters of Kimi-K2.5. Prints a table and one line
RESULT {json}.
"""

import argparse
import json
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from common import tap  # noqa: E402
from common.capture_points import CapturePoints  # noqa: E402
from common.engine import EngineSettings, available_device, parse_engine_arguments  # noqa: E402
from common.plan import H200_TFLOPS, active_parameters  # noqa: E402
from common.recapture import TokenRow  # noqa: E402
from common.shard_check import bytes_per_token  # noqa: E402
from common.target import load_config, text_config  # noqa: E402

PLAIN, PER_REQUEST, RETURNED = "plain", "per-request", "returned"  # what request ids begin with
SYNCHRONOUS_OUT = "BENCHMARK_SYNCHRONOUS_OUT"  # environment variable: where the synchronous hook saves
GPU_ARGUMENTS = {"attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none"}
KIMI = dict(
    architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", vocab_size=163840, hidden_size=7168,
    intermediate_size=18432, moe_intermediate_size=2048, num_hidden_layers=61, num_attention_heads=64,
    num_key_value_heads=64, n_shared_experts=1, n_routed_experts=8, num_experts_per_tok=8, n_group=1, topk_group=1,
    first_k_dense_replace=1, moe_layer_freq=1, topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True,
    routed_scaling_factor=2.827, kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64, qk_nope_head_dim=128,
    v_head_dim=128, max_position_embeddings=262144, rms_norm_eps=1e-5, rope_theta=50000.0, hidden_act="silu",
    bos_token_id=1, eos_token_id=2, tie_word_embeddings=False, torch_dtype="bfloat16", attention_bias=False,
    rope_scaling={
        "type": "yarn", "rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
)  # fmt: skip
TINY = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=512, hidden_size=64, intermediate_size=128,
    num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8192, rms_norm_eps=1e-5,
    hidden_act="silu", bos_token_id=1, eos_token_id=2, tie_word_embeddings=False, torch_dtype="bfloat16",
)  # fmt: skip
DIMS = {"kimi": KIMI, "tiny": TINY}


# ---- a hook that saves one file a request, in the scheduler process -------------------------------------------------

kept: dict[int, torch.Tensor] = {}  # slot -> states of the forward pass on the CPU


def is_synchronous(forward_batch) -> bool:
    rids = forward_batch.rids if forward_batch is not None else None
    return bool(rids) and rids[0].startswith(PER_REQUEST) and forward_batch.forward_mode.is_extend()


def synchronous_layer_hook(config: dict):
    def hook(module, args, output):
        if is_synchronous(tap.running):
            hidden, residual = tap.residual_stream(output)
            kept[config["slot"]] = (hidden if residual is None else hidden + residual).cpu()

    return hook


def synchronous_logits_hook(config: dict):
    def hook(module, args, output):
        batch = tap.running
        if is_synchronous(batch):
            start = 0
            for rid, rows, prefix in zip(
                batch.rids, batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu, strict=True
            ):
                states = [kept[slot][start : start + rows].clone() for slot in sorted(kept)]
                path = Path(os.environ[SYNCHRONOUS_OUT]) / f"{rid}-{prefix}.pt"
                torch.save({"hidden_states": states}, path)
                start += rows

    return hook


@dataclass
class BenchmarkSettings(EngineSettings):
    """The engine of extract.py, with the other ways' hooks and options besides; all are idle until asked for."""

    overrides: dict = field(default_factory=dict)

    def server_arguments(self) -> dict:
        return super().server_arguments() | {"enable_return_hidden_states": True} | self.overrides

    def hooks(self) -> list[dict]:
        ours, others = super().hooks(), []
        for spec in ours:
            kind = "logits" if spec["name"] == "capture logits" else "layer"
            factory = f"benchmarks.extraction:synchronous_{kind}_hook"
            others.append(spec | {"name": f"per request {spec['name']}", "hook_factory": factory})
        return ours + others


# ---- one row each --------------------------------------------------------------------------------------------------


def generate(engine, prompts: list[TokenRow], kind: str, **options) -> tuple[float, list[dict]]:
    """Seconds to answer all prompts with one token each, sent at once; and the answers."""
    number = generate.calls = getattr(generate, "calls", 0) + 1
    started = time.perf_counter()
    answers = engine.loop.run_until_complete(
        engine.async_generate(
            input_ids=[prompt.input_ids.tolist() for prompt in prompts],
            rid=[f"{kind}-{number}-{prompt.index}" for prompt in prompts],
            sampling_params={"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True},
            **options,
        )
    )
    return time.perf_counter() - started, answers


def capture(engine, prompts: list[TokenRow], out: Path, points: CapturePoints, args) -> dict:
    """Seconds from the first prompt to the last durable sample, and what the ring and the disk had to say."""
    from common.capture import Capture
    from common.shard_run import RunDirectory

    shutil.rmtree(out, ignore_errors=True)
    settings = {
        "hidden_size": args.hidden_size, "dtype": args.state_dtype, "last_state": "all",
        "ring_bytes": int(args.ring_gb * 1e9),
        "tokens_in_flight": 4 * (args.chunk_tokens or 16384),
    }  # fmt: skip
    run = RunDirectory(out, {"model": "benchmark"}, rows=len(prompts), layout=args.layout)
    written = []

    async def go():
        began = time.perf_counter()
        async with Capture(engine, run, points, settings, written.append) as session:
            started = time.perf_counter()
            await session.take(prompts)
            return session, started - began, time.perf_counter() - started

    try:
        session, begin_seconds, seconds = engine.loop.run_until_complete(go())
        run.finish()
    finally:
        run.close()
    nbytes = sum(record.bytes for record in written if record)
    shutil.rmtree(out)
    return {
        "seconds": seconds, "begin_seconds": begin_seconds, "bytes": nbytes, "samples": len(written),
        "stalled_seconds": session.stalled_seconds(), "own_token": session.self_checks()["own_token"],
        "check_seconds": session.self_checks()["seconds"],
        "ring_peak_gb": max(figures["ring_peak_bytes"] for figures in session.rank_figures.values()) / 1e9,
    }  # fmt: skip


def disk_speed(folder: Path, file_bytes: int, files: int, threads: int) -> float:
    """GB/s of writing `files` files of `file_bytes` with fsync, on this many threads."""
    data = os.urandom(min(file_bytes, 16 << 20))

    def write(number):
        descriptor = os.open(folder / f"speed-{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        left = file_bytes
        while left:
            left -= os.write(descriptor, data[:left])
        os.fsync(descriptor)
        os.close(descriptor)

    folder.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(write, range(files)))
    seconds = time.perf_counter() - started
    for number in range(files):
        (folder / f"speed-{number}").unlink()
    return files * file_bytes / seconds / 1e9


def make_prompts(args, vocab_size: int) -> list[TokenRow]:
    """The conversations in --data, again and again, or random token ids, --tokens each."""
    from common.shards import token_hash

    chance = np.random.default_rng(0)
    if args.data:
        from common.conversations import load_rows
        from common.tokenizing import load_tokenizer, tokenize_rows

        tokenized = tokenize_rows(load_rows(args.data, "train", None), load_tokenizer(args.model), max_length=4096)
        every = [np.asarray(row.input_ids) for row in tokenized.rows]
    else:
        every = [chance.integers(10, vocab_size - 10, args.tokens) for _ in range(args.prompts)]
    prompts = [every[index % len(every)] for index in range(args.prompts)]
    return [TokenRow(i, ids, np.ones(len(ids), np.int64), token_hash(ids)) for i, ids in enumerate(prompts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", choices=DIMS, help="a model of these dimensions with dummy weights")
    parser.add_argument("--model", help="a real checkpoint instead")
    parser.add_argument("--data", help="conversations whose lengths the prompts get (with --model)")
    parser.add_argument("--ram", type=Path, required=True, help="a folder in memory (tmpfs)")
    parser.add_argument("--disk", type=Path, help="a folder on a real disk")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--returned", type=int, default=16, help="prompts of the row `returned`")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens a prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--device", default=available_device()[0])
    parser.add_argument("--chunk-tokens", type=int, default=16384)
    parser.add_argument("--ring-gb", type=float, default=8.0)
    parser.add_argument("--writers", type=int, default=2, help="processes a rank, as of extract.py")
    parser.add_argument("--layout", default="v1", choices=("v1", "arrow"))
    parser.add_argument("--state-dtype", default="bfloat16")
    parser.add_argument("--engine-args", help="JSON object of further SGLang arguments")
    parser.add_argument("--log", type=Path, help="where the engine's log goes; default: in --ram")
    args = parser.parse_args()
    if bool(args.dims) == bool(args.model):
        parser.error("give --dims or --model")

    model, overrides = args.model, GPU_ARGUMENTS if args.device == "cuda" else {}
    if args.dims:
        model = args.ram / "model"
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps(DIMS[args.dims]))
        overrides = overrides | {"load_format": "dummy"}
    config = load_config(model)
    text = text_config(config)
    points, args.hidden_size = CapturePoints.default(text["num_hidden_layers"]), text["hidden_size"]
    prompts = make_prompts(args, text["vocab_size"])
    tokens = sum(len(prompt.input_ids) for prompt in prompts)
    synchronous_out = args.ram / "per-request"
    os.environ[SYNCHRONOUS_OUT] = str(synchronous_out)

    from common.engine import start_engine, stop_engine

    settings = BenchmarkSettings(
        str(model), points, tp=args.tp, device=args.device, dtype="bfloat16", chunk_tokens=args.chunk_tokens,
        writers=args.writers,
        overrides=overrides | parse_engine_arguments(args.engine_args),
    )  # fmt: skip
    started = time.perf_counter()
    engine = start_engine(settings, args.log or args.ram / "engine.log")
    load_seconds = time.perf_counter() - started
    rows: dict[str, dict] = {}
    of_rounds: list[float] = []  # speed of capture into memory over plain prefill

    def add(name: str, seconds: float, tokens: int, **figures):
        row = rows.setdefault(name, {"seconds": 0.0, "tokens": 0})
        row["seconds"] += seconds
        row["tokens"] += tokens
        row.update(figures)
        print(f"{name}: {tokens:,} tokens in {seconds:.2f} s, {tokens / seconds:,.0f} tokens/s {figures}", flush=True)

    try:
        generate(engine, prompts[: max(2, len(prompts) // 8)], PLAIN)  # warm: kernels are built here
        capture(engine, prompts[: max(2, len(prompts) // 8)], args.ram / "warm", points, args)
        for _ in range(args.rounds):
            plain_seconds = generate(engine, prompts, PLAIN)[0]
            add("plain", plain_seconds, tokens)
            found = capture(engine, prompts, args.ram / "states", points, args)
            of_rounds.append(plain_seconds / found["seconds"])
            add("capture to memory", found.pop("seconds"), tokens, **found)
        if args.disk:
            found = capture(engine, prompts, args.disk / "states", points, args)
            speed = disk_speed(args.disk, found["bytes"] // len(prompts), min(len(prompts), 64), 8)
            add("capture to disk", found.pop("seconds"), tokens, **found, disk_gb_per_second=speed)
        synchronous_out.mkdir(parents=True, exist_ok=True)
        half = prompts[: (len(prompts) + 1) // 2]
        seconds, _ = generate(engine, half, PER_REQUEST)
        add("one .pt a request", seconds, sum(len(prompt.input_ids) for prompt in half))
        assert len(list(synchronous_out.glob("*.pt"))) >= len(half), "the synchronous hook saved too few files"
        shutil.rmtree(synchronous_out)
        few = prompts[: args.returned]
        seconds, answers = generate(engine, few, RETURNED, return_hidden_states=True)
        assert all(answer["meta_info"]["hidden_states"] for answer in answers), "no hidden states came back"
        add("return_hidden_states", seconds, sum(len(prompt.input_ids) for prompt in few))
    finally:
        stop_engine(engine)

    per_token = bytes_per_token(len(points.points), args.hidden_size, args.state_dtype)
    floor = H200_TFLOPS * 1e12 * args.tp / (2 * active_parameters(config))
    plain = rows["plain"]["tokens"] / rows["plain"]["seconds"]
    print(f"\n{args.dims or model}, {len(prompts)} prompts, {tokens:,} tokens, engine up in {load_seconds:.0f} s")
    print(f"floor by arithmetic {floor:,.0f} tokens/s; {per_token:,} bytes a token: {plain * per_token / 1e9:.2f} GB/s")
    print(f"{'row':<22} {'tokens/s':>10} {'of plain':>9} {'capture is':>11}")
    ours = rows["capture to memory"]["tokens"] / rows["capture to memory"]["seconds"]
    for name, row in rows.items():
        rate = row["tokens"] / row["seconds"]
        row["tokens_per_second"], row["of_plain"] = rate, rate / plain
        print(f"{name:<22} {rate:>10,.0f} {rate / plain:>9.3f} {ours / rate:>9.2f} x")
    print("capture to memory over plain, by round: " + " ".join(f"{ratio:.3f}" for ratio in of_rounds))
    figures = {"arguments": vars(args) | {"floor": floor}, "rows": rows, "of_rounds": of_rounds}
    print("RESULT " + json.dumps(figures, default=str))


if __name__ == "__main__":
    main()
