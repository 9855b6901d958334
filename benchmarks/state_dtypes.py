"""What storing the capture points in eight bits costs a drafter: step-0 accuracy and tau, without a second extraction.

    python benchmarks/state_dtypes.py --states states/ --work W --seeds 3 --epochs 3                  # on a GPU
    python benchmarks/state_dtypes.py --states build/demo/states --work W --tokens-per-step 1024 --max-steps 120 \\
        --ttt-steps 3 --eval-fraction 0.15 --learning-rate 1e-3                                    # the demo, on a CPU
    python benchmarks/state_dtypes.py --states build/demo/states --work W --rows 12 --tokens-per-step 256 \\
        --max-steps 2 --ttt-steps 2 --eval-fraction 0.3 --draft-vocab-size 512                     # tries it

From a directory of bfloat16 shards (layout v1 or arrow) it makes the same in fp8 through the writer that extract.py
uses, trains a drafter on each with train_drafter.py (same rows, order, seed) and judges both with eval_acceptance.py on
the same held-out rows of the bfloat16 directory: served states are not rounded. Several seeds show what of a difference
is chance. Prints the figures side by side and RESULT {json}.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from common.cpu_threads import compute_alone  # noqa: E402
from common.errors import UserError, run  # noqa: E402
from common.report import print_table  # noqa: E402
from common.shard_run import OWN_FIELDS, RunDirectory  # noqa: E402
from common.shard_writing import write_sample  # noqa: E402
from common.shards import ShardReader  # noqa: E402
from common.state_dtypes import scale_of, stored_dtypes, to_stored  # noqa: E402


def rewrite(states: Path, out: Path, dtype: str, rows: int | None, threads: int = 4) -> int:
    """The samples of `states` (the first `rows`) in `dtype`, as extract.py would have written them; returns bytes."""
    reader = ShardReader(states)
    if reader.info.get("dtype") != "bfloat16" or reader.info.get("last_state_rows", "all") != "all":
        raise UserError(f"{states}: expected bfloat16 states with every last state, which extract.py writes by default")
    identity = {key: value for key, value in reader.info.items() if key not in OWN_FIELDS} | {"dtype": dtype}
    records = reader.records[:rows]

    def write(record):
        sample = reader.load(record)
        dtypes = stored_dtypes(dtype, len(sample.states) - 1)
        pairs = [to_stored(state.contiguous(), dtype) for state, dtype in zip(sample.states, dtypes, strict=True)]
        scales = scale_of(torch.stack([largest for _, largest in pairs[:-1]], 1)) if dtype == "fp8" else None
        stored = [state for state, _ in pairs]
        written = write_sample(
            out, record.index, sample.input_ids, sample.loss_mask, stored, "v1", directory.rows_per_block, scales
        )
        return replace(record, bytes=written.bytes, xxh3=written.xxh3)

    with RunDirectory(out, identity, rows=records[-1].index + 1, layout="v1") as directory:
        wanted = set(directory.pending())
        with ThreadPoolExecutor(threads, initializer=compute_alone, initargs=(torch.get_num_threads(),)) as pool:
            for first in range(0, len(records), 256):
                some = [record for record in records[first : first + 256] if record.index in wanted]
                directory.commit(pool.map(write, some))
        directory.finish(model_path=reader.info.get("run", {}).get("model_path"))
        return sum(record.bytes for record in directory.committed.values())


def call(script: str, *arguments) -> None:
    subprocess.run([sys.executable, str(ROOT / script), *map(str, arguments)], check=True, cwd=ROOT)


def main() -> None:
    parser = argparse.ArgumentParser(  # no abbreviations: --seed is train_drafter.py's, not --seeds
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--states", type=Path, required=True, help="bfloat16 shards that extract.py wrote")
    parser.add_argument("--work", type=Path, required=True, help="folder for the fp8 copy, drafters and reports")
    parser.add_argument("--model", help="target checkpoint; default: the one that the shards name")
    parser.add_argument("--rows", type=int, help="use the first so many samples only")
    parser.add_argument("--seeds", type=int, default=1, help="drafters of each kind")
    parser.add_argument("--num-steps", type=int, default=3, help="drafted tokens a cycle in the evaluation")
    parser.add_argument("--eval-fraction", type=float, default=0.02, help="held-out share")
    parser.add_argument("--device", default="auto", help="auto, cuda or cpu")
    arguments, training = parser.parse_known_args()  # the rest goes to train_drafter.py
    if arguments.seeds < 1:
        parser.error("--seeds: expected 1 or more")
    work, model = arguments.work.resolve(), ["--model", arguments.model] if arguments.model else []
    results, data = [], {"bfloat16": arguments.states.resolve(), "fp8": work / "fp8"}
    if arguments.rows:
        data["bfloat16"] = work / "bfloat16"
        rewrite(arguments.states, data["bfloat16"], "bfloat16", arguments.rows)
    size = {"bfloat16": sum(record.bytes for record in ShardReader(data["bfloat16"]).records)}
    size["fp8"] = rewrite(arguments.states, data["fp8"], "fp8", arguments.rows)
    for seed in range(arguments.seeds):
        drafters = {dtype: work / f"drafter-{dtype}-{seed}" for dtype in size}
        for dtype, drafter in drafters.items():
            call("train_drafter.py", "--data", data[dtype], "--output", drafter, "--seed", seed, *model, "--device",
                 arguments.device, "--eval-fraction", arguments.eval_fraction, *training)  # fmt: skip
        device = [] if arguments.device == "auto" else ["--device", arguments.device]
        call("eval_acceptance.py", "--drafter", *(drafter / "final" for drafter in drafters.values()), "--data",
             data["bfloat16"], "--split", "held-out", "--eval-fraction", arguments.eval_fraction, "--num-steps",
             arguments.num_steps, "--output", work / f"report-{seed}", *model, *device)  # fmt: skip
        offline = json.loads((work / f"report-{seed}" / "report.json").read_text())["offline"]
        for dtype, result in zip(size, offline, strict=True):
            figures = result["summary"]
            names = ("positions", "step0_accuracy", "step0_accuracy_95", "tau", "tau_95", "length_per_position")
            results.append({"dtype": dtype, "seed": seed, **{name: figures[name] for name in names}})
    header = ["states", "seed", "step-0 accuracy", "95 %", "tau", "95 %", "tokens a position", "GB"]
    lines = []
    for each in results:
        spread = [f"{low:.4f} - {high:.4f}" for low, high in (each["step0_accuracy_95"], each["tau_95"])]
        step0, tau, length = (f"{each[name]:.4f}" for name in ("step0_accuracy", "tau", "length_per_position"))
        gb = f"{size[each['dtype']] / 1e9:.3f}"
        lines.append([each["dtype"], str(each["seed"]), step0, spread[0], tau, spread[1], length, gb])
    for dtype in size:
        of = [each for each in results if each["dtype"] == dtype]
        mean = {name: sum(each[name] for each in of) / len(of) for name in ("step0_accuracy", "tau")}
        lines.append([dtype, "mean", f"{mean['step0_accuracy']:.4f}", "", f"{mean['tau']:.4f}", "", "", ""])
    print_table(f"held-out rows of {arguments.states}, {results[0]['positions']:,} positions", header, lines)
    print("RESULT " + json.dumps({"bytes": size, "results": results}))


if __name__ == "__main__":
    run(main)
