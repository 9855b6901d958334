"""Hidden states of a target model, from SGLang's offline Engine straight into shards that prove themselves.

    make demo                                                                  # SmolLM2 on a laptop's CPU, minutes
    python extract.py configs/smollm2-135m.yaml --data chats.jsonl --output states/
    python extract.py --model Qwen/Qwen3-8B --data chats.jsonl --output states/
    torchrun --nproc-per-node 8 extract.py --model M --data D --output O --tp 1        # 8 replicas
    torchrun --nnodes 2 --nproc-per-node 1 ... extract.py ... --tp 16                  # one engine over 2 nodes
    python extract.py --status O | --verify O | --plan --model M --data D              # look, check, calculate

The same command resumes a run that was stopped, killed or starved of disk: what is committed is kept, the rest is done.
Conversations become token ids and a loss mask; the engine computes them; hooks in its scheduler processes copy the
residual stream at the capture points and after the last layer to the disk (common/tap.py); this process commits each
sample once the token that follows from its stored state is the one that the engine answered (common/capture.py).
"""

import json
import os
import socket
import sys
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from common import ranks
from common.answering import GivenUp, answer, answered
from common.arguments import as_dict, parse
from common.conversations import load_rows
from common.engine import EngineDied
from common.errors import EXIT_INTERRUPTED, UserError, run
from common.extraction import DTYPES, chunk_tokens, identity, own_share, place_process, read_rows, read_target, tokenize
from common.extraction_view import AnswerFigures, Figures, Interrupts, resume_line, summary
from common.placement import Placement, free_port
from common.plan import cpu_text, plan_of, plan_text
from common.plan_training import training_plan, training_text
from common.progress import Progress
from common.shard_check import status, status_text, verify
from common.shard_run import RunDirectory
from common.shard_writing import write_atomically


def option(default, text: str):
    return field(default=default, metadata={"help": text})


@dataclass
class ExtractArguments:
    # What to capture.
    model: str | None = option(None, "target model: a checkpoint folder or a hub id")
    data: list[str] = field(
        default_factory=list,
        metadata={"help": "conversations: JSONL, JSON, Parquet, Arrow files, folders, a `datasets` id", "nargs": "+"},
    )
    output: str | None = option(None, "directory of the shards; an existing one is resumed")
    split: str = option("train", "split of a `datasets` id")
    limit: int | None = option(None, "read only the first N rows")
    capture_points: list[int] | None = field(
        default=None,
        metadata={"help": "ascending; k: after k layers; default 3, L//2+1, L-2 (3 31 59 of 61)", "nargs": "+"},
    )
    # Tokens and loss mask.
    max_length: int | None = option(None, "longest sample, in tokens; unset, a row too long for the model is an error")
    over_length: str = option("truncate", "longer rows are cut at the end (truncate) or left out (skip); counted")
    supervise: str = option("all", "which assistant turns count: all, last, or each (one sample a turn)")
    chat_template: str | None = option(None, "Jinja file that replaces the tokenizer's own chat template")
    template_kwargs: str | None = option(None, "JSON object of further variables for the chat template")
    tokenizer_workers: int = option(0, "processes that tokenize 2,000 rows and more; 0: all cores")
    # Answers by the target itself.
    regenerate: bool = option(False, "let the target answer every turn first; kept as chats.jsonl in the output")
    temperature: float = option(0.0, "sampling temperature of --regenerate; 0 is greedy")
    max_new_tokens: int = option(1024, "longest answer of --regenerate, in tokens")
    # Shards.
    layout: str | None = option(None, "v1 (speculators up to 0.7, default) or arrow (speculators from 0.8 on)")
    state_dtype: str = option(
        "bfloat16", f"of the stored states: {', '.join(DTYPES)}, or fp8 (capture points in 8 bits, last state bfloat16)"
    )
    last_state: str = option("all", "rows that keep their last state: all, or supervised (where training reads it)")
    rows_per_block: int | None = option(None, "rows a folder; default 2000, fewer where replicas would be idle")
    ring_gb: float = option(4.0, "host memory between engine and disk, in GB a tensor-parallel rank; it never grows")
    writers: int = option(2, "processes a tensor-parallel rank that write files, each with four threads")
    force: bool = option(False, "start although the disk cannot hold everything")
    # Engine.
    tp: int = option(1, "tensor parallelism: GPUs a replica")
    device: str = option("auto", "auto, cuda or cpu")
    dtype: str = option("auto", "dtype of the model: auto, bfloat16, float16, float32")
    chunk_tokens: int | None = option(None, "tokens a forward pass; default: SGLang's choice, 2048 on a CPU")
    engine_args: str | None = option(None, 'JSON object of further SGLang arguments, e.g. {"mem_fraction_static": 0.8}')
    trust_remote_code: bool = option(False, "run code that the checkpoint brings along (tokenizer, config)")
    revision: str | None = option(None, "revision of a hub id")
    seed: int = option(0, "random seed of the engine")
    # Instead of capturing.
    plan: bool = option(False, "print tokens, bytes and time for this model and data, then stop")
    status: str | None = option(None, "print where a directory stands, then stop")
    verify: str | None = option(None, "read and check every file of a directory, then stop")
    repair: bool = option(False, "with --verify: drop what is damaged from the manifest, so that a resume redoes it")
    json: bool = option(False, "with --status, --verify or --plan: print JSON")


