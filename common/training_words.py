"""What train_drafter.py says of a run: the plan before it, a line a step and an evaluation, the lines at its end."""

import shlex
from pathlib import Path

from common.batches import Schedule

FEW_STEPS = 20  # a run of fewer is told that it is too short to make a drafter
FEW_HELD_OUT = 10  # fewer samples to judge by are told, too


def plan_lines(schedule: Schedule, held_out: int, rows: int, total_steps: int) -> list[str]:
    """Samples and steps. held_out, rows: samples held out, of so many in all."""
    lines = [f"samples: {reason}: {count:,}" for reason, count in sorted(schedule.counts.items())]
    share = f" ({held_out / rows:.1%} of the rows, chosen by their hash)" if held_out else ""
    lines.append(f"samples: {len(schedule.records):,} to train on, {held_out:,} held out{share}")
    if 0 < held_out < FEW_HELD_OUT:
        lines.append(f"warning: {held_out} held-out samples say little about a drafter; raise --eval-fraction")
    if total_steps < FEW_STEPS:
        lines.append(f"warning: {total_steps} optimizer steps make no drafter; raise --epochs, or lower "
                     f"--tokens-per-step")  # fmt: skip
    room, number = schedule.budget, schedule.batches_per_step
    unused = ", ".join(f"{share:.1%}" for share in schedule.padding().values())
    lines.append(f"a step: {number} batch{'es' * (number > 1)} with room for {room.tokens:,} tokens, {room.queries:,} "
                 f"query rows, {room.predicted:,} predicted tokens ({unused} unused); {schedule.steps(0):,} steps an "
                 f"epoch, {total_steps:,} in all")  # fmt: skip
    return lines


def closing_lines(told: str, out: Path, best: dict | None, held_out: bool, arguments, model: str) -> str:
    """The last lines of a whole run. told: what was done. arguments: train_drafter.TrainArguments."""
    quality = "not evaluated yet" if held_out else "nothing was held out"
    if best:
        quality = f"best at step {best['step']:,}: tau {best['tau']:.3f}, step-0 accuracy {best['step0_accuracy']:.1%}"
    curves = f", curves in {out / 'curves.png'}" if (out / "curves.png").exists() else ""
    evaluation = ["--drafter", str(out), "--data", *arguments.data, *([] if held_out else ["--split", "all"])]
    evaluation += ["--model", model] if arguments.model or arguments.data_points else []
    evaluation += ["--data-points", *map(str, arguments.data_points)] if arguments.data_points else []
    return f"{told}; {quality}; drafter in {out}{curves}\nnext: python eval_acceptance.py {shlex.join(evaluation)}"


def step_line(step: int, total: int, figures: dict) -> str:
    """One line, the figures of metrics.jsonl in short (of several steps: `over_steps`)."""
    milliseconds = figures["milliseconds"]
    whole = sum(milliseconds.values()) or 1.0
    parts = [
        f"step {step:,}/{total:,} ({100 * step / total:.1f}%)",
        f"loss {figures['loss']:.4f}",
        "train accuracy " + "/".join(f"{100 * value:.0f}" for value in figures["accuracy_per_step"]) + "%",
        f"grad {figures['gradient_norm']:.3f}",
        f"lr {figures['learning_rate']:.2e}",
        f"{figures['tokens_per_second']:,.0f} tok/s",
        f"{figures['supervised_tokens_per_second']:,.0f} supervised/s",
        f"{figures['samples_per_second']:,.1f} samples/s",
    ]
    parts += [f"MFU {100 * figures['mfu']:.0f}%"] if figures["mfu"] is not None else []
    parts += [f"{figures['peak_memory_gb']:.1f} GB"] if figures["peak_memory_gb"] is not None else []
    parts += [", ".join(f"{name} {value:.0f} ms {100 * value / whole:.0f}%" for name, value in milliseconds.items())]
    parts += [f"skipped steps {figures['skipped_steps']}"] if figures["skipped_steps"] else []
    parts += [f"set aside {figures['set_aside']}"] if figures["set_aside"] else []
    return " | ".join(parts)


def eval_line(step: int, figures: dict, better: bool) -> str:
    """The held-out figures in one line."""
    def percent(values):
        return "/".join("-" if value is None else f"{100 * value:.1f}" for value in values)

    return (
        f"held-out at step {step:,}: step-0 accuracy {percent([figures['step0_accuracy']])}%, cumulative "
        f"{percent(figures['cumulative'])}%, conditional {percent(figures['conditional'])}%, "
        f"tau {figures['tau']:.3f} walked, {figures['length_per_position']:.3f} per position, "
        f"{figures['samples']:,} samples{' (best so far)' if better else ''}"
    )
