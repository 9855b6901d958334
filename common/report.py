"""The acceptance report in its three forms: a table on the terminal, report.json, Markdown for a model card.

Called by eval_acceptance.py with plain dicts (`acceptance.AcceptanceCounts.summary`, `engine_eval` results).
"""

from __future__ import annotations

import errno
import importlib.metadata
import json
import platform
import shlex
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from common.errors import UserError

PACKAGES = ("torch", "transformers", "numpy", "sglang", "safetensors", "datasets", "matplotlib")


def versions() -> dict[str, str | None]:
    """Versions that a figure depends on; None where a package is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


class Report:
    """report.json while it is being measured: saved after each part, so that what fails later loses nothing.

    content: all that is known so far. Until `finish`, its "unfinished" says which part is being measured or has failed.
    """

    def __init__(self, path: Path, arguments: dict):
        require_writable(path)  # found before the work; an earlier report stays until there is something new
        self.path = path
        self.content: dict = {"versions": versions(), "arguments": arguments}

    def begin(self, part: str) -> None:
        """What is measured from here on."""
        self.content["unfinished"] = {"part": part, "error": None}

    def save(self) -> None:
        save_json(self.path, self.content)

    def finish(self) -> None:
        self.content.pop("unfinished", None)
        self.save()

    @property
    def measured(self) -> bool:
        return bool(self.content.get("offline") or self.content.get("engine"))

    def failed(self, error: Exception) -> Exception:
        """Keeps what was measured and returns the error to end with, which says where it is."""
        unfinished = self.content["unfinished"]
        unfinished["error"] = f"{type(error).__name__}: {error}"
        try:
            self.save()
            kept = f"what was measured before it is in {self.path}"
        except UserError as full:
            kept = str(full)
        told = f"{unfinished['part']} failed; {kept}"
        if isinstance(error, UserError):
            return UserError(f"{error} ({told})")
        error.add_note(told)
        return error


def names_of(folders: list[str]) -> dict[str, str]:
    """What tables call each folder: its name, with as much of its path before it as tells it from the others."""
    parts = {folder: Path(folder).parts for folder in folders}
    for depth in range(1, max(map(len, parts.values())) + 1):
        names = {folder: "/".join(each[-depth:]) or folder for folder, each in parts.items()}
        if len(set(names.values())) == len(names):
            return names
    return {folder: folder for folder in folders}


def samples_told(data: dict) -> str:
    """"37 of 40 samples (2 left out: NaN or Inf, 1 with nothing supervised)"."""
    out, empty = len(data["left_out"]), data["nothing_supervised"]
    why = [f"{out} left out: NaN or Inf"] if out else []
    why += [f"{empty} with nothing supervised to draft"] if empty else []
    if not why:
        return f"{data['samples']} samples"
    return f"{data['samples']} of {data['chosen_samples']} samples ({', '.join(why)})"


def save_json(path: Path, content: dict) -> None:
    """Write report.json through a temporary name. Raises UserError where the directory cannot be written."""
    with refusing(path):
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
        temporary.replace(path)


def require_writable(path: Path) -> None:
    """UserError where `save_json` could not write; what is there stays."""
    with refusing(path), tempfile.TemporaryFile(dir=path.parent):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a directory")


@contextmanager
def refusing(path: Path):
    """A folder for `path`, and a UserError for what the file system has against it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); give another --output") from None


def with_interval(summary: dict, name: str, step: int | None = None, percent: bool = True) -> str:
    """"71.3% (69.8-72.9)", or "3.05 (2.98-3.11)"; "-" where nothing was observed."""
    value, bounds = summary[name], summary.get(f"{name}_95")
    if step is not None:
        value, bounds = value[step], bounds[step] if bounds else None
    if value is None:
        return "-"
    if percent:
        between = f" ({bounds[0] * 100:.1f}-{bounds[1] * 100:.1f})" if bounds else ""
        return f"{value * 100:.1f}%{between}"
    return f"{value:.2f}" + (f" ({bounds[0]:.2f}-{bounds[1]:.2f})" if bounds else "")


