"""The whole story on one GPU: a model's own conversations, its states, a drafter, its acceptance in both modes.

    python benchmarks/end_to_end.py --model build/SmolLM2-135M-Instruct --work W --number 10000 \\
        --prompts mt_bench.jsonl gsm8k.jsonl
    python benchmarks/end_to_end.py --model build/SmolLM2-135M-Instruct --work W --number 8 --max-new-tokens 16 \\
        --train '--max-steps 4 --tokens-per-step 512 --eval-fraction 0.3'                       # tries it on a CPU

Stages, each a program a person could run, each with its output in W/logs: benchmarks/user_turns.py makes user turns;
extract.py --regenerate answers them (temperature 0) and captures; train_drafter.py; eval_acceptance.py on the held-out
states, and in the engine on --prompts (GPU). A stage that is done is not done again, so the same command goes on where
it stopped. The last lines are a table of what each stage took and what came out, and RESULT {json}.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.extraction import GPU_ARGUMENTS  # noqa: E402
from common.engine import available_device  # noqa: E402
from common.shard_check import status  # noqa: E402


def run(work: Path, name: str, seconds: dict, *command) -> None:
    """Run one stage unless it is done; its output goes to W/logs/NAME.txt. Ends this program when the stage fails."""
    done, log = work / f"{name}.seconds", work / "logs" / f"{name}.txt"
    if not done.exists():
        print(f"{name}: {shlex.join(map(str, command))}", flush=True)
        started = time.perf_counter()
        with log.open("w") as file:
            code = subprocess.call([sys.executable, *map(str, command)], cwd=ROOT, stdout=file, stderr=file)
        print("\n".join(log.read_text().splitlines()[-4:]), flush=True)
        if code:
            raise SystemExit(f"error: {name} ended with {code}; its output is {log}")
        done.write_text(f"{time.perf_counter() - started:.1f}")
    seconds[name] = float(done.read_text())


def train_figures(folder: Path) -> dict:
    """Medians of the second half of the steps, and the evaluation with the largest tau."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    evaluations = [line for line in lines if line["kind"] == "eval"]
    half = sorted(line["tokens_per_second"] for line in steps[len(steps) // 2 :])
    best = max(evaluations, key=lambda line: line["tau"])
    return {
        "steps": steps[-1]["step"],
        "tokens_per_second": half[len(half) // 2],
        "skipped_steps": steps[-1]["skipped_steps"],
        "set_aside": steps[-1]["set_aside"],
        "curve": [(line["step"], round(line["step0_accuracy"], 4), round(line["tau"], 4)) for line in evaluations],
        "best": {name: best[name] for name in ("step", "step0_accuracy", "tau")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--data", help="conversations to answer; default: user turns that the model makes up")
    parser.add_argument("--number", type=int, default=10_000, help="conversations")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="longest answer, tokens")
    parser.add_argument("--prompts", nargs="+", help="JSON-lines files for the engine")
    parser.add_argument("--max-prompts", type=int, help="of those; default: all")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8], help="conversations in flight there")
    parser.add_argument("--extract", default="", help="further arguments of extract.py")
    parser.add_argument("--train", default="", help="further arguments of train_drafter.py")
    parser.add_argument("--engine-args", default=json.dumps(GPU_ARGUMENTS if available_device()[0] == "cuda" else {}))
    args = parser.parse_args()
    work, seconds = args.work.resolve(), {}
    (work / "logs").mkdir(parents=True, exist_ok=True)
    states, drafter, engine = work / "states", work / "drafter", ("--engine-args", args.engine_args)

    if not args.data:
        args.data = work / "turns.jsonl"
        run(work, "user turns", seconds, "benchmarks/user_turns.py", "--model", args.model, "--number", args.number,
            "--output", args.data, *engine)  # fmt: skip
    run(work, "answers and states", seconds, "extract.py", "--model", args.model, "--data", args.data,
        "--output", states, "--limit", args.number, "--regenerate", "--max-new-tokens", args.max_new_tokens, *engine,
        *shlex.split(args.extract))  # fmt: skip
    run(work, "verify", seconds, "extract.py", "--verify", states)
    run(work, "training", seconds, "train_drafter.py", "--model", args.model, "--data", states, "--output", drafter,
        *shlex.split(args.train))  # fmt: skip
    run(work, "offline", seconds, "eval_acceptance.py", "--model", args.model, "--drafter", drafter, "--data", states,
        "--output", work / "offline")  # fmt: skip
    if args.prompts:
        run(work, "engine", seconds, "eval_acceptance.py", "--model", args.model, "--drafter", drafter, "--prompts",
            *args.prompts, "--batch-sizes", *args.batch_sizes, "--max-new-tokens", 256, "--check-parity", "--output",
            work / "engine", *engine, *(["--max-samples", args.max_prompts] if args.max_prompts else []))  # fmt: skip

    captured, trained = status(states), train_figures(drafter)
    offline = json.loads((work / "offline" / "report.json").read_text())["offline"][0]["summary"]
    rows = [
        ("captured", f"{captured['committed']:,} samples, {captured['tokens']:,} tokens, "
                     f"{captured['set_aside']} set aside, {captured['damaged']} damaged"),
        ("capture", f"{captured['samples_per_second'] or 0:,.1f} samples/s, "
                    f"{captured['tokens_per_second'] or 0:,.0f} tokens/s between commits"),
        ("training", f"{trained['steps']:,} steps, {trained['tokens_per_second']:,.0f} tokens/s, "
                     f"{trained['set_aside']} set aside, {trained['skipped_steps']} skipped"),
        ("curve (step, step-0, tau)", " ".join(map(str, trained["curve"]))),
        ("held-out step-0 accuracy", f"{offline['step0_accuracy']:.4f} {offline['step0_accuracy_95']}"),
        ("held-out tau", f"{offline['tau']:.4f} {offline['tau_95']}"),
    ]  # fmt: skip
    result = {"seconds": seconds, "captured": captured, "trained": trained, "offline": offline}
    if args.prompts:
        result["engine"] = report = json.loads((work / "engine" / "report.json").read_text())
        for each in report["engine"]:
            spec = each["speculative"]
            rows.append((f"engine, batch {each['batch_size']}",
                         f"tau {spec['tau']:.4f}, step-0 {spec['step0_accuracy']:.4f}, {each['speed_up']:.2f} x plain, "
                         f"{each['identical_share']:.1%} same output"))  # fmt: skip
        rows += [("parity", line) for line in report["parity"]["lines"]]
        result["engine"] = {name: report[name] for name in ("engine", "parity")}
    print()
    for name, value in [*((f"{name} took", f"{took:.1f} s") for name, took in seconds.items()), *rows]:
        print(f"{name:<26} {value}")
    print("RESULT " + json.dumps(result, default=str))


if __name__ == "__main__":
    main()
