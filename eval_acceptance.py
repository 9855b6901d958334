"""How much of what a drafter says the target accepts: offline from captured states, in SGLang's engine, and whether
the two agree.

    python eval_acceptance.py --drafter drafter/ --data states/                  # offline: no SGLang, a laptop does
    python eval_acceptance.py --drafter drafter/ --model M --prompts mt_bench.jsonl gsm8k.jsonl    # in SGLang, on a GPU
    python eval_acceptance.py --drafter drafter/ --model M --prompts gsm8k.jsonl --check-parity    # do they agree? GPU
    python eval_acceptance.py --diagnose states/ --model M                       # what do these states really hold?

Writes report.json (everything), acceptance.png and acceptance.md into --output and prints the tables. The figures and
their estimators are defined in common/acceptance.py. Exit status: 0, 1 when --check-parity or --diagnose found
something wrong, 2 for bad input. A YAML file as first argument holds the same names (section `eval`).
"""

import itertools
import json
import time
from dataclasses import dataclass, field
from pathlib import Path

from common import arguments as command_line
from common import errors, report
from common.errors import UserError
from common.progress import Progress


@dataclass
class Arguments:
    # What is evaluated.
    drafter: list[str] | None = field(
        default=None, metadata={"help": "drafter folders (SGLang or speculators format); several are compared"}
    )
    data: list[str] | None = field(default=None, metadata={"help": "shard folders: evaluate offline from these states"})
    prompts: list[str] | None = field(
        default=None, metadata={"help": "JSON-lines files with `turns` or `messages`: evaluate in SGLang's engine"}
    )
    diagnose: str | None = field(default=None, metadata={"help": "shard folder: say what its states really are"})
    model: str | None = field(
        default=None, metadata={"help": "target: folder or hub id (default: the one that dataset.json of --data names)"}
    )
    capture_points: list[int] | None = field(
        default=None, metadata={"help": "layers the drafter reads, where its own config.json is wrong or silent"}
    )
    data_points: list[int] | None = field(
        default=None, metadata={"help": "capture points of the states in --data, where another program wrote them"}
    )
    output: str | None = field(
        default=None,
        metadata={"help": "folder for the report (default: acceptance; acceptance-engine without --data; diagnosis)"},
    )

    # How it drafts: several values are swept.
    num_steps: list[int] = field(default_factory=lambda: [3], metadata={"help": "drafted tokens a cycle"})
    topk: list[int] = field(
        default_factory=lambda: [1], metadata={"help": "branches a node; above 1: a draft tree"}
    )
    draft_tokens: list[int] | None = field(
        default=None,
        metadata={"aliases": ["--tree-tokens"], "help": "tokens verified a cycle (default: steps + 1, or 8 x topk)"},
    )
    temperature: float = field(
        default=0.0, metadata={"help": "sampling temperature; above 0 offline adds the expected acceptance"}
    )

    # Offline.
    split: str = field(
        default="held-out", metadata={"help": "samples to use", "choices": ["held-out", "train", "all"]}
    )
    eval_fraction: float | None = field(
        default=None, metadata={"help": "held-out share, 0-1 (default: what the drafter was trained with, else 0.02)"}
    )
    max_samples: int | None = field(
        default=None, metadata={"help": "evaluate at most this many samples or prompts, evenly spread over all"}
    )
    device: str | None = field(default=None, metadata={"help": "cpu or cuda (default: cuda where there is one)"})
    verify: bool = field(default=False, metadata={"help": "check the checksum of every sample that is read"})
    bootstrap: int = field(default=1000, metadata={"help": "resamples for the 95%% intervals; 0: none"})
    seed: int = field(default=0, metadata={"help": "seed of the bootstrap and of the engine"})

    # In the engine.
    batch_sizes: list[int] = field(
        default_factory=lambda: [1, 8, 16], metadata={"help": "requests at once, one measurement each"}
    )
    max_new_tokens: int = field(default=512, metadata={"help": "longest reply, tokens"})
    tp: int = field(default=1, metadata={"help": "GPUs the target is split over"})
    trust_remote_code: bool = field(default=False, metadata={"help": "run the model folder's own Python code"})
    engine_args: str | None = field(default=None, metadata={"help": "further sglang.ServerArgs as a JSON object"})
    check_parity: bool = field(
        default=False, metadata={"help": "score the engine's replies offline too; fail when tau differs by over 3%%"}
    )

    # Doctor.
    reference: str = field(
        default="sglang",
        metadata={"help": "what computes the states to compare with", "choices": ["sglang", "transformers"]},
    )


