"""Train an EAGLE-3 drafter on captured hidden states. SGLang is not needed here.

    python train_drafter.py --data states/ --output drafter/ --max-steps 200 --tokens-per-step 2048
    python train_drafter.py configs/smollm2-135m.yaml --data states/ --output drafter/
    torchrun --nproc-per-node 8 train_drafter.py --data states/ --output drafter/ --tokens-per-step 65536

The first command suits a laptop. OUT becomes the drafter in SGLang's format (the best one by held-out acceptance
length, the last one where nothing is held out), with `final/` (the last weights), `checkpoints/`, `metrics.jsonl`,
`tensorboard/`, `curves.png`, `arguments.json` and `set_aside.jsonl` beside it. The same command continues a run that
was stopped, whatever stopped it, from its newest whole checkpoint.
"""

import json
import math
import signal
import threading
import time
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from common import checkpoints, ranks
from common.arguments import as_dict, parse
from common.batches import Schedule, batch_plan, scan_once, split
from common.drafter import Drafter, ttt_loss
from common.errors import EXIT_INTERRUPTED, UserError, run
from common.export import NO_LATENT_SPECULATORS, export_sglang, export_speculators
from common.feed import Feed, Mover, SetAside
from common.feed_process import ReaderProcesses
from common.load_batch import first_readable
from common.losses import Teacher
from common.new_drafter import build_drafter, choose_serving_ids
from common.offline_eval import Setting, check_fit, evaluate, evaluation_target, points_in_order
from common.plots import draw_curves
from common.progress import Progress, duration
from common.shard_writing import write_atomically
from common.shards import ShardReader
from common.step_profile import StepClock, peak_tflops, to_device, to_host
from common.target import TargetParts, load_target_parts, model_of, target_folder, text_config
from common.train_step import GraphedStep, clipped_step, learning_rate, useful_flops
from common.training_log import TrainingLog, over_steps, read_metrics, step_figures
from common.training_words import closing_lines, eval_line, plan_lines, step_line
from common.vocab import target_ids


def option(default, text: str):
    return field(default=default, metadata={"help": text})


