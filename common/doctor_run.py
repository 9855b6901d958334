"""`eval_acceptance.py --diagnose`: reads stored samples of any source, captures their tokens again, and reports.

The comparison is common/doctor.py; the fresh states come from common/recapture.py.
"""

from __future__ import annotations

import tempfile
from collections import namedtuple
from pathlib import Path

import torch

from common import doctor, report
from common.capture_points import CapturePoints
from common.errors import UserError
from common.offline_eval import spread
from common.progress import Progress
from common.recapture import TokenRow, by_engine, by_transformers, model_dtype
from common.target import load_target_parts, model_of, target_folder, text_config

DEFAULT_SAMPLES = 4
Stored = namedtuple("Stored", "input_ids loss_mask states last_rows dtypes")
Stored.__doc__ = """input_ids, loss_mask int64 [L]; states: P+1 tensors [L, H]; last_rows as in shards.Sample; dtypes:
what each state is stored in, where `states` are widened."""


def diagnose(arguments) -> int:
    """Prints what is stored, what it should be and what is wrong; writes report.json. Returns 1 when anything is."""
    path = Path(arguments.output) / "report.json"
    report.require_writable(path)  # found before the work
    stored, info, foreign = read_stored(Path(arguments.diagnose), arguments.max_samples or DEFAULT_SAMPLES)
    model = arguments.model or model_of(info)
    if model is None:
        raise UserError(f"{arguments.diagnose}: nothing names the target model; give --model")
    model_folder = str(target_folder(model, info))
    target = load_target_parts(model_folder)
    layers, width = text_config(target.config)["num_hidden_layers"], target.norm.shape[0]
    claim = arguments.data_points or arguments.capture_points or info.get("capture_points")
    if claim is None:
        usual = CapturePoints.speculators_default if foreign == "arrow" else CapturePoints.default
        claim = usual(layers).points
        print(f"no dataset.json says which points these are; taking the usual {list(claim)} (--capture-points)")
    claim = [int(point) for point in claim]
    if len(stored[0].states) != len(claim) + 1:
        raise UserError(
            f"{arguments.diagnose}: {len(stored[0].states)} tensors a sample, but {len(claim)} points and a last state "
            f"are claimed; name the points with --capture-points"
        )
    names = [doctor.point_name(point) for point in claim] + [doctor.LAST]
    found_width = stored[0].states[0].shape[1]
    ids = torch.cat([sample.input_ids for sample in stored])
    outside = int(ids.max()) >= target.vocab_size
    content = {"versions": report.versions(), "stored": str(arguments.diagnose), "model": str(model), "claimed": claim}
    if found_width != width or outside:
        wrong = doctor.conclusions([], found_width, width, "")
        if outside:
            wrong.append(f"tokens of another model: id {int(ids.max())}, this vocabulary has {target.vocab_size}")
        findings = []
    else:
        references = capture_references(arguments, model_folder, target, stored, claim, layers)
        references = doctor.with_normed(references, target.norm, target.eps)
        tensors = [torch.cat([sample.states[i] for sample in stored]) for i in range(len(names))]
        findings = doctor.examine(names[:-1], tensors[:-1], references, stored[0].dtypes[:-1])
        kept = torch.cat([rows_kept(sample) for sample in stored])  # the last state may be stored at some rows only
        of_kept = {name: reference[kept] for name, reference in references.items()}
        findings += doctor.examine(names[-1:], [tensors[-1][kept]], of_kept, stored[0].dtypes[-1:])
        if not kept.all():
            print(f"the last state is stored at {int(kept.sum()):,} of {len(kept):,} rows and compared there")
        computed_in = info.get("model_dtype", "auto")
        computed_in = model_dtype(target.config) if computed_in == "auto" else computed_in
        wrong = doctor.conclusions(findings, found_width, width, computed_in)
        content["head_agreement"] = last_state_readings(target, stored)
    content.update(findings=[vars(finding) for finding in findings], conclusions=wrong)
    report.save_json(path, plain(content))
    show(arguments, content, findings, len(stored))
    print(path)
    return 1 if wrong else 0


def capture_references(arguments, model, target, stored, claim, layers) -> dict[str, torch.Tensor]:
    """Fresh states [N, H] by name: the claimed points, their neighbours (the embedding is point 0) and the last."""
    points = doctor.neighbours(claim, layers)
    rows = [TokenRow(i, s.input_ids, s.loss_mask, f"{i:016x}") for i, s in enumerate(stored)]
    with Progress("diagnose", len(rows)) as progress:
        progress.stage(f"capturing {len(rows)} samples again with {arguments.reference}")
        if arguments.reference == "transformers":
            device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
            fresh = by_transformers(model, rows, points, arguments.trust_remote_code, device)
        else:
            from common.engine import parse_engine_arguments

            with tempfile.TemporaryDirectory(prefix="diagnose-") as folder:
                reader = by_engine(
                    model, target.config, rows, CapturePoints(tuple(points), layers), Path(folder), arguments.tp,
                    arguments.trust_remote_code, parse_engine_arguments(arguments.engine_args), arguments.seed,
                )  # fmt: skip
                fresh = [[state.clone() for state in reader.load(record).states] for record in reader.records]
        progress.update(len(rows))
    names = [doctor.point_name(point) for point in points] + [doctor.LAST]
    references = {name: torch.cat([states[i] for states in fresh]) for i, name in enumerate(names)}
    if min(claim) <= 1:
        ids = torch.cat([sample.input_ids for sample in stored])
        references[doctor.point_name(0)] = target.embed_tokens[ids]
    return references