def main() -> int:
    arguments = command_line.parse(Arguments, "eval", description=__doc__)
    usual = "diagnosis" if arguments.diagnose else "acceptance" if arguments.data else "acceptance-engine"
    arguments.output = arguments.output or usual
    check(arguments)
    if arguments.diagnose:
        from common.doctor_run import diagnose

        return diagnose(arguments)
    settings, status = settings_of(arguments), 0
    found = report.Report(Path(arguments.output) / "report.json", command_line.as_dict(arguments))
    try:
        if arguments.data:
            offline(arguments, settings, found)
        if arguments.prompts:
            from common.engine_eval import in_engine

            found.begin("preparing the engine's evaluation")
            status = in_engine(arguments, settings, found)
    except Exception as error:
        if not found.measured:
            raise
        ending = found.failed(error)
        show(arguments, found.content)
        raise ending from None
    found.finish()
    show(arguments, found.content)
    return status


def check(arguments: Arguments) -> None:
    """UserError for whatever the arguments alone show to be wrong."""
    for name in ("max_samples", "max_new_tokens", "tp", "batch_sizes"):
        values = getattr(arguments, name)
        for value in values if isinstance(values, list) else [values]:
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} {value}: expected 1 or more")
    for name in ("temperature", "bootstrap"):
        if getattr(arguments, name) < 0:
            raise UserError(f"--{name} {getattr(arguments, name)}: expected 0 or more")
    if arguments.diagnose:
        return
    for name in ("drafter", "data", "prompts", "num_steps", "topk", "draft_tokens", "batch_sizes"):
        values = getattr(arguments, name) or []
        one = [str(Path(value).resolve()) if isinstance(value, str) else value for value in values]
        if twice := [value for place, value in enumerate(values) if one[place] in one[:place]]:
            raise UserError(f"--{name.replace('_', '-')} names {twice[0]} twice; give each once")
    if not arguments.drafter:
        raise UserError("nothing to evaluate: give --drafter (or --diagnose)")
    if not arguments.data and not arguments.prompts:
        raise UserError("give --data (shards, offline) or --prompts (JSON lines, in the engine), or both")
    if arguments.prompts and arguments.model is None:
        raise UserError("--prompts needs --model: the folder of the target, or its hub id")
    if arguments.check_parity and not arguments.prompts:
        raise UserError("--check-parity needs --prompts: it scores the engine's replies in both modes")
    if arguments.check_parity and arguments.temperature > 0:
        raise UserError("--check-parity compares greedy decoding; leave --temperature at 0")


def settings_of(arguments: Arguments) -> list:
    """The swept combinations, as `offline_eval.Setting`; raises UserError for one that SGLang would not run."""
    from common.draft_tree import check_tree_arguments
    from common.offline_eval import Setting

    settings = []
    for steps, topk in itertools.product(arguments.num_steps, arguments.topk):
        if steps < 1 or topk < 1:
            raise UserError(f"--num-steps {steps} --topk {topk}: both must be at least 1")
        most = topk + (steps - 1) * topk**2 + 1
        for tokens in arguments.draft_tokens or [steps + 1 if topk == 1 else min(8 * topk, most)]:
            check_tree_arguments(steps, topk, tokens)
            settings.append(Setting(steps, topk, tokens, arguments.temperature))
    return settings


def name_of(name: str, setting, several: bool) -> str:
    """What tables and pictures call a result. name: the drafter's."""
    return f"{name} {setting.num_steps}/{setting.topk}/{setting.tree_tokens}" if several else name