@dataclass
class TrainArguments:
    # What goes in and what comes out.
    data: list[str] = field(metadata={"help": "Directories of shards that extract.py or speculators wrote."})
    output: str = field(metadata={"help": "Directory of the run and of the drafter; a run found there is continued."})
    model: str | None = option(None, "Target checkpoint: a folder or a hub id. Default: the one that the shards name.")
    data_points: list[int] | None = field(
        default=None, metadata={"nargs": "+", "help": "Capture points of shards that another program wrote."}
    )
    init_from: str | None = option(None, "Drafter to start from (SGLang or speculators format); its vocabulary stays.")
    export: str = option("sglang", "Formats of the drafter: 'sglang', or 'speculators' for both (in OUT/speculators).")
    serving_ids: list[int] | None = option(None, "Layer ids for SGLang, for a target family whose rule is not known.")
    # The drafter; each size defaults to the target's.
    drafter_type: str = option("llama", "Its layer: 'llama', or 'mla': latent attention as DeepSeek and Kimi have it.")
    draft_vocab_size: int = option(32000, "Tokens that the drafter can name (most frequent supervised ones); 0: all.")
    num_attention_heads: int | None = option(None, "Query heads of the drafter's layer.")
    num_key_value_heads: int | None = option(None, "Key/value heads of the drafter's layer (llama).")
    head_dim: int | None = option(None, "Width of a head (llama).")
    q_lora_rank: int | None = option(None, "Width of the latent of the queries (mla, likewise the next four).")
    kv_lora_rank: int | None = option(None, "Width of the latent of keys and values.")
    qk_nope_head_dim: int | None = option(None, "Width of the part of a head's query and key that is not rotated.")
    qk_rope_head_dim: int | None = option(None, "Width of the part that is rotated; all heads share its key.")
    v_head_dim: int | None = option(None, "Width of a head's values.")
    intermediate_size: int | None = option(None, "Width of the feed-forward part.")
    max_position_embeddings: int | None = option(None, "Longest context that the drafter is served with, in tokens.")
    fc_norm: bool = option(False, "Norm each capture point before they are joined.")
    norm_output: bool = option(False, "Feed the normed state back to the next step.")
    # Training.
    ttt_steps: int = option(7, "Steps of training-time test, the drafted tokens that training rehearses.")
    step_decay: float = option(0.8, "Loss weight of TTT step k is this to the power k.")
    tokens_per_step: int = option(65536, "Tokens of one optimizer step, over all ranks and accumulation steps.")
    tokens_per_batch: int = option(0, "Tokens that one rank computes at a time (memory); 0: tokens_per_step / ranks.")
    long_documents: str = option("trim", "A document longer than tokens_per_batch: 'trim', 'skip' or 'refuse'.")
    epochs: float = option(1.0, "Passes over the training samples, fractions included.")
    max_steps: int = option(0, "Stop after so many optimizer steps; above 0 it replaces --epochs.")
    learning_rate: float = option(1e-4, "Peak learning rate of AdamW.")
    min_lr_ratio: float = option(0.1, "The cosine ends at this share of the peak.")
    warmup_ratio: float = option(0.03, "Share of the steps over which the rate rises from zero.")
    weight_decay: float = option(0.01, "AdamW weight decay of matrices (norm weights have none).")
    beta2: float = option(0.95, "AdamW second moment decay; the first is 0.9.")
    clip_norm: float = option(1.0, "Largest global gradient norm; a large number, 1e9, never clips.")
    seed: int = option(0, "Seed of the weights and of the order of the samples.")
    compile: bool = option(True, "Compile the layer with torch.compile (GPU only; the first step takes longer).")
    cuda_graphs: bool = option(False, "Replay each step as one CUDA graph: pays for small drafters, on one GPU.")
    shard: bool = option(False, "FSDP2: share weights, gradients and optimizer out over the ranks (default: DDP).")
    device: str = option("auto", "'auto', 'cuda' or 'cpu'.")
    # Reading.
    workers: int = option(4, "Threads a rank that read shards ahead.")
    reader_processes: int | None = option(
        None, "Processes a rank for these threads; 0: this one, whose Python they share. Default: 2 on a GPU, else 0."
    )
    read_ahead: int = option(3, "Batches a rank reads ahead beyond the current step.")
    check_samples: bool = option(True, "Check checksum and NaN/Inf of each sample when a rank first reads it.")
    max_set_aside: int = option(100, "Stop when more samples than this failed their check.")
    max_skipped_steps: int = option(20, "Stop when more steps than this had a non-finite gradient.")
    # Held-out evaluation, checkpoints, logs.
    eval_fraction: float = option(0.02, "Share of the rows that is held out, by row hash; 0: no evaluation.")
    eval_every: int = option(500, "Optimizer steps between two evaluations; there is one at the end, too.")
    save_every: int = option(500, "Optimizer steps between two checkpoints; each evaluation makes one, too.")
    keep_checkpoints: int = option(2, "Newest checkpoints that are kept, besides that of the best evaluation.")
    log_every: int = option(1, "Optimizer steps between two log lines.")
    tensorboard: bool = option(True, "Write TensorBoard curves to OUT/tensorboard.")
    wandb_project: str | None = option(None, "Also log to this Weights & Biases project.")
    peak_tflops: float | None = option(None, "Peak of one device in TFLOP/s for MFU. Default: by the GPU's name.")

    def __post_init__(self):
        self.data = [self.data] if isinstance(self.data, str) else self.data  # one directory in a YAML file
        choices = {"export": ("sglang", "speculators"), "long_documents": ("trim", "skip", "refuse"),
                   "device": ("auto", "cuda", "cpu"), "drafter_type": ("llama", "mla")}  # fmt: skip
        limits = {  # what is expected, of which numbers, and whether one is so
            "1 or more": (("ttt_steps", "tokens_per_step", "eval_every", "save_every", "keep_checkpoints", "log_every",
                           "workers"), lambda n: n >= 1),
            "0 or more": (("max_steps", "tokens_per_batch"), lambda n: n >= 0),
            "0 to 1000": (("read_ahead",), lambda n: 0 <= n <= 1000),
            f"0 to --workers ({self.workers})": (("reader_processes",), lambda n: 0 <= (n or 0) <= self.workers),
            "a number above 0": (("epochs", "learning_rate", "clip_norm", "step_decay"), lambda n: 0 < n < math.inf),
            "a number from 0": (("weight_decay",), lambda n: 0 <= n < math.inf),
            "a number from 0 to below 1": (("eval_fraction", "beta2"), lambda n: 0 <= n < 1),
            "a number from 0 to 1": (("min_lr_ratio", "warmup_ratio"), lambda n: 0 <= n <= 1),
        }  # fmt: skip
        values = vars(self)
        wrong = [f"{n} {values[n]}: expected {', '.join(all_)}" for n, all_ in choices.items() if values[n] not in all_]
        wrong += [f"{n} {values[n]}: expected {words}" for words, (names, fits) in limits.items()
                  for n in names if not fits(values[n])]  # fmt: skip
        if self.drafter_type == "mla" and self.export == "speculators":
            wrong.append(f"export speculators: {NO_LATENT_SPECULATORS}")
        if wrong:
            raise UserError("; ".join("--" + line.replace("_", "-") for line in wrong))


