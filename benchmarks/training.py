"""How fast a drafter trains: this project's step, and the public trainers beside it, on states that are in memory.

    python benchmarks/training.py                                  # every row that this machine can run, then one table
    python benchmarks/training.py --only kimi-dense,kimi-chat --no-peers
    python benchmarks/training.py --together --deadline 480  # our rows in one process, and no more than 480 s in all
    python benchmarks/training.py --device cpu --only tiny-chat,tiny-dense     # tries the whole program in a minute

Every row runs in its own process (compilation, memory and failures stay apart; `--together` saves the imports) and
prints RESULT {json}; the table and the bars of the project come last. Dimensions: Kimi-K2.5, SmolLM2-135M, and a tiny
one. Workloads: `dense`, 8,192 tokens as four documents of 2,048, all supervised; `chat`, a fixed mix of conversations
(mean about 1,000 tokens, at most 4,096, 45% supervised) packed by common/batches.py, whose samples/s are tokens/s over
the mean length of the mix, so that which documents a few batches hold does not matter; `long`, one document of 32,768.
MFU counts `useful_flops` (common/train_step.py) against 790 TFLOP/s, what an H200 reaches in a large bf16 product.
Peers run where they can be imported (benchmarks/peers.py).
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from common.batches import choose_budget, pack  # noqa: E402
from common.drafter import Drafter, DrafterConfig, ttt_loss  # noqa: E402
from common.losses import Teacher  # noqa: E402
from common.packing import count_positions, pack_documents  # noqa: E402
from common.train_step import GraphedStep, clipped_step, make_optimizer, useful_flops  # noqa: E402

PEAK = 790e12
STEPS, DECAY = 7, 0.8
DIMS = {
    "kimi": dict(hidden=7168, heads=64, kv=8, head_dim=128, ffn=18432, vocab=163840, draft=32000),
    "smollm2": dict(hidden=576, heads=9, kv=3, head_dim=64, ffn=1536, vocab=49152, draft=16000),
    "tiny": dict(hidden=64, heads=4, kv=2, head_dim=16, ffn=128, vocab=512, draft=128),
}
# Drafters with latent attention of these dimensions.
MLA = {
    "kimi": dict(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
    "tiny": dict(q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16),
}
# name -> (dimensions, workload, options); frozen: the drafter's head, as speculators has it; mla: latent attention
ROWS = {
    "kimi-dense": ("kimi", "dense", dict()),
    "kimi-dense-frozen": ("kimi", "dense", dict(frozen=True)),
    "kimi-chat": ("kimi", "chat", dict()),
    "kimi-chat-frozen": ("kimi", "chat", dict(frozen=True)),
    "kimi-mla-dense": ("kimi", "dense", dict(mla=True)),
    "kimi-long": ("kimi", "long", dict(steps=2, warm=1)),  # five seconds a step, nearly all of it attention
    "smollm2-dense": ("smollm2", "dense", dict(graph=True)),
    "smollm2-dense-launched": ("smollm2", "dense", dict()),  # without a CUDA graph
    "smollm2-chat": ("smollm2", "chat", dict(graph=True)),
    "tiny-dense": ("tiny", "dense", dict()),
    "tiny-chat": ("tiny", "chat", dict()),
    "tiny-mla-dense": ("tiny", "dense", dict(mla=True)),
}
PEER_ROWS = {
    "speculators-kimi-dense": ("speculators", "kimi", "dense"),
    "speculators-kimi-chat": ("speculators", "kimi", "chat"),
    "specforge-kimi-dense": ("specforge", "kimi", "dense"),
    "specforge-kimi-chat": ("specforge", "kimi", "chat"),
    "speculators-smollm2-dense": ("speculators", "smollm2", "dense"),
    "specforge-smollm2-dense": ("specforge", "smollm2", "dense"),
}
# tokens/s of the peers on one H200 on 2026-11-29 (speculators 0.9.0 with AdamW, SpecForge 0.2.0), for the bars of a run
# without them; marked there
EARLIER = {
    "speculators-kimi-dense": 14775, "specforge-kimi-dense": 12017,
    "speculators-smollm2-dense": 167873, "specforge-smollm2-dense": 104199,
}  # fmt: skip


def chat_mix(number: int = 512, seed: int = 0) -> list[np.ndarray]:
    """Loss masks of the fixed mix: log-normal lengths, user and assistant turns in alternation."""
    rng = np.random.default_rng(seed)
    masks = []
    while len(masks) < number:
        length = int(np.clip(rng.lognormal(6.57, 0.9), 32, 4096))
        mask, at = np.zeros(length, dtype=np.int64), 0
        while at < length:
            user, assistant = 12 + int(rng.exponential(150)), 12 + int(rng.exponential(150))
            mask[at + user : at + user + assistant] = 1
            at += user + assistant
        masks.append(mask)
    return masks


def mean_length(d) -> float:
    """Tokens of a document of the chat mix of these dimensions, on average."""
    masks = chat_mix() if d["vocab"] > 1000 else [mask[:256] for mask in chat_mix(64)]
    return sum(map(len, masks)) / len(masks)


def workload(name: str, tokens: int | None, small: bool):
    """(loss masks of the documents of each batch, budget of a batch or None where they fill it exactly)."""
    if name == "chat":
        masks = [mask[:256] for mask in chat_mix(64)] if small else chat_mix()
        sizes = np.array([(len(mask), *count_positions(torch.from_numpy(mask), STEPS)) for mask in masks])
        budget = choose_budget(sizes, tokens or (512 if small else 16384))
        batches = pack(sizes, budget, (0, 0))[:-1]  # the last one is what was left over
        return [[masks[i] for i in batch] for batch in batches if len(batch)], budget
    length, number = (128, 2) if small else {"dense": (2048, 4), "long": (32768, 1)}[name]
    if tokens:
        length = tokens // number
    return [[np.ones(length, dtype=np.int64)] * number], None


def make_batches(name, d, tokens, device, at_most=4):
    """Packed batches with random states, and how many documents of the mix they hold on average."""
    groups, budget = workload(name, tokens, small=d["vocab"] < 1000)
    generator = torch.Generator().manual_seed(0)
    batches = []
    for group in groups[:at_most]:
        documents = [
            SimpleNamespace(
                input_ids=torch.randint(0, d["vocab"], (len(mask),), generator=generator),
                loss_mask=torch.from_numpy(mask),
                states=[torch.zeros(len(mask), 1, dtype=torch.bfloat16)] * 4,
            )
            for mask in group
        ]
        room = vars(budget) if budget else {}
        batch = pack_documents(documents, STEPS, **room).to(device)
        states = torch.bfloat16 if device == "cuda" else torch.float32
        batches.append(
            replace(
                batch,
                aux_states=torch.randn(batch.positions.shape[0], 3 * d["hidden"], device=device, dtype=states),
                last_states=torch.randn(batch.last_states.shape[0], d["hidden"], device=device, dtype=states),
            )
        )
    padding = 0.0
    if budget:
        padding = 1 - sum(len(mask) for group in groups for mask in group) / (len(groups) * budget.tokens)
    return batches, padding


def make_drafter(d, device, frozen, mla=None):
    """mla: sizes of latent attention, in place of the Llama layer's heads."""
    heads = dict(num_key_value_heads=d["kv"], head_dim=d["head_dim"])
    if mla:
        head_dim = mla["qk_nope_head_dim"] + mla["qk_rope_head_dim"]
        heads = dict(num_key_value_heads=d["heads"], head_dim=head_dim, **mla)
    config = DrafterConfig(
        hidden_size=d["hidden"], target_hidden_size=d["hidden"], num_attention_heads=d["heads"], **heads,
        intermediate_size=d["ffn"], vocab_size=d["vocab"], draft_vocab_size=d["draft"], capture_points=(3, 31, 59),
        max_position_embeddings=32768,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        drafter = Drafter(config)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(0, 0.02)
    chosen = torch.randperm(d["vocab"], generator=torch.Generator().manual_seed(0))[: d["draft"]].sort().values
    t2d = torch.zeros(d["vocab"], dtype=torch.bool)
    t2d[chosen] = True
    drafter.set_vocab((chosen - torch.arange(d["draft"])).to(device), t2d.to(device))
    drafter.set_embedding((torch.randn(d["vocab"], d["hidden"], device=device) * 0.02).to(dtype))
    drafter.compute_dtype = dtype
    drafter.lm_head.weight.requires_grad_(not frozen)
    head = (torch.randn(d["draft"], d["hidden"], device=device) * 0.02).to(dtype)
    return drafter, Teacher(torch.ones(d["hidden"], device=device), head, 1e-5)


def measure(name: str, options: argparse.Namespace) -> dict:
    """Run one row of ours: warm up, time whole steps by events, split one by phase, read the peak of memory."""
    dims, load, how = ROWS[name]
    d, device, started = DIMS[dims], options.device, time.perf_counter()
    frozen, graph = how.get("frozen", False), how.get("graph", False) and device == "cuda"
    batches, padding = make_batches(load, d, options.tokens, device)
    drafter, teacher = make_drafter(d, device, frozen, MLA[dims] if how.get("mla") else None)
    if options.compile:
        drafter.compile_parts()
    optimizer = make_optimizer(drafter.parameters(), 1e-4)
    built = time.perf_counter()
    step = None
    if graph:
        own = replace(batches[0], **{name: tensor.clone() for name, tensor in batches[0].tensors().items()})
        step = GraphedStep(drafter, teacher, own, STEPS, DECAY)
    phases = {"forward": [], "backward": [], "optimizer": []}

    def mark():
        if device == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter()

    def between(a, b):
        return a.elapsed_time(b) if device == "cuda" else 1e3 * (b - a)

    def train_on(batch):
        a = mark()
        if step:
            loss, _ = step(batch)
            b = c = mark()
        else:
            loss, _ = ttt_loss(drafter, batch, teacher, STEPS, DECAY)
            b = mark()
            loss.backward()
            c = mark()
        clipped_step(optimizer, 1.0)
        if not step:
            optimizer.zero_grad(set_to_none=True)
        return loss.detach(), (a, b, c, mark())

    losses = [train_on(batches[0])[0].item()]
    first_step = time.perf_counter()
    for i in range(how.get("warm", options.warm)):
        train_on(batches[i % len(batches)])
    synchronise(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        at_rest = torch.cuda.memory_allocated()
    marks = [train_on(batches[i % len(batches)])[1] for i in range(how.get("steps", options.steps))]
    losses.append(train_on(batches[0])[0].item())
    synchronise(device)
    times = [between(m[0], n[0]) for m, n in zip(marks, marks[1:], strict=False)]
    for phase, i in (("forward", 0), ("backward", 1), ("optimizer", 2)):
        phases[phase] = statistics.median(between(m[i], m[i + 1]) for m in marks)
    used = [batches[i % len(batches)] for i in range(len(times))]
    seconds = sum(times) / 1e3 if load == "chat" else statistics.median(times) * len(times) / 1e3
    flops = sum(
        useful_flops(drafter.config, b.num_tokens, b.num_queries, b.num_predicted, b.num_pairs, STEPS, not frozen)
        for b in used
    )
    tokens_per_second = sum(b.num_tokens for b in used) / seconds
    documents_per_token = sum(b.num_documents for b in used) / sum(b.num_tokens for b in used)
    result = dict(
        name=name, ms=statistics.median(times), spread_ms=max(times) - min(times),
        tokens_per_second=tokens_per_second,
        samples_per_second=tokens_per_second * (1 / mean_length(d) if load == "chat" else documents_per_token),
        supervised_per_second=sum(b.num_predicted for b in used) / seconds,
        mfu=flops / seconds / PEAK, padding=padding, tokens=used[0].num_tokens, queries=used[0].num_queries,
        first_loss=losses[0], last_loss=losses[1], build_s=built - started, first_step_s=first_step - built, **phases,
    )  # fmt: skip
    if device == "cuda":
        result["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        result["reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
        result["kb_a_token"] = (torch.cuda.max_memory_allocated() - at_rest) / 1e3 / used[0].num_tokens
    if options.profile:
        print_kernels(lambda: train_on(batches[0]), options.profile)
    return result


def synchronise(device):
    if device == "cuda":
        torch.cuda.synchronize()


def print_kernels(run, number):
    """The `number` longest kernels of one step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    rows = sorted(((e.self_device_time_total / 1e3, e.count, e.key[:100]) for e in seen.key_averages()), reverse=True)
    print(f"kernels: {sum(row[0] for row in rows):.1f} ms in {sum(row[1] for row in rows)} launches")
    for milliseconds, count, key in rows[:number]:
        print(f"  {milliseconds:8.2f} ms x{count:<4d} {key}")


def in_a_process(command: list[str], limit: float) -> list[dict]:
    """Run some rows; their RESULTs, as many as came within `limit` seconds, after saying why any is missing."""
    print("$", " ".join(command[1:]), flush=True)
    try:
        done = subprocess.run(command, timeout=limit, capture_output=True, text=True, cwd=ROOT)
        output = done.stdout + done.stderr
        complete = done.returncode == 0
    except subprocess.TimeoutExpired as expired:
        output = "".join((x or b"").decode(errors="replace") for x in (expired.stdout, expired.stderr))
        output += f"\nno more results: stopped after {limit:.0f} s"
        complete = False
    with (Path(os.environ.get("OUT", "/tmp")) / "training_benchmark.log").open("a") as log:
        log.write(output)
    found = [json.loads(line[7:]) for line in output.splitlines() if line.startswith("RESULT ")]
    for result in found:
        print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()}), flush=True)
    if not complete or not found:
        print("incomplete:", " | ".join(output.strip().splitlines()[-4:])[-1200:], flush=True)
    return found


def print_bars(results: dict[str, dict]) -> None:
    """The project's bars: name, measured, bar, pass or fail; rows that are missing are named."""

    def value(row, key):
        return results[row][key], ""

    def against(ours, peer, key):
        """Our figure over the peer's."""
        if peer in results:
            return results[ours][key] / results[peer][key], ""
        if key == "tokens_per_second" and peer in EARLIER:
            return results[ours][key] / EARLIER[peer], "peer of an earlier run"
        raise KeyError(peer)

    tokens, samples = "tokens_per_second", "samples_per_second"
    long = "kimi-long"
    bars = [
        ("kimi-dense: MFU", 0.74, +1, lambda: value("kimi-dense", "mfu")),
        ("kimi-dense: peak GB", 42, -1, lambda: value("kimi-dense", "peak_gb")),
        ("kimi-dense-frozen / speculators", 1.15, +1,
         lambda: against("kimi-dense-frozen", "speculators-kimi-dense", tokens)),
        ("kimi-dense / specforge", 1.3, +1, lambda: against("kimi-dense", "specforge-kimi-dense", tokens)),
        ("kimi-chat-frozen / speculators", 2.2, +1,
         lambda: against("kimi-chat-frozen", "speculators-kimi-chat", samples)),
        ("kimi-chat / specforge", 2.2, +1, lambda: against("kimi-chat", "specforge-kimi-chat", samples)),
        ("kimi-chat, head trained / speculators, head frozen", 2.2, +1,
         lambda: against("kimi-chat", "speculators-kimi-chat", samples)),
        ("smollm2-dense / speculators", 2.5, +1,
         lambda: against("smollm2-dense", "speculators-smollm2-dense", tokens)),
        ("smollm2-dense / specforge", 2.5, +1, lambda: against("smollm2-dense", "specforge-smollm2-dense", tokens)),
        ("kimi-long / kimi-dense: memory a token", 1.05, -1,
         lambda: (results[long]["kb_a_token"] / results["kimi-dense"]["kb_a_token"], "")),
    ]  # fmt: skip
    print(f"\n{'bar':52s} {'measured':>9s} {'bar':>8s}")
    for name, bar, sign, measure_it in bars:
        try:
            measured, note = measure_it()
        except KeyError as missing:
            print(f"{name:52s} {'-':>9s} {'>=' if sign > 0 else '<='}{bar:6.2f}  not measured: no {missing.args[0]}")
            continue
        passed = "pass" if sign * measured >= sign * bar else "FAIL"
        print(f"{name:52s} {measured:9.3f} {'>=' if sign > 0 else '<='}{bar:6.2f}  {passed} {note}")


def commands(names: list[str], options) -> list[tuple[list[str], int]]:
    """(command, rows in it): ours first, one process a row or all together; peers by trainer and dimensions."""
    ours = [name for name in names if name not in PEER_ROWS]
    groups = [",".join(ours)] if options.together and ours else ours
    made = [([sys.executable, *sys.argv, "--row", group], len(group.split(","))) for group in groups]
    theirs = {}
    for name in names:
        if name in PEER_ROWS:
            peer, dims, load = PEER_ROWS[name]
            theirs.setdefault((peer, dims), []).append(load)
    for (peer, dims), loads in theirs.items():
        command = [sys.executable, str(ROOT / "benchmarks/peers.py"), peer, dims, ",".join(loads)]
        command += ["--steps", str(options.steps), "--warm", str(options.warm), "--device", options.device]
        made.append((command, len(loads)))
    return made


def main():
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="comma-separated rows; default: all but the tiny ones")
    parser.add_argument("--no-peers", dest="peers", action="store_false")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--tokens", type=int, help="tokens a step, instead of the workload's own number")
    parser.add_argument("--steps", type=int, default=12, help="timed steps")
    parser.add_argument("--warm", type=int, default=3, help="steps before them")
    parser.add_argument("--profile", type=int, default=0, help="log this many of the longest kernels of a step")
    parser.add_argument("--limit", type=int, default=240, help="seconds a row may take; 45 s more for imports")
    parser.add_argument("--together", action="store_true", help="our rows in one process")
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds for all rows; the rest is left out")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        failures = 0
        for name in options.row.split(","):
            try:
                print("RESULT " + json.dumps(measure(name, options)), flush=True)
            except Exception:
                failures += 1
                print(f"{name} failed:\n{traceback.format_exc()}", flush=True)
            gc.collect()
            if options.device == "cuda":
                torch.cuda.empty_cache()
        sys.exit(1 if failures else 0)
    names = options.only.split(",") if options.only else [*(r for r in ROWS if "tiny" not in r), *PEER_ROWS]
    names = [name for name in names if options.peers or name not in PEER_ROWS]
    results = []
    for command, rows in commands(names, options):
        left = options.deadline - (time.perf_counter() - began)
        if left < 20:
            print("left out, the time is up:", " ".join(command[1:]), flush=True)
            continue
        results += in_a_process(command, min(options.limit * rows + 45, left))
    heads = ("ms/step", "tokens/s", "superv./s", "samples/s", "MFU", "peak GB")
    print(f"\n{'row':28s} " + " ".join(f"{head:>9s}" for head in heads))
    for r in results:
        print(
            f"{r['name']:28s} {r['ms']:9.1f} {r['tokens_per_second']:9,.0f} {r['supervised_per_second']:9,.0f} "
            f"{r['samples_per_second']:9.2f} {100 * r['mfu']:8.1f}% {r.get('peak_gb', float('nan')):9.1f}"
        )
    print_bars({r["name"]: r for r in results})


if __name__ == "__main__":
    main()