# ---- offline ---------------------------------------------------------------------------------------------------------


def offline(arguments: Arguments, settings: list, found: report.Report) -> None:
    """Evaluate every drafter at every setting from the states in --data, into "data" and "offline" of the report."""
    import torch

    from common.load_batch import not_finite
    from common.load_drafter import load_drafter
    from common.offline_eval import check_fit, evaluate, evaluation_target, points_in_order
    from common.shards import ShardReader
    from common.target import load_target_parts, model_of, target_folder, text_config

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    reader = ShardReader(arguments.data, arguments.data_points)
    model = arguments.model or model_of(reader.info)
    if model is None:
        raise UserError(f"{arguments.data[0]}: no dataset.json names the target model; give --model")
    target = load_target_parts(target_folder(model, reader.info))
    if reader.foreign:
        points_in_order(reader, text_config(target.config)["num_hidden_layers"])  # complains when nobody names them
    fraction = held_out_fraction(arguments)
    records = choose(arguments, reader.records, fraction)
    points = tuple(arguments.capture_points) if arguments.capture_points else None
    sample = reader.load(records[0])
    drafters = []
    for path in arguments.drafter:  # all are checked before the first is evaluated
        drafter, _ = load_drafter(path, target.config, points)
        check_fit(drafter.config, reader.info, target, sample, path, arguments.data[0])
        if (widest := max(setting.topk for setting in settings)) > drafter.config.draft_vocab_size:
            raise UserError(f"--topk {widest}: {path} can name only {drafter.config.draft_vocab_size} tokens")
        drafters.append(drafter)

    target = evaluation_target(target, device)
    notes, bad, empty = list(reader.remarks), {}, set()  # bad, empty: by path, an index may stand in every directory
    results: list[dict] = []
    data = {
        "paths": arguments.data, "target": str(model), "split": arguments.split, "eval_fraction": fraction,
        "committed_samples": len(reader.records), "chosen_samples": len(records), "dataset": reader.info,
        "notes": notes,
    }  # fmt: skip

    def load(record):
        """The sample, or None where its states cannot be used; which and why is in `bad`."""
        sample = reader.load(record, arguments.verify)
        reason = not_finite(list(sample.states))
        if reason is None:
            if not sample.loss_mask[2:].any():
                empty.add(record.path)
            return sample
        if record.path not in bad:
            progress.note(f"warning: {record.path}: {reason}; left out")
        bad[record.path] = f"{record.path}: {reason}"

    several, names = len(settings) > 1, report.names_of(arguments.drafter)
    total = len(records) * len(drafters) * len(settings)
    with Progress("evaluate", total, heartbeat=Path(arguments.output) / "heartbeat.json") as progress:
        for line in reader.remarks:
            progress.note("warning: " + line)
        done = 0
        for path, drafter in zip(arguments.drafter, drafters, strict=True):
            too_long = sum(record.tokens > drafter.config.max_position_embeddings for record in records)
            if too_long:
                notes.append(
                    f"{path}: {too_long} of {len(records)} samples are longer than its max_position_embeddings "
                    f"{drafter.config.max_position_embeddings}; served replies of that length may collapse"
                )
                progress.note("warning: " + notes[-1])
            drafter.set_embedding(target.embed_tokens[: drafter.config.vocab_size])
            drafter = drafter.to(device)
            if device != "cpu":
                drafter.compute_dtype = torch.bfloat16
            for setting in settings:
                name, started = name_of(names[path], setting, several), time.monotonic()
                progress.stage(name)
                found.begin(f"offline evaluation of {name}")

                def tick(samples, counts, name=name, before=done, started=started):
                    rate = counts.positions / (time.monotonic() - started)
                    progress.update(before + samples, drafter=name, positions_per_second=rate)

                counts = evaluate(drafter, target, load, records, setting, tick)
                done += len(records)
                left = {"left_out": sorted(bad.values()), "nothing_supervised": len(empty)}
                data |= {"samples": len(records) - len(bad) - len(empty), **left}
                if not counts.rows:
                    raise UserError(
                        f"nothing can be evaluated on the {arguments.split} split of {', '.join(arguments.data)}: "
                        f"{report.samples_told(data)}"
                    )
                progress.stage("intervals")
                results.append(
                    {
                        "name": name,
                        "drafter": path,
                        "setting": vars(setting).copy(),
                        "summary": counts.summary(arguments.bootstrap, arguments.seed),
                        "breakdown": counts.breakdown(arguments.bootstrap, arguments.seed),
                    }
                )
                found.content |= {"data": data, "offline": results}
                found.save()
            drafter.to("cpu")
        progress.close()


