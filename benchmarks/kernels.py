"""Check the GPU kernels against float64 on this GPU, then time their block sizes and the chunk sizes of the loss.

    python benchmarks/kernels.py                  # checks, then tables (about two minutes)
    python benchmarks/kernels.py --no-tune        # checks only; --no-checks: tables only; --quick: fewer checks
    python benchmarks/kernels.py --attention      # block sizes of the attention kernels only, with their errors

A failed check is printed as FAIL and makes the exit status 1; timing goes on. The fastest block sizes belong into
`settings` of common/ttt_attention_triton.py, the chunk size into LOGITS_PER_CHUNK of common/losses.py.
"""

import argparse
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import triton  # noqa: E402

from benchmarks.training import DECAY, DIMS, MLA, STEPS, make_batches, make_drafter  # noqa: E402
from common import losses, losses_triton, ttt_attention_triton  # noqa: E402
from common.drafter import ttt_loss  # noqa: E402
from common.train_step import GraphedStep, clipped_step, make_optimizer  # noqa: E402
from common.ttt_attention import ttt_attention  # noqa: E402

# (BLOCK_Q, BLOCK_K, warps, stages); all compile for sm_90 without spilling registers to speak of
CANDIDATES = {
    "forward": [(64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2)],
    "queries": [(64, 64, 4, 2), (64, 32, 4, 3), (64, 64, 4, 3), (128, 64, 8, 3), (128, 32, 8, 3)],
    "keys": [(64, 64, 4, 2), (32, 64, 4, 3), (64, 64, 4, 3), (64, 128, 8, 2), (64, 128, 8, 3), (32, 128, 8, 3)],
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # without a GPU only the plain paths are tried
failed = []


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def check(name, limit, run):
    """Print the error that `run` returns beside its limit; NaN and exceptions fail."""
    started = time.perf_counter()
    try:
        error = run()
        passed = error < limit
        said = f"{error:.2e} (limit {limit:.0e})"
    except Exception as problem:
        passed, said = False, "".join(traceback.format_exception_only(problem)).strip()[:600]
        traceback.print_exc()
    if not passed:
        failed.append(name)
    print(f"{'ok  ' if passed else 'FAIL'} {name}: {said} [{time.perf_counter() - started:.1f} s]", flush=True)


def accumulated_product():
    """addmm of bf16 factors into a float32 total, in place, against float64."""
    torch.manual_seed(0)
    gradient, x = (torch.randn(512, n, device=DEVICE).bfloat16() for n in (320, 192))
    total = torch.randn(320, 192, device=DEVICE)
    expected = total.double() + gradient.double().T @ x.double()
    losses._add_product(total, gradient, x)
    return relative(total, expected)


def whole_step(dims, compiled=False, graph=False, mla=None):
    """Loss and gradients of the bf16 training step against float64 eager arithmetic on the same weights and batch."""
    d = DIMS["tiny"] | dict(hidden=256, ffn=512, **dims)
    batches, _ = make_batches("chat", d, 2048 if DEVICE == "cuda" else 256, DEVICE, 1)
    batch = batches[0]
    drafter, teacher = make_drafter(d, DEVICE, False, mla)
    with torch.no_grad():  # larger weights, so that attention is far from uniform
        for parameter in drafter.parameters():
            parameter.copy_((parameter * (3.0 if parameter.ndim == 2 else 1.0)).bfloat16())
    if compiled:
        drafter.compile_parts()
    if graph:
        step = GraphedStep(drafter, teacher, batch, STEPS, DECAY)
        loss = step(batch)[0].clone()
    else:
        loss = ttt_loss(drafter, batch, teacher, STEPS, DECAY)[0]
        loss.backward()
    ours = {name: p.grad.clone() for name, p in drafter.named_parameters()}
    drafter.compiled, drafter.compute_dtype = (), torch.float64
    drafter.zero_grad()
    drafter.double()
    drafter.embed_tokens = drafter.embed_tokens.double()
    batch.aux_states, batch.last_states = batch.aux_states.double(), batch.last_states.double()
    exact = ttt_loss(drafter, batch, teacher.to(dtype=torch.float64), STEPS, DECAY)[0]
    exact.backward()
    errors = {name: relative(ours[name], p.grad) for name, p in drafter.named_parameters()}
    worst = max(errors, key=errors.get)
    print(f"     loss {loss.item():.6f} against {exact.item():.6f}; worst gradient {worst}: {errors[worst]:.2e}")
    return max(errors[worst], abs(loss.item() / exact.item() - 1))


def skipped_step():
    """A non-finite gradient leaves weights and step count alone; a finite one is clipped like PyTorch clips."""
    torch.manual_seed(0)
    a, b = (torch.nn.Parameter(torch.ones(1000, device=DEVICE)) for _ in range(2))
    ours, theirs = make_optimizer([a], 0.1), torch.optim.AdamW([b], lr=0.1, betas=(0.9, 0.95), weight_decay=0.0)
    for number in range(4):
        gradient = torch.randn(1000, device=DEVICE)
        a.grad = gradient.clone()
        if number == 2:
            a.grad[3] = float("inf")
            clipped_step(ours, 1.0)
            continue
        b.grad = gradient.clone()
        clipped_step(ours, 1.0)
        torch.nn.utils.clip_grad_norm_([b], 1.0)
        theirs.step()
    return relative(a.detach(), b.detach())


def checks(quick):
    from tests.test_losses import compare_fused as loss_error
    from tests.test_losses import error_over_eager
    from tests.test_ttt_attention import compare_fused as attention_error

    if DEVICE == "cpu":
        check("training step, plain path", 5e-2, lambda: whole_step(dict(heads=4, kv=2, head_dim=16)))
        check("training step of latent attention", 5e-2, lambda: whole_step(dict(heads=4), mla=MLA["tiny"]))
        check("clipped and skipped steps", 1e-5, skipped_step)
        return
    torch.backends.cuda.matmul.allow_tf32 = False
    print(f"     cuBLAS adds bf16 products into float32 in place: {losses.cublas_adds_in_place(torch.device(DEVICE))}")
    check("bf16 products added into float32", 1e-5, accumulated_product)
    many = (1, 2, 7, 300, 513, 40)
    for heads, kv, d in ((64, 8, 128), (9, 3, 64), (4, 2, 32)):
        for steps in (0, 6) if quick else (0, 1, 6):
            case = (torch.bfloat16, many, steps, heads, kv, d)
            run = partial(attention_error, DEVICE, *case, tokens=1024, queries=800)
            check(f"attention {heads}/{kv} heads of {d}, {steps} own keys", 1.5e-2, run)
    for steps in (0, 6):
        case = (torch.bfloat16, many, steps, 64, 64, 192)
        run = partial(attention_error, DEVICE, *case, values=128, scale=0.1, tokens=1024, queries=800)
        check(f"attention 64 heads of 192, values of 128, {steps} own keys", 1.5e-2, run)
    run = partial(attention_error, DEVICE, torch.bfloat16, (3, 200, 170), 2, 4, 2, 64, 1.0)
    check("attention, all supervised, odd sizes", 1.5e-2, run)
    sizes = dict(predicted=300, queries=320, steps=7, n=5000, h=64, h_target=64)
    check("row cross-entropy, float32", 1e-5, lambda: loss_error(DEVICE, torch.float32, **sizes))
    check("row cross-entropy, bf16: error over plain PyTorch's", 1.15, lambda: error_over_eager(DEVICE, **sizes))
    wide, narrow = dict(heads=8, kv=2, head_dim=128), dict(heads=9, kv=3, head_dim=64)
    check("training step bf16 against float64, heads of 128", 5e-2, lambda: whole_step(wide))
    if not quick:
        check("training step bf16 against float64, heads of 64", 5e-2, lambda: whole_step(narrow))
        check("training step compiled", 5e-2, lambda: whole_step(narrow, compiled=True))
    for compiled in (False, True):
        run = partial(whole_step, dict(heads=8), compiled=compiled, mla=MLA["kimi"])
        check(f"training step of latent attention{', compiled' if compiled else ''}", 5e-2, run)
    check("training step compiled, in a CUDA graph", 5e-2, lambda: whole_step(narrow, compiled=True, graph=True))
    check("clipped and skipped steps", 1e-5, skipped_step)


def attention_inputs(d, load, own=6):
    batch = make_batches(load, d | dict(hidden=8), None, DEVICE, 1)[0][0]
    tokens, queries = batch.positions.shape[0], batch.query_rows.shape[0]
    shapes = [(queries, d["heads"])] + [(tokens, d["kv"])] * 2 + [(own, queries, d["kv"])] * 2
    tensors = [torch.randn(*shape, d["head_dim"], device=DEVICE, dtype=torch.bfloat16) for shape in shapes]
    return batch, tensors


def small_case(d, own=3):
    """Inputs of 1,024 tokens in documents of several sizes and 800 of their rows: (tensors, (rows, starts), dO)."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor((1, 2, 300, 7, 513, 40, 161))
    first = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    rows = torch.randperm(1024, generator=generator)[:800].sort().values
    shapes = [(800, d["heads"])] + [(1024, d["kv"])] * 2 + [(own, 800, d["kv"])] * 2 + [(800, d["heads"])]
    made = [torch.randn(*s, d["head_dim"], generator=generator).to(DEVICE, torch.bfloat16) for s in shapes]
    return made[:-1], (rows.to(DEVICE), first[rows].to(DEVICE)), made[-1]


def attention_runs(d, tensors, where, grad):
    """{kernel: function that runs it with given block sizes and returns its results}."""
    kernels, scale = ttt_attention_triton, d["head_dim"] ** -0.5
    defaults = kernels.settings(d["head_dim"])
    out, lse = kernels.run_forward(defaults["forward"], *tensors, *where, scale)
    stats = kernels.run_queries(defaults["queries"], *tensors, *where, scale, out, grad, lse)[3]
    return {
        "forward": lambda use: kernels.run_forward(use, *tensors, *where, scale)[:1],
        "queries": lambda use: kernels.run_queries(use, *tensors, *where, scale, out, grad, lse)[:3],
        "keys": lambda use: kernels.run_keys(use, *tensors[:3], *where, scale, grad, stats),
    }


def attention_reference(tensors, where, grad):
    """{kernel: its results by the plain blocks in float32}."""
    exact = [x.float().requires_grad_() for x in tensors]
    out = ttt_attention(*exact, *where, fused=False)
    dq, dk, dv, d_own_k, d_own_v = torch.autograd.grad(out, exact, grad.float())
    return {"forward": (out,), "queries": (dq, d_own_k, d_own_v), "keys": (dk, dv)}


def tune(name, load, budget_s):
    """Median milliseconds of each attention kernel by block sizes, with 3 own keys; TFLOP/s of useful work; errors.

    An error is the worst distance to the float32 reference over the reference's largest value, on `small_case`.
    """
    d = DIMS[name]
    batch, tensors = attention_inputs(d, load, own=3)
    flops = 4 * d["heads"] * d["head_dim"] * batch.num_pairs
    small = small_case(d)
    small_runs, expected = attention_runs(d, *small), attention_reference(*small)
    runs = attention_runs(d, tensors, (batch.query_rows, batch.query_starts), torch.randn_like(tensors[0]))
    blocks = {
        (kernel, candidate): dict(zip(("BLOCK_Q", "BLOCK_K", "num_warps", "num_stages"), candidate, strict=True))
        for kernel, candidates in CANDIDATES.items()
        for candidate in candidates
    }

    def error(key):
        found = zip(small_runs[key[0]](blocks[key]), expected[key[0]], strict=True)
        return max(((a.float() - b).abs().max() / b.abs().max()).item() for a, b in found)

    started = time.perf_counter()
    with ThreadPoolExecutor(8) as pool:  # they compile side by side
        errors = {key: pool.submit(error, key) for key in blocks}
    print(f"  {name}: {len(blocks)} kernels compiled and compared in {time.perf_counter() - started:.1f} s", flush=True)
    defaults, best = ttt_attention_triton.settings(d["head_dim"]), {}
    for kernel, candidates in CANDIDATES.items():
        work = flops * (1 if kernel == "forward" else 2) / 1e9
        for candidate in candidates:
            key = kernel, candidate
            label = "{}x{} w{} s{}".format(*candidate) + (" (in use)" if blocks[key] == defaults[kernel] else "")
            if time.perf_counter() - started > budget_s:
                print(f"  (time is up before {kernel} {label})")
                break
            try:
                off = errors[key].result()
                run = partial(runs[kernel], blocks[key])
                ms = triton.testing.do_bench(run, warmup=10, rep=60, return_mode="median")
            except Exception as problem:
                print(f"  {name} {load} {kernel} {label}: {type(problem).__name__} {str(problem)[:120]}")
                continue
            if not off < 2e-2:
                failed.append(f"{name} {kernel} {label}")
            print(f"  {name} {load} {kernel:7} {label:22} {ms:.3f} ms ({work / ms:.0f}), error {off:.1e}", flush=True)
            best[kernel] = min(best.get(kernel, (ms, label)), (ms, label))
    said = ", ".join(f"{kernel} {label} {ms:.3f} ms" for kernel, (ms, label) in best.items())
    total = sum(ms for ms, _ in best.values())
    print(f"  {name} {load}, fastest: {said}; {STEPS} steps of all: {STEPS * total:.1f} ms", flush=True)


def tune_loss(name, budget_s):
    """Milliseconds of the whole fused loss (both gradients) by chunk and block size, head trained, dense load."""
    d = DIMS[name]
    count = 8192
    torch.manual_seed(0)
    head = (torch.randn(d["draft"], d["hidden"], device=DEVICE) * 0.02).requires_grad_()
    teacher = losses.Teacher(torch.ones(d["hidden"], device=DEVICE), head.detach().bfloat16(), 1e-5)
    hidden = [torch.randn(count, d["hidden"], device=DEVICE).bfloat16().requires_grad_() for _ in range(STEPS)]
    last = torch.randn(count, d["hidden"], device=DEVICE).bfloat16()
    slots = torch.arange(count, device=DEVICE)[:, None].expand(count, STEPS).contiguous()
    arguments = (hidden, head, teacher, last, slots, torch.full((count, STEPS), 1e-4, device=DEVICE), slots[:, 0])
    started, before = time.perf_counter(), losses.LOGITS_PER_CHUNK["cuda"]
    usual = losses_triton.BLOCK, losses_triton.WARPS
    for block, warps in ((1024, 4), (1024, 8), (512, 4), (2048, 8)):
        losses_triton.BLOCK, losses_triton.WARPS = block, warps
        found = []
        for power in (27, 28, 29, 30):
            if time.perf_counter() - started > budget_s or (block != 1024 and power != 29):
                continue
            losses.LOGITS_PER_CHUNK["cuda"] = 1 << power
            run = lambda: losses.ttt_cross_entropy(*arguments)  # noqa: E731
            ms = triton.testing.do_bench(run, warmup=10, rep=60, return_mode="median")
            found.append(f"2^{power} {ms:.2f} ms")
        print(f"  loss {name}, block {block} w{warps}: " + ", ".join(found), flush=True)
    losses_triton.BLOCK, losses_triton.WARPS = usual
    losses.LOGITS_PER_CHUNK["cuda"] = before
    x, g = (torch.randn(2048, n, device=DEVICE).bfloat16() for n in (d["hidden"], d["draft"]))
    total = torch.zeros(d["draft"], d["hidden"], device=DEVICE)
    into = triton.testing.do_bench(lambda: losses._add_product(total, g, x), warmup=5, rep=30, return_mode="median")
    plain = triton.testing.do_bench(lambda: g.T @ x, warmup=5, rep=30, return_mode="median")
    print(f"  {name} head gradient of 2,048 rows: {into:.3f} ms added into float32, {plain:.3f} ms as bf16")


def tune_rows(name):
    """TFLOP/s of the MLP's large products by the number of rows: what a multiple of 16, 128 or 1,024 is worth."""
    d = DIMS[name]
    weight = torch.randn(2 * d["ffn"], d["hidden"], device=DEVICE).bfloat16()
    for rows in (7872, 7936, 8192):
        x, g = (torch.randn(rows, n, device=DEVICE).bfloat16() for n in (d["hidden"], 2 * d["ffn"]))
        found = []
        for label, left, right in (("forward", x, weight.T), ("input", g, weight), ("weight", g.T, x)):
            run = partial(torch.matmul, left, right)
            ms = triton.testing.do_bench(run, warmup=20, rep=60, return_mode="median")
            found.append(f"{label} {2e-9 * rows * weight.numel() / ms:.0f}")
        print(f"  {name} {rows} rows, TFLOP/s: " + ", ".join(found), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-tune", dest="tune", action="store_false")
    parser.add_argument("--no-checks", dest="checks", action="store_false")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--attention", action="store_true", help="the dense loads of the attention kernels only")
    parser.add_argument("--budget", type=int, default=40, help="seconds for each table")
    options = parser.parse_args()
    if options.attention and DEVICE == "cpu":
        parser.error("--attention times kernels on a GPU, and there is none")
    device = SimpleNamespace(name="no GPU") if not torch.cuda.is_available() else torch.cuda.get_device_properties(0)
    print(f"{device.name}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    if options.attention:
        for name in ("kimi", "smollm2"):
            tune(name, "dense", options.budget)
    elif options.checks:
        checks(options.quick)
    if options.tune and not options.attention and DEVICE == "cuda":
        for name, load in (("kimi", "dense"), ("smollm2", "dense"), ("kimi", "chat")):
            tune(name, load, options.budget)
        for name in ("smollm2", "kimi"):
            tune_loss(name, options.budget)
        tune_rows("kimi")
    print("failed: " + (", ".join(failed) if failed else "nothing"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
