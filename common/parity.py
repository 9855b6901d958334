"""Do offline and engine agree? The engine's own replies, captured and scored offline; where tau differs by more than
3%, what the engine may be doing otherwise: layer ids, norm options, rope, vocabulary map, each tried alone.

Called by common/engine_eval.py (--check-parity). A gap means that the drafter is not served as it was trained; each
candidate re-scores the same replies offline with one thing changed, and the one that lands on the engine's tau is it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from common.capture_points import CapturePoints
from common.doctor import neighbours
from common.drafter import Drafter
from common.losses import rms_norm
from common.offline_eval import Setting, evaluate, evaluation_target
from common.recapture import TokenRow
from common.report import Report, names_of
from common.shards import Sample
from common.target import TargetParts

TOLERANCE = 0.03  # relative difference of tau


class NormedResidual(Drafter):
    """The drafter with the residual taken after hidden_norm, as `norm_before_residual` of other projects has it."""

    def finish_step(self, w, attended, residual):
        return super().finish_step(w, attended, rms_norm(residual, w.hidden_norm, self.config.rms_norm_eps))


@dataclass
class Candidate:
    """One thing changed: a drafter to score with, and by how many layers its states are taken off the points."""

    cause: str  # layer ids, norm options, rope, vocabulary map
    change: str
    drafter: Drafter
    shift: int = 0


def rebuilt(drafter: Drafter, kind: type[Drafter] = Drafter, **config) -> Drafter:
    """The same weights in another class or with other config values; weights it has no place for are left out."""
    other = kind(replace(drafter.config, **config))
    names = set(other.state_dict())
    other.load_state_dict({name: tensor for name, tensor in drafter.state_dict().items() if name in names})
    other.set_vocab(drafter.d2t.cpu(), drafter.t2d.cpu())
    other.compute_dtype = drafter.compute_dtype
    if drafter.embed_tokens is not None:
        other.set_embedding(drafter.embed_tokens)
    return other.to(drafter.fc.weight.device)


def with_vocabulary(drafter: Drafter, target_of_draft: torch.Tensor) -> Drafter:
    """The drafter whose draft id i is read as target id target_of_draft[i]."""
    other = rebuilt(drafter)
    count = other.d2t.shape[0]
    wanted = target_of_draft.clamp(0, other.config.vocab_size - 1).to(other.d2t)
    other.d2t.copy_(wanted - torch.arange(count, device=wanted.device))
    return other


def candidates(drafter: Drafter, num_layers: int) -> list[Candidate]:
    """Everything that is tried, most common mistake first; what would change nothing is left out."""
    config, d2t = drafter.config, drafter.d2t
    out: list[Candidate] = []

    def add(cause, change, other, shift=0):
        out.append(Candidate(cause, change, other, shift))

    for shift in (1, -1):
        really = [point + shift for point in config.capture_points]
        if all(1 <= point < num_layers for point in really):
            add("layer ids", f"states at {really} instead of {list(config.capture_points)}", drafter, shift)
    toggled = rebuilt(drafter, norm_output=not config.norm_output)
    add("norm options", f"norm_output {toggled.config.norm_output}: what is fed back to the next step", toggled)
    add("norm options", "residual after hidden_norm (norm_before_residual)", rebuilt(drafter, NormedResidual))
    if config.fc_norm:
        add("norm options", "no norm before fc (fc_norm)", rebuilt(drafter, fc_norm=False))
    if config.rope_scaling is not None:
        add("rope", "rope scaling left out", rebuilt(drafter, rope_scaling=None))
    if config.rope_theta != 10000.0:
        add("rope", "rope_theta at its default 10000", rebuilt(drafter, rope_theta=10000.0))
    if int(d2t.abs().sum()):
        count = torch.arange(d2t.shape[0], device=d2t.device)
        add("vocabulary map", "d2t ignored: draft ids taken for target ids", with_vocabulary(drafter, count))
        add("vocabulary map", "d2t read as target ids, not as offsets", with_vocabulary(drafter, d2t))
    return out


def gap(tau: float, engine_tau: float) -> float:
    """Relative difference to the engine's tau."""
    return tau / engine_tau - 1


def find_causes(engine_tau: float, tried: list[Candidate], score: Callable[[Drafter, int], float]) -> list[dict]:
    """Each candidate scored alone: [{"cause", "change", "tau", "gap", "closes"}], nearest to the engine first.

    score(drafter, shift) is the offline tau of the engine's replies with that drafter, on states `shift` layers off.
    """
    found = []
    for candidate in tried:
        tau = score(candidate.drafter, candidate.shift)
        away = gap(tau, engine_tau)
        found.append({"cause": candidate.cause, "change": candidate.change, "tau": tau, "gap": away,
                      "closes": abs(away) <= TOLERANCE})  # fmt: skip
    return sorted(found, key=lambda each: abs(each["gap"]))