def held_out_fraction(arguments: Arguments) -> float:
    """--eval-fraction, or what the drafters' own training arguments say; they must agree."""
    if arguments.eval_fraction is not None:
        return arguments.eval_fraction
    found = {}
    for drafter in arguments.drafter:
        for folder in (Path(drafter), Path(drafter).parent):
            path = folder / "arguments.json"
            if path.is_file():
                try:
                    saved = json.loads(path.read_text())
                except (OSError, ValueError) as error:
                    raise UserError(f"{path}: cannot be read ({error}); give --eval-fraction, or remove it") from None
                if "eval_fraction" in saved:
                    found[str(path)] = float(saved["eval_fraction"])
                    break
    if len(set(found.values())) > 1:
        raise UserError(f"the drafters held out different shares of the data: {found}; give --eval-fraction")
    return next(iter(found.values()), 0.02)


def choose(arguments: Arguments, records: list, fraction: float) -> list:
    """The records of the split, in order, at most --max-samples. Raises UserError when there are none."""
    from common.batches import is_held_out
    from common.offline_eval import spread

    if arguments.split != "all":
        wanted = arguments.split == "held-out"
        chosen = [record for record in records if is_held_out(record.row_hash, fraction) == wanted]
    else:
        chosen = list(records)
    if not chosen:
        raise UserError(
            f"the {arguments.split} split of {', '.join(arguments.data)} is empty ({len(records)} samples, held-out "
            f"share {fraction}); give --split all or another --eval-fraction"
        )
    return spread(chosen, arguments.max_samples)


# ---- report ----------------------------------------------------------------------------------------------------------


def show(arguments: Arguments, content: dict) -> None:
    """Tables on the terminal, the picture and the Markdown file."""
    output, picture = Path(arguments.output), None
    if content.get("offline"):
        from common.acceptance_plot import draw

        data = content["data"]
        report.print_table(
            f"Offline acceptance, {data['split']} split: {report.samples_told(data)} of {data['target']}",
            *report.offline_rows(content["offline"]),
        )
        for result in content["offline"]:
            report.print_table(f"{result['name']}: groups", *report.breakdown_rows(result))
        picture = output / "acceptance.png"
        try:
            draw(picture, content["offline"], f"Acceptance of drafted tokens, {data['split']} split")
        except OSError as error:
            print(f"warning: {picture}: cannot be written ({error.strerror or error})")
            picture = None
    if content.get("engine"):
        report.print_table("In SGLang's engine", *report.engine_rows(content["engine"]))
        report.print_table("In SGLang's engine, by category", *report.engine_category_rows(content["engine"]))
        for line in report.engine_remarks(content["engine"]):
            print("warning: " + line)
    if content.get("parity"):
        for line in content["parity"]["lines"]:
            print(line)
    with report.refusing(output / "acceptance.md"):
        (output / "acceptance.md").write_text(report.markdown(content, picture.name if picture else None))
    for path in filter(None, [output / "report.json", picture, output / "acceptance.md"]):
        print(path)
    if "unfinished" not in content:
        more = " --trust-remote-code" * arguments.trust_remote_code + f" --tp {arguments.tp}" * (arguments.tp > 1)
        for line in report.next_lines(content, arguments.model or content["data"]["target"], more):
            print(line)


if __name__ == "__main__":
    errors.run(main)