def main() -> int:
    args = parse(ExtractArguments, "extract", description=__doc__)
    if args.status:
        report = status(args.status)
        print(json.dumps(report, indent=1) if args.json else status_text(report))
        return 0
    if args.verify:
        return verify_directory(args)
    needed = ("model", "data") if args.plan else ("model", "data", "output")
    if missing := [f"--{name}" for name in needed if not getattr(args, name)]:
        raise UserError(f"{', '.join(missing)} missing; see python extract.py --help")
    target = read_target(args)
    if args.plan:
        if args.regenerate:
            raise UserError("--plan with --regenerate: the answers' lengths are not known yet; answer first, then plan "
                            "with --data OUTPUT/chats.jsonl")  # fmt: skip
        with Progress("plan", total=None, unit="rows", stream=sys.stderr) as progress:
            samples, _ = tokenize(args, target, read_rows(args), None, None, progress)
        replicas = place_process(args, target["device"], max(target["gpus"], args.tp)).replicas
        gpus = args.tp * replicas
        plan = plan_of(args, samples, target, gpus)
        training = training_plan(samples, target, plan["bytes"], plan["bytes_per_token"], gpus)
        if args.json:
            print(json.dumps(plan | {"training": training}, indent=1))
        else:
            if target["device"] == "cpu":
                print(cpu_text(plan, training))
            print(plan_text(plan) + ("\n" + training_text(training, gpus) if training else ""))
        return 0

    rank, world_size, _ = ranks.join("cpu", patience=timedelta(days=30))
    placement = place_process(args, target["device"], target["gpus"])
    terminal = os.fdopen(os.dup(1), "w", buffering=1)  # SGLang's own output goes to a log file, ours stays here
    try:
        return extract(args, target, placement, rank, world_size, terminal)
    finally:
        ranks.leave()