def main() -> int:
    arguments = parse(TrainArguments, "train", description=__doc__)
    rank, num_ranks, device = ranks.join(arguments.device)
    out = Path(arguments.output)
    heartbeat = out / "heartbeat.json" if rank == 0 else None
    own = checkpoints.own_directory(out) if rank == 0 else nullcontext()
    if arguments.reader_processes is None:
        arguments.reader_processes = min(2, arguments.workers) if device.type == "cuda" else 0
    number = arguments.reader_processes
    with own, ReaderProcesses(number, arguments.workers) if number else nullcontext() as readers:
        progress = Progress("train", None, unit="steps", heartbeat=heartbeat, every_seconds=30.0, quiet=rank != 0)
        try:
            return train(arguments, rank, num_ranks, device, out, progress, readers)
        finally:
            progress.close()
            ranks.leave()


def train(arguments: TrainArguments, rank: int, num_ranks: int, device: torch.device, out: Path, progress,
          readers: ReaderProcesses | None) -> int:  # fmt: skip
    started, note = time.monotonic(), progress.note
    torch.manual_seed(arguments.seed)

    # The target, the samples, and what an earlier run left.
    progress.stage("opening shards and target")
    reader = ShardReader(arguments.data, arguments.data_points)
    for line in reader.remarks:
        note("warning: " + line)
    model = arguments.model or model_of(reader.info)
    if model is None:
        raise UserError(f"{arguments.data}: the shards do not name their target; give --model")
    target = load_target_parts(target_folder(model, reader.info))
    points = points_in_order(reader, text_config(target.config)["num_hidden_layers"])
    training, held_out = split(reader.records, arguments.eval_fraction)
    if rank == 0 and (unfinished := checkpoints.remove_unfinished(out)):
        note(f"removed {unfinished} half-written checkpoints of a run that was killed")
    found = ranks.from_first(lambda: checkpoints.latest(out, note))
    tokens_per_batch = arguments.tokens_per_batch or (found[1]["identity"]["tokens of a batch"] if found else 0)
    try:
        tokens_per_batch, batches_per_step = batch_plan(arguments.tokens_per_step, tokens_per_batch, num_ranks)
    except UserError as error:
        theirs = f"; the checkpoints in {out} have batches of {tokens_per_batch} tokens" if found else ""
        raise UserError(f"{error}{theirs}") from None

    # Which documents make up each step.
    progress.stage("counting tokens")
    vocab_size = text_config(target.config)["vocab_size"]
    sizes, frequencies = ranks.from_first(lambda: scan_once(
        out / "scan.pt", reader, training, arguments.ttt_steps, tokens_per_batch, vocab_size, arguments.workers
    ))  # fmt: skip
    schedule = Schedule(training, sizes, tokens_per_batch, batches_per_step, arguments.seed, arguments.long_documents)
    progress.stage("planning batches")
    total_steps = arguments.max_steps or schedule.total_steps(arguments.epochs)
    for line in plan_lines(schedule, len(held_out), len(reader.records), total_steps):
        note(line)

    # The drafter and its optimizer.
    progress.stage("building the drafter")
    drafter = build_drafter(arguments, target, points, frequencies, found, note)
    check_fit(drafter.config, reader.info, target, first_readable(reader, training), "the drafter", arguments.data[0])
    serving_ids = choose_serving_ids(arguments.serving_ids, drafter.config, target.config, note)
    identity = checkpoints.identify(as_dict(arguments), target, drafter, schedule, held_out)
    on_device = evaluation_target(target, device)
    drafter.to(device)
    drafter.set_embedding(on_device.embed_tokens)
    drafter.check_loaded()
    drafter.compute_dtype = torch.bfloat16 if device.type == "cuda" else None
    if device.type == "cuda" and (widest := max(drafter.config.head_dim, drafter.config.v_head_dim or 0)) > 256:
        raise UserError(f"heads of {widest}: the attention kernels take at most 256; give smaller head sizes")
    teacher = Teacher.from_target(on_device, target_ids(drafter.d2t))
    model_step = ranks.distribute(drafter, arguments.shard)
    by_kind = {kind: [p for p in drafter.parameters() if (p.ndim > 1) == kind] for kind in (True, False)}
    optimizer = torch.optim.AdamW(
        [{"params": by_kind[True], "weight_decay": arguments.weight_decay},
         {"params": by_kind[False], "weight_decay": 0.0}],
        lr=arguments.learning_rate, betas=(0.9, arguments.beta2), fused=True,
    )  # fmt: skip
    step, position, best, skipped = 0, (0, 0), None, torch.zeros((), device=device)
    if found:
        path, state = found
        checkpoints.require_same(state["identity"], identity, path)
        checkpoints.restore(path, drafter, optimizer)
        step, position, best = state["step"], tuple(state["position"]), state["best"]
        skipped += state["skipped_steps"]
        before = state["arguments"]
        changed = [f"{k} {before.get(k)} -> {v}" for k, v in as_dict(arguments).items() if before.get(k) != v]
        note(f"continuing from {path}, step {step:,}" + (f"; changed: {', '.join(changed)}" if changed else ""))
        if step > total_steps:
            raise UserError(f"{path}: this run is at step {step:,}, beyond the {total_steps:,} asked for; raise "
                            f"--max-steps or --epochs, or train into another --output")  # fmt: skip
    elif rank == 0 and (out / "metrics.jsonl").exists():
        note(f"an earlier run left no checkpoint in {out} (--save-every): starting again from step 0")

    # The loop.
    log = None
    if rank == 0:
        write_atomically(out / "arguments.json", json.dumps(as_dict(arguments), indent=1).encode())
        log = TrainingLog(out, step, arguments.tensorboard, arguments.wandb_project, as_dict(arguments))
    progress.total = total_steps
    progress.update(step)
    progress.stage("first step")
    stop = catch_signals(note)
    set_aside = SetAside(out / "set_aside.jsonl", note, arguments.check_samples)
    feed = Feed(reader, schedule, arguments.ttt_steps, position, rank, num_ranks, device.type == "cuda",
                arguments.workers, arguments.read_ahead, arguments.check_samples, readers)  # fmt: skip
    mover = Mover(feed, device)
    peak = arguments.peak_tflops or peak_tflops(device)
    how = (arguments.ttt_steps, arguments.step_decay)
    counted, graph = torch.zeros(arguments.ttt_steps, device=device), None
    graphs = arguments.cuda_graphs and device.type == "cuda" and num_ranks == 1
    if arguments.cuda_graphs and not graphs:
        note("--cuda-graphs is for one rank with a GPU: this run does without")
    if arguments.compile and device.type == "cuda":
        drafter.compile_parts()
    pending = None  # the step whose figures the device is still computing
    clock, stopped, held_out_checked, skipped_so_far = None, False, None, int(skipped)
    since_line, recent = [], deque(maxlen=20)  # figures of the steps that no line has told yet, and of the last ones
    failures_before = bad = 0  # samples set aside: by each rank, added up; by all ranks together
    began_at = step

    def finish(pending: dict) -> None:
        nonlocal skipped_so_far
        figures = step_figures(pending, peak * num_ranks if peak else None, device)
        recent.append(figures)
        shown = over_steps(recent)
        progress.update(pending["step"], loss=f"{shown['loss']:.4f}", tokens_per_second=shown["tokens_per_second"])
        if rank == 0:
            log.write("train", pending["step"], figures)
            since_line.append(figures)
            if pending["step"] % arguments.log_every == 0 or pending["step"] == total_steps:
                note(step_line(pending["step"], total_steps, over_steps(since_line)))
                since_line.clear()
        if figures["skipped_steps"] > skipped_so_far:
            skipped_so_far = figures["skipped_steps"]
            set_aside.suspect(pending["step"], pending["indices"])
        if figures["skipped_steps"] > arguments.max_skipped_steps:
            raise UserError(f"step {pending['step']}: {figures['skipped_steps']} steps had a non-finite gradient "
                            f"(--max-skipped-steps); lower --learning-rate, or check the data")  # fmt: skip

    while step < total_steps and not stopped:
        clock = StepClock(device, clock)
        now = next(feed)
        clock.mark("fetch")
        for item in now.loaded:
            set_aside.add(item.set_aside)
        batches = [item.batch for item in now.loaded]
        *counts, tokens, queries, predicted, pairs, samples, failures, stopping = ranks.summed([
            *sum(item.counts for item in now.loaded).tolist(), sum(batch.num_tokens for batch in batches),
            sum(batch.num_queries for batch in batches), sum(batch.num_predicted for batch in batches),
            sum(batch.num_pairs for batch in batches), sum(item.samples for item in now.loaded),
            len(set_aside.paths), stop.is_set(),
        ])  # fmt: skip
        if failures != failures_before:
            failures_before, bad = failures, set_aside.of_all_ranks()
        if bad > arguments.max_set_aside:
            raise UserError(f"{bad:,} samples failed their check (--max-set-aside {arguments.max_set_aside}): see "
                            f"{set_aside.path}; run extract.py --verify on the shards")  # fmt: skip
        to_device(counts, counted)  # over all ranks and batches of the step
        sums = torch.zeros(1 + 2 * arguments.ttt_steps, device=device)  # loss; entropy and hits of each TTT step
        for number, item in enumerate(now.loaded):
            batch = mover(item)
            clock.mark("h2d")
            if graphs:  # forward and backward as one replay
                graph = graph or GraphedStep(drafter, teacher, batch, *how, counted, accumulate=True)
                loss, parts = graph(batch)
            else:
                with ranks.accumulating(model_step, last=number == len(now.loaded) - 1):
                    loss, parts = ttt_loss(model_step, batch, teacher, *how, counted)
                    clock.mark("forward")
                    (loss * num_ranks).backward()  # DDP and FSDP2 average gradients over ranks
            clock.mark("backward")
            sums += torch.cat((loss.detach().view(1), parts["entropy_sum"], parts["hits"]))
            mover.computed(item)
        if num_ranks > 1:
            dist.all_reduce(sums)
        rate = learning_rate(arguments, step, total_steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        norm, skip = clipped_step(optimizer, arguments.clip_norm)  # a non-finite gradient changes nothing, and counts
        optimizer.zero_grad(set_to_none=not graphs)
        skipped += skip
        clock.mark("optimizer")
        step, position, stopped = step + 1, (now.epoch, now.step + 1), stopping > 0
        if pending:  # a GPU still computes this step while the one before is read
            finish(pending)
        pending = {
            "step": step, "clock": clock, "rate": rate, "counts": counts, "tokens": tokens, "samples": samples,
            "flops": useful_flops(drafter.config, tokens, queries, predicted, pairs, arguments.ttt_steps),
            "indices": [index for item in now.loaded for index in item.indices], "set_aside": bad,
            "sums": to_host(torch.cat((sums, norm.view(1), skipped.view(1)))),
        }  # fmt: skip

        evaluating = bool(held_out) and (step % arguments.eval_every == 0 or step == total_steps)
        saving = evaluating or step % arguments.save_every == 0 or step == total_steps or stopped
        if saving or device.type == "cpu":
            finish(pending)
            pending = None
        if not saving:
            continue
        better, learned = False, int(skipped) < step  # weights that no step has changed make no drafter
        if evaluating:
            if held_out_checked is None:
                held_out_checked = set_aside.without_bad(reader, held_out[rank::num_ranks])
            figures = evaluate_held_out(
                drafter, on_device, reader, held_out_checked, arguments.ttt_steps, set_aside, progress
            )
            bad = set_aside.of_all_ranks()
            if figures is None:
                note(f"warning: not evaluated: no held-out sample can be read and is supervised; see {set_aside.path}")
        if evaluating and figures:
            better = learned and (best is None or (figures["tau"] or 0) > best["tau"])
            if better:
                best = {"step": step, "tau": figures["tau"] or 0, "step0_accuracy": figures["step0_accuracy"]}
            if rank == 0:
                log.write("eval", step, figures)
                try:
                    draw_curves(read_metrics(out), out / "curves.png", f"{out.resolve().name}, step {step:,}")
                except OSError as error:
                    note(f"{out / 'curves.png'}: cannot write there ({error.strerror or error}); training goes on")
                note(eval_line(step, figures, better))
        progress.stage("saving")
        weights, moments = checkpoints.collect(drafter, optimizer, keep=rank == 0)
        if rank == 0:
            if better or (learned and best is None and step == total_steps):
                publish(out, arguments, drafter, target, model, serving_ids, weights)
            if learned and step == total_steps:
                publish(out / "final", arguments, drafter, target, model, serving_ids, weights)
            checkpoints.save(out, step, weights, moments, {
                "position": position, "best": best, "skipped_steps": int(skipped),
                "arguments": as_dict(arguments), "identity": identity,
            })  # fmt: skip
            checkpoints.prune(out, arguments.keep_checkpoints, best["step"] if best else None)
        del weights, moments  # as much memory as the next save will need
        progress.stage("")
        clock = None  # the next step begins now
    feed.close()

    # The end.
    if log:
        log.close()
    if step < total_steps:
        progress.close(f"stopped at step {step:,} of {total_steps:,}; the same command continues from there")
        return EXIT_INTERRUPTED
    if (without := int(skipped)) >= step:
        raise UserError(f"{out}: each of {step} steps was skipped for a non-finite gradient, no weight has changed and "
                        f"no drafter was written; {set_aside.path} names the samples: check them and the target's "
                        f"weights, or lower --learning-rate, and train into another --output")  # fmt: skip
    told = f"{total_steps:,} steps, {total_steps - began_at:,} of them now in {duration(time.monotonic() - started)}"
    told += f", {without:,} skipped for a non-finite gradient" if without else ""
    told += f"; {bad:,} samples set aside, see {set_aside.path}" if bad else ""
    progress.close(closing_lines(told, out, best, bool(held_out), arguments, model))
    return 0


# ---- what the story above calls --------------------------------------------------------------------------------------


def evaluate_held_out(drafter, target: TargetParts, reader: ShardReader, records, num_steps: int, set_aside: SetAside,
                      progress) -> dict | None:  # fmt: skip
    """`AcceptanceCounts.summary` over the held-out samples of all ranks, None where there is nothing to judge by;
    `records` are this rank's. A sample that cannot be read any more is set aside."""
    progress.stage(f"evaluating {len(records):,} held-out samples" + (" a rank" if dist.is_initialized() else ""))
    with ranks.whole_weights(drafter):
        counts = evaluate(drafter, target, partial(set_aside.read, reader), records, Setting(num_steps))
    first, *others = ranks.gathered(counts)
    counts = first.merge(others)
    return counts.summary() if counts.rows else None


def publish(out: Path, arguments: TrainArguments, drafter: Drafter, target: TargetParts, model: str, serving_ids,
            weights: dict) -> None:  # fmt: skip
    """Write the drafter in the formats asked for. weights: whole tensors by name."""
    export_sglang(out, drafter, target.config, model, serving_ids, weights)
    if arguments.export == "speculators":
        export_speculators(out / "speculators", drafter, target.config, model, weights)


def catch_signals(note) -> threading.Event:
    """Set by the first SIGINT or SIGTERM: the step is finished and saved. A second one ends the process at once."""
    asked = threading.Event()

    def remember(number, frame):
        asked.set()
        signal.signal(number, signal.SIG_DFL)
        note("stopping: the step is finished and saved first (again: at once, what came after the last checkpoint is "
             "lost)")  # fmt: skip

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, remember)
    return asked


if __name__ == "__main__":
    run(main)