def rows_kept(sample: Stored) -> torch.Tensor:
    """bool [L]: rows at which the last state is stored."""
    kept = torch.ones(len(sample.input_ids), dtype=torch.bool)
    if sample.last_rows is not None:
        kept.zero_()[sample.last_rows] = True
    return kept


def last_state_readings(target, stored, most_rows: int = 512) -> dict[str, float]:
    """`doctor.head_agreement` on supervised tokens: does norming the last state give the text that follows?"""
    last, following = [], []
    for sample in stored:
        rows = torch.nonzero(sample.loss_mask[1:] != 0).flatten()
        last.append(sample.states[-1][rows])
        following.append(sample.input_ids[1:][rows])
    last, following = torch.cat(last)[:most_rows], torch.cat(following)[:most_rows]
    if len(last) == 0:
        return {}
    return doctor.head_agreement(last, target.lm_head, target.norm, target.eps, following)


def read_stored(folder: Path, count: int) -> tuple[list[Stored], dict, str | None]:
    """(`count` samples spread over the directory, dataset.json or {}, None or whose files they are): ours, speculators'
    ("arrow" or "v1") or SpecForge's."""
    specforge = sorted(folder.rglob("data_*.ckpt")) if folder.is_dir() else []
    if specforge:
        chosen = spread(specforge, count)
        return [read_specforge(path) for path in chosen], {}, "specforge"
    from common.shards import ShardReader

    reader = ShardReader(folder)
    chosen = spread(reader.records, count)
    for line in reader.remarks:
        print(line)
    foreign = None
    if reader.foreign:
        foreign = "arrow" if chosen[0].path.suffix == ".safetensors" else "v1"
    stored = []
    for record in chosen:
        sample = reader.load(record)
        states, dtypes = list(sample.states), reader.stored_dtypes(record)
        stored.append(Stored(sample.input_ids, sample.loss_mask, states, sample.last_rows, dtypes))
    return stored, reader.info, foreign


def read_specforge(path: Path) -> Stored:
    """A SpecForge sample: `input_ids`, `loss_mask`, `aux_hidden_state` [1, L, 3H] and `hidden_state` [1, L, H]."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        last = saved["hidden_state"].reshape(-1, saved["hidden_state"].shape[-1])
        aux = saved["aux_hidden_state"].reshape(last.shape[0], -1)
        ids, mask = saved["input_ids"].flatten(), saved["loss_mask"].flatten()
    except Exception as error:  # a damaged file raises whatever its reader raises
        raise UserError(f"{path}: not a readable SpecForge sample ({type(error).__name__}: {error})") from None
    states = [*aux.split(last.shape[1], dim=1), last]
    dtypes = [str(state.dtype).removeprefix("torch.") for state in states]
    return Stored(ids.to(torch.int64), mask.to(torch.int64), states, None, dtypes)


def show(arguments, content: dict, findings: list, samples: int) -> None:
    rows = []
    for f in findings:
        claimed = "-" if f.claimed_error is None else f"{f.claimed_error:.2%}"
        second = "-" if f.runner_up is None else f"{f.runner_up} {f.runner_up_error:.2%}"
        verdict = "right" if f.right else f"is {f.found}" if f.found else "matches nothing"
        dtype = f.stored_dtype if f.stored_dtype == f.value_dtype else f"{f.stored_dtype} ({f.value_dtype} values)"
        if f.rounding:
            dtype = f"{f.stored_dtype}, rounds by {f.rounding:.2%}"
        rows.append([f.claimed, verdict, f"{f.error:.2%}", claimed, second, f"{f.cosine:.4f}", dtype])
    header = ["stored as", "verdict", "distance", "distance to its claim", "next best", "cosine", "precision"]
    if rows:
        report.print_table(f"{arguments.diagnose}: {samples} samples against {arguments.reference}", header, rows)
    agreement = content.get("head_agreement")
    if agreement:
        shares = ", ".join(f"read as {name} {share:.1%}" for name, share in agreement.items())
        print(f"the head applied to the stored last state gives the next supervised token: {shares}")
    for line in content["conclusions"] or ["every tensor is what it claims to be"]:
        print(("wrong: " if content["conclusions"] else "") + line)


def plain(value):
    """JSON without NaN or infinity, which become None."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not torch.isfinite(torch.tensor(value)):
        return None
    return value