def offline_rows(results: list[dict]) -> tuple[list[str], list[list[str]]]:
    """(header, rows) of the offline table: a figure a row, a drafter a column."""
    summaries = [result["summary"] for result in results]
    rows = []

    def add(label, name, percent=True):
        rows.append([label, *(with_interval(s, name, percent=percent) for s in summaries)])

    add("step-0 accuracy", "step0_accuracy")
    for k in range(1, max(len(s["cumulative"]) for s in summaries)):
        cells = []
        for s in summaries:
            if k >= len(s["cumulative"]):  # drafted fewer steps
                cells.append("-")
                continue
            conditional = s["conditional"][k]
            then = "" if conditional is None else f", conditional {conditional * 100:.1f}%"
            cells.append(with_interval(s, "cumulative", k) + then)
        rows.append([f"accepted through step {k}", *cells])
    add("tokens a cycle, walked (tau)", "tau", percent=False)
    add("tokens a position", "length_per_position", percent=False)
    add("of the misses, outside the draft vocabulary", "vocab_share_of_misses")
    if any(s["off_row_share"] for s in summaries):
        add("tokens not the target's own choice", "off_row_share")
    if any(s["expected_length_min_pq"] for s in summaries):
        add("expected tokens, rejection sampling", "expected_length_min_pq", percent=False)
        add("expected tokens, greedy draft kept with p", "expected_length_match", percent=False)
    sizes = [f"{s['samples']} / {s['positions']:,} / {s['cycles']:,}" for s in summaries]
    rows.append(["samples / positions / cycles", *sizes])
    return ["", *(result["name"] for result in results)], rows


def next_lines(content: dict, model: str, more: str = "") -> list[str]:
    """What a person does with the drafter that did best: measure it in the engine, if it was not, and serve it.

    more: further arguments that the target needs.
    """
    if content.get("engine"):
        best = max(content["engine"], key=lambda run: run.get("speed_up") or 0)
        drafter, steps, topk, tokens = (best[name] for name in ("drafter", "num_steps", "topk", "draft_tokens"))
    else:
        best = max(content["offline"], key=lambda result: result["summary"]["tau"] or 0)
        drafter, setting = best["drafter"], best["setting"]
        steps, topk, tokens = (setting[name] for name in ("num_steps", "topk", "tree_tokens"))
    theirs = "speculators_model_type" in (Path(drafter) / "config.json").read_text()  # SGLang cannot load these
    drafter, model = shlex.quote(str(drafter)), shlex.quote(str(model))
    measure = (f"python eval_acceptance.py --drafter {drafter} --model {model} --num-steps {steps} --topk {topk} "
               f"--draft-tokens {tokens} --check-parity{more} --prompts PROMPTS.jsonl")  # fmt: skip
    serve = (f"python -m sglang.launch_server --model {model} --speculative-algorithm EAGLE3 --speculative-num-steps "
             f"{steps} --speculative-eagle-topk {topk} --speculative-num-draft-tokens {tokens} "
             f"--speculative-draft-model-path {drafter}{more}")  # fmt: skip
    lines = [] if content.get("engine") else [f"next, with a GPU: {measure}"]
    return lines if theirs else [*lines, f"{'or' if lines else 'next'}: {serve}"]


def breakdown_rows(result: dict) -> tuple[list[str], list[list[str]]]:
    """(header, rows) of one drafter's groups: category, turn, position in the reply, source file."""
    rows = []
    for dimension, groups in result["breakdown"].items():
        for group, s in groups.items():
            rows.append(
                [
                    dimension, group, with_interval(s, "step0_accuracy"), with_interval(s, "tau", percent=False),
                    with_interval(s, "vocab_share_of_misses"), f"{s['positions']:,}",
                ]
            )  # fmt: skip
    return ["by", "group", "step-0 accuracy", "tau", "misses outside vocabulary", "positions"], rows


def engine_rows(runs: list[dict]) -> tuple[list[str], list[list[str]]]:
    """(header, rows) of engine runs: a setting and batch size a row."""
    rows = []
    for run in runs:
        spec, plain = run["speculative"], run["plain"]
        plain_speed = "-" if plain is None else f"{plain['tokens_per_second']:,.0f}"
        speed_up = "-" if plain is None else f"{run['speed_up']:.2f}x"
        step0 = "-" if spec["step0_accuracy"] is None else f"{spec['step0_accuracy'] * 100:.1f}%"
        rows.append(
            [
                run["name"], f"{run['num_steps']}/{run['topk']}/{run['draft_tokens']}", str(run["batch_size"]),
                with_interval(spec, "tau", percent=False), step0,
                plain_speed, f"{spec['tokens_per_second']:,.0f}", speed_up, same_output(run),
            ]
        )  # fmt: skip
    speeds = ["plain tok/s", "EAGLE-3 tok/s", "speed-up"]
    return ["drafter", "steps/topk/tokens", "batch", "tau", "step-0", *speeds, "same output"], rows