def verdict(name: str, tau: float, engine_tau: float, causes: list[dict]) -> list[str]:
    """The lines a person reads."""
    away = gap(tau, engine_tau)
    if abs(away) <= TOLERANCE:
        return [f"{name}: offline tau {tau:.3f}, engine tau {engine_tau:.3f}: they agree ({away:+.1%})"]
    lines = [
        f"{name}: offline tau {tau:.3f}, engine tau {engine_tau:.3f}: {away:+.1%}, more than {TOLERANCE:.0%}: the "
        f"drafter is not served as it was trained. Re-scored with one thing changed:"
    ]
    for rank, each in enumerate(causes, start=1):
        closes = "CLOSES THE GAP" if each["closes"] else "does not"
        scored = f"tau {each['tau']:.3f} ({each['gap']:+.1%})"
        lines.append(f"  {rank}. {each['cause']}: {each['change']}: {scored}: {closes}")
    if not any(each["closes"] for each in causes):
        lines.append("  none of these alone explains it; compare states with --diagnose, and the engine's versions")
    return lines


def pick_points(sample: Sample, captured: list[int], wanted: list[int]) -> Sample:
    """A sample with the states of `wanted` points out of those at the `captured` ones; the last state stays."""
    chosen = [sample.states[captured.index(point)] for point in wanted]
    return sample._replace(states=[*chosen, sample.states[-1]])


def parity_of_all(arguments, config: dict, drafters: dict, speculative: dict, folder: Path, found: Report) -> bool:
    """Compare every drafter and setting, into "parity" of the report as each is done; True when all agree.

    drafters: {path: (Drafter, config.json)}; speculative: {(path, setting): {batch size: {"replies": [...]}}}.
    """
    from common.engine import parse_engine_arguments
    from common.engine_figures import summarise
    from common.recapture import by_engine
    from common.target import load_target_parts, text_config

    layers = text_config(config)["num_hidden_layers"]
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    extra = parse_engine_arguments(arguments.engine_args)
    target, names = load_target_parts(arguments.model), names_of(list(drafters))  # in host memory

    def captured(rows: list[TokenRow], points: list[int], name: str):
        return by_engine(
            arguments.model, config, rows, CapturePoints(tuple(points), layers), folder / name, arguments.tp,
            arguments.trust_remote_code, extra, arguments.seed,
        )  # fmt: skip

    parity = found.content["parity"] = {"agrees": None, "runs": [], "lines": []}
    for number, ((path, setting), results) in enumerate(speculative.items()):
        name = f"{names[path]} {setting.num_steps}/{setting.topk}/{setting.tree_tokens}"
        found.begin(f"the comparison of offline and engine for {name}")
        replies, drafter = results[arguments.batch_sizes[0]]["replies"], drafters[path][0]
        rows, points = rows_of(replies), list(drafter.config.capture_points)
        engine_tau, causes = summarise(replies, setting, 0)["tau"], []
        reader = captured(rows, points, f"parity-{number}")
        tau = scored(tau_of, drafter, target, device, reader, setting)
        if abs(gap(tau, engine_tau)) > TOLERANCE:
            around = neighbours(points, layers)
            wide = captured(rows, around, f"parity-{number}-neighbours")
            causes = scored(causes_of, drafter, target, device, wide, setting, around, layers, engine_tau)
        parity["runs"].append({"drafter": path, "setting": vars(setting).copy(), "offline_tau": tau,
                               "engine_tau": engine_tau, "gap": gap(tau, engine_tau), "causes": causes})  # fmt: skip
        parity["lines"] += verdict(name, tau, engine_tau, causes)
        found.save()
    parity["agrees"] = all(abs(run["gap"]) <= TOLERANCE for run in parity["runs"])
    return parity["agrees"]


def rows_of(replies: list) -> list[TokenRow]:
    """Prompt and answer of each of the engine's replies as a sample whose answer is supervised."""
    rows = []
    for index, reply in enumerate(replies):
        ids = torch.tensor(reply.prompt + reply.output)
        mask = (torch.arange(len(ids)) >= len(reply.prompt)).long()
        rows.append(TokenRow(index, ids, mask, f"{index:016x}", category=reply.category))
    return rows


def scored(work: Callable, drafter: Drafter, target: TargetParts, device: str, *arguments):
    """work(drafter, the target's parts as `evaluate` wants them, *arguments) on `device`. Neither is left there: the
    next engine needs its GPUs equally empty."""
    parts = evaluation_target(target, device)
    drafter.to(device)
    drafter.set_embedding(parts.embed_tokens[: drafter.config.vocab_size])
    drafter.compute_dtype = None if device == "cpu" else torch.bfloat16
    try:
        return work(drafter, parts, *arguments)
    finally:
        drafter.to("cpu")
        drafter.embed_tokens = None


def tau_of(drafter: Drafter, parts: TargetParts, reader, setting: Setting) -> float:
    return evaluate(drafter, parts, reader.load, reader.records, setting).summary(0)["tau"]


def causes_of(drafter: Drafter, parts: TargetParts, reader, setting: Setting, captured: list[int], num_layers: int,
              engine_tau: float) -> list[dict]:  # fmt: skip
    """`find_causes` on shards that hold the points and their neighbours."""
    score = scorer(parts, reader, captured, list(drafter.config.capture_points), setting)
    return find_causes(engine_tau, candidates(drafter, num_layers), score)


def scorer(target, reader, captured: list[int], points: list[int], setting: Setting) -> Callable[[Drafter, int], float]:
    """score(drafter, shift) for `find_causes`, from shards that hold the points and their neighbours."""

    def score(drafter: Drafter, shift: int) -> float:
        wanted = [point + shift for point in points]

        def load(record):
            return pick_points(reader.load(record), captured, wanted)

        return evaluate(drafter, target, load, reader.records, setting).summary(0)["tau"]

    return score