def extract(args, target: dict, placement: Placement, rank: int, world_size: int, terminal) -> int:
    """One process of the job: open the directory, tokenize, start the engine, capture its share of the rows."""
    out = Path(args.output)
    leader = rank == 0

    def open_directory(as_leader: bool, rows: int, per_block: int | None):
        return RunDirectory(
            out, identity(args, target), rows=rows, layout=args.layout, rows_per_block=per_block, leader=as_leader
        )

    run_directory = None

    def prepare():
        """On rank 0: rows and the directory, with every complaint that needs no engine."""
        nonlocal run_directory
        rows = read_rows(args)
        per_block = args.rows_per_block
        if per_block is None and placement.replicas > 1 and not (out / "dataset.json").exists():
            per_block = max(1, min(2000, len(rows) // (4 * placement.replicas)))  # four blocks a replica, to share out
        run_directory = open_directory(True, len(rows), per_block)
        run_directory.note(model_path=os.path.abspath(target["folder"]))
        return rows

    rows = ranks.from_first(prepare)
    meeting = meeting_place(args, placement)
    heartbeat = out / ("heartbeat.json" if leader else f"heartbeat-{rank}.json")
    progress = Progress("extract", total=None, heartbeat=heartbeat, stream=terminal, quiet=not leader)
    engine = None
    interrupted = Interrupts()
    try:
        for line in run_directory.found.lines() if leader else ():
            progress.note(line)
        if args.regenerate:
            done = ranks.from_first(lambda: set(answered(out / "answers", rows)))
            left = [row for row in rows if row.index not in done]
            mine = [row for row in left if row.index % placement.replicas == placement.replica]
            if mine and placement.starts_engine:
                engine = start(args, target, placement, meeting, out, progress, decode_graphs=True)
            rows = regenerate(args, target, placement, rows, done, mine, out, engine, progress, interrupted)
        samples, pending = ranks.from_first(lambda: tokenize(args, target, rows, run_directory, out, progress))
        if not leader:
            run_directory = open_directory(False, len(rows), None)
        share = own_share(samples, pending, run_directory.rows_per_block, placement)
        progress.total = len(samples)
        figures = Figures(progress, out, done_before=len(samples) - len(pending), replicas=placement.replicas)
        if engine is None and placement.starts_engine and share:
            engine = start(args, target, placement, meeting, out, progress)
        checks = None
        if engine is not None and placement.engine_node == 0 and share:
            checks = engine.loop.run_until_complete(
                capture(args, target, run_directory, share, engine, figures, progress, interrupted)
            )
        progress.stage("waiting for the other replicas" if world_size > 1 else "finishing")
        shares = ranks.gathered(figures.share() | {"checks": checks, "stopped": interrupted.seen})
        if placement.engine_nodes > 1:
            from common.engine import expect_the_end

            expect_the_end()
            ranks.gathered(None)  # only now may a node stop its part of the engine
        every_check = [share["checks"] for share in shares if share["checks"]]
        progress.update(figures.done())
        if leader and every_check:
            earlier = run_directory.info.get("run", {}).get("self_checks", [])
            run_directory.note(self_checks=earlier + every_check)
        if any(share["stopped"] for share in shares):
            progress.close(resume_line(run_directory, len(samples), "stopped"))
            return EXIT_INTERRUPTED
        if leader:
            run_directory.finish(arguments=as_dict(args))
            if left := run_directory.pending():
                raise UserError(f"{len(left):,} captured rows are missing in {out}: files were removed meanwhile")
        progress.close(summary(run_directory, out, shares) if leader else None)
        return 0
    except (UserError, KeyboardInterrupt) as error:
        if isinstance(error, EngineDied):
            error = UserError(f"{error} (log: {engine_log(out, placement)})")
        if progress.total is None or run_directory is None:
            raise error from None
        progress.close()
        if isinstance(error, KeyboardInterrupt):
            if leader or not str(error):  # what all ranks agreed on is told once
                terminal.write(resume_line(run_directory, progress.total, str(error) or "stopped") + "\n")
            return EXIT_INTERRUPTED
        raise UserError(f"{error}. {resume_line(run_directory, progress.total, 'Stopped')}") from None
    finally:
        progress.close()
        if engine is not None:
            from common.engine import stop_engine

            stop_engine(engine)
        if run_directory is not None:
            run_directory.close()


# ---- engine and capture --------------------------------------------------------------------------------------------


def start(
    args, target: dict, placement: Placement, meeting: dict, out: Path, progress: Progress, decode_graphs: bool = False
):
    """The engine of this replica; takes a minute or more."""
    from common.engine import EngineSettings, start_engine

    progress.stage("loading the engine")
    settings = EngineSettings(
        model=target["folder"],
        points=target["points"],
        tp=args.tp,
        trust_remote_code=args.trust_remote_code,
        device=target["device"],
        dtype=args.dtype,
        chunk_tokens=chunk_tokens(args, target),
        seed=args.seed,
        decode_graphs=decode_graphs and target["device"] == "cuda",
        extra=target["engine_arguments"],
        placement=placement,
        writers=args.writers,
        **meeting,
    )
    return start_engine(settings, engine_log(out, placement))


def meeting_place(args, placement: Placement) -> dict:
    """Where the nodes of a replica that spans several meet; every process of the job calls it."""
    if placement.engine_nodes == 1:
        return {}
    from common.tap_link import Links

    first = placement.starts_engine and placement.engine_node == 0
    links = Links(args.tp, args.writers, over_nodes=True) if first else None
    line = ranks.gathered(links.where if links else None)[placement.first_rank]
    address = ranks.gathered(f"{socket.gethostname()}:{free_port(placement.replica)}")[placement.first_rank]
    return {"init_address": address, "links": links, "line": line}


def engine_log(out: Path, placement: Placement) -> Path:
    return out / "logs" / f"engine-{placement.replica}-{placement.engine_node}.log"


async def capture(args, target, run_directory, share, engine, figures, progress, interrupted):
    """Capture this replica's samples; returns the result of the self-checks."""
    from common.capture import Capture

    settings = {
        "hidden_size": target["hidden_size"],
        "dtype": args.state_dtype,
        "last_state": args.last_state,
        "ring_bytes": int(args.ring_gb * 1e9),
        "tokens_in_flight": 4 * (chunk_tokens(args, target) or 16384),
    }
    longest, limit = max(share, key=lambda row: len(row.input_ids)), engine.tokenizer_manager.max_req_input_len
    if len(longest.input_ids) > limit:
        raise UserError(
            f"row {longest.index}: {len(longest.input_ids)} tokens, but this engine takes {limit} (then its key/value "
            f"cache is full); set --max-length {limit}, or give the engine more memory"
        )
    progress.stage("proving the first batch")
    async with Capture(engine, run_directory, target["points"], settings, figures.committed, progress.note) as session:
        figures.begin(session)
        with interrupted.watched(session.stop, session.fail, lambda: f"{len(session.samples):,} samples", progress):
            await session.take(share)
    return session.self_checks()


def regenerate(args, target, placement, rows, done, mine, out, engine, progress, interrupted) -> list:
    """Let the target answer `mine` of the rows; returns all rows with their answers, read back from chats.jsonl.

    done: indices of the rows that were answered before.
    """
    from common.engine import MOST_DECODING, when_it_dies

    folder, remarks = out / "answers", Counter()
    if engine is not None and placement.engine_node == 0 and mine:
        folder.mkdir(exist_ok=True)
        progress.begin(len(rows), "conversations", len(done))
        figures = AnswerFigures(progress, out, len(done))
        progress.stage("answering")

        async def go():
            given_up = GivenUp()
            when_it_dies(engine, lambda: given_up.give_up(EngineDied("a process of the engine died")))
            in_flight = lambda: f"{min(len(mine) - figures.rows, MOST_DECODING):,} conversations"  # noqa: E731
            with interrupted.watched(lambda: None, given_up.give_up, in_flight, progress):
                return await answer(
                    engine, mine, target["tokenizer"], folder / f"answers-{placement.replica}.jsonl",
                    temperature=args.temperature, max_new_tokens=args.max_new_tokens, context_length=target["context"],
                    template_kwargs=target["template_kwargs"], on_done=figures.answered, given_up=given_up,
                    should_stop=lambda: interrupted.seen,
                )  # fmt: skip

        remarks = engine.loop.run_until_complete(go())
        progress.begin(len(rows), "samples")
    progress.stage("waiting for the other replicas" if placement.replicas > 1 else "collecting answers")
    for text, count in sum(ranks.gathered(remarks), Counter()).items():  # when all replicas have answered
        progress.note(f"{count:,} {text}")
    chats = out / "chats.jsonl"

    def collect() -> int:
        """Returns how many conversations are answered."""
        complete = answered(folder, rows)
        if len(complete) == len(rows):
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for _, row in sorted(complete.items()))
            write_atomically(chats, lines.encode(errors="backslashreplace"))
        return len(complete)

    count = ranks.from_first(collect)
    if count < len(rows) or any(ranks.gathered(interrupted.seen)):
        raise KeyboardInterrupt(f"stopped while answering ({count:,} of {len(rows):,} conversations are answered)")
    return load_rows(str(chats))


def verify_directory(args) -> int:
    progress = Progress("verify", total=None, unit="files", stream=sys.stderr)
    tick = lambda files, nbytes: progress.update(files, read=f"{nbytes / 1e9:.3f} GB")  # noqa: E731
    found = verify(args.verify, repair=args.repair, progress=tick)
    progress.close()
    print(json.dumps(found.as_dict(), indent=1) if args.json else "\n".join(found.lines()))
    return 0 if found.clean or found.repaired else 1


if __name__ == "__main__":
    run(main)