def engine_category_rows(runs: list[dict]) -> tuple[list[str], list[list[str]]]:
    """(header, rows): tau of each category, a drafter and setting a column, at the first batch size."""
    first = [run for run in runs if run["batch_size"] == runs[0]["batch_size"]]
    names = [f"{run['name']} {run['num_steps']}/{run['topk']}/{run['draft_tokens']}" for run in first]
    categories = sorted({category for run in first for category in run["by_category"]})
    rows = []
    for category in categories:
        taus = [run["by_category"].get(category, {}).get("tau") for run in first]
        rows.append([category, *("-" if tau is None else f"{tau:.2f}" for tau in taus)])
    return [f"tau, {runs[0]['batch_size']} at once", *names], rows


def engine_remarks(runs: list[dict]) -> list[str]:
    """A line for each run and reason that some replies or conversations are not, or not whole, in its figures."""
    lines = []
    for run in runs:
        name = f"{run['name']} {run['num_steps']}/{run['topk']}/{run['draft_tokens']}, {run['batch_size']} at once"
        spec = run["speculative"]
        if spec["without_verify"]:
            lines.append(
                f"{name}: {spec['without_verify']} of {spec['replies']} replies ended with their first token and say "
                f"nothing of the drafter."
            )
        for which, result in (("with the drafter", run["speculative"]), ("plain", run["plain"])):
            skipped = result.get("skipped", {}) if result else {}
            lines += [f"{name}, {which}: {count} {reason}." for reason, count in skipped.items()]
    return lines


def same_output(run: dict) -> str:
    """Share of equal greedy answers, and the largest logit gap at which two parted."""
    if run["identical_share"] is None:
        return "-"
    gaps = [difference["gap"] for difference in run["differences"] if "gap" in difference]
    some = f"first {len(gaps)} " if len(gaps) < len(run["differences"]) else ""
    parted = f" ({some}parted at gaps up to {max(gaps):.2f})" if gaps else ""
    return f"{run['identical_share'] * 100:.1f}%{parted}"


def print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """A table on the terminal; plain aligned text when redirected."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=not sys.stdout.isatty())
    for row in rows:
        table.add_row(*row)
    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(table)


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """The same rows as GitHub Markdown."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def markdown(report: dict, picture: str | None) -> str:
    """A section for a model card: the tables of `report`, what they were measured on, and the definitions."""
    parts = ["## Acceptance"]
    if report.get("offline"):
        parts.append(markdown_table(*offline_rows(report["offline"])))
        about = report["data"]
        parts.append(
            f"Offline, {about['split']} split of {', '.join(about['paths'])}: {samples_told(about)}; target "
            f"{about['target']}; 95% bootstrap intervals over samples. Accepted: the drafted token equals the target's "
            f"own greedy token, the drafter running on its own states and tokens. tau follows each reply as the engine "
            f"does (draft, accept n, advance n + 1) and includes the target's token; target tokens outside the draft "
            f"vocabulary are misses."
        )
        for result in report["offline"]:
            if result["breakdown"]:
                parts.append(f"### {result['name']}\n\n" + markdown_table(*breakdown_rows(result)))
    if report.get("engine"):
        parts.append("### In SGLang\n\n" + markdown_table(*engine_rows(report["engine"])))
        parts.append(markdown_table(*engine_category_rows(report["engine"])))
        parts += engine_remarks(report["engine"])
    if report.get("unfinished"):
        parts.append("Unfinished: {part} failed: {error}".format(**report["unfinished"]))
    if picture:
        parts.append(f"![Acceptance per step]({picture})")
    wanted = {name: v for name, v in report["versions"].items() if v}
    parts.append("Versions: " + ", ".join(f"{name} {version}" for name, version in wanted.items()) + ".")
    return "\n\n".join(parts) + "\n"
