"""What an extraction is about, known before any engine starts: the target, the identity of its states, the samples.

extract.py calls these in order; every complaint about arguments, data or disk comes from here, in seconds.
"""

import json
import os
from importlib.metadata import version
from pathlib import Path

import xxhash

from common.capture_points import CapturePoints
from common.conversations import hash_of, load_rows
from common.engine import available_device, parse_engine_arguments, require_known_architecture
from common.errors import UserError
from common.placement import Job, Placement, place
from common.plan import last_rows_kept
from common.shard_check import bytes_per_token, plan_bytes, require_disk
from common.shard_run import Skipped
from common.shards import LAYOUTS
from common.target import checkpoint_folder, load_config, text_config
from common.tokenizing import load_tokenizer, one_row_per_turn, tokenize_rows, tokenizer_fingerprint

DTYPES = ("bfloat16", "float16", "float32")
STATE_DTYPES = (*DTYPES, "fp8")


def read_target(args) -> dict:
    """Everything about the target that needs no weights; complaints about arguments come from here."""
    choices = {"device": ("auto", "cuda", "cpu"), "dtype": ("auto", *DTYPES), "state_dtype": STATE_DTYPES}
    choices |= {"last_state": ("all", "supervised"), "layout": (None, *LAYOUTS)}
    for name, allowed in choices.items():
        if getattr(args, name) not in allowed:
            flag, named = name.replace("_", "-"), ", ".join(filter(None, allowed))
            raise UserError(f"--{flag} {getattr(args, name)}: expected one of {named}")
    for name in ("ring_gb", "writers", "tp", "chunk_tokens", "rows_per_block", "max_new_tokens"):
        if getattr(args, name) is not None and getattr(args, name) <= 0:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be above zero")
    if args.last_state == "supervised" and args.layout == "arrow":
        raise UserError(
            "--last-state supervised with --layout arrow: speculators expects the last state of every row; "
            "use --last-state all, or --layout v1"
        )
    if args.regenerate and args.supervise == "each":
        raise UserError("--supervise each with --regenerate: regenerate first, then extract from OUTPUT/chats.jsonl")
    folder = checkpoint_folder(args.model, args.revision)
    config = load_config(folder)
    text = text_config(config)
    architecture = (config.get("architectures") or ["unknown"])[0]
    require_known_architecture(architecture)
    for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
        if name not in text:
            raise UserError(f"{folder}/config.json: no {name}; {architecture} is not a target that SGLang drafts for")
    layers = text["num_hidden_layers"]
    points = CapturePoints(tuple(args.capture_points), layers) if args.capture_points else CapturePoints.default(layers)
    found, gpus = available_device()
    if args.device == "cuda" and found == "cpu":
        raise UserError("--device cuda: PyTorch finds no GPU here")
    device = found if args.device == "auto" else args.device
    try:
        template_kwargs = json.loads(args.template_kwargs) if args.template_kwargs else {}
    except ValueError as error:
        raise UserError(f"--template-kwargs: expected a JSON object such as {{\"thinking\": true}}: {error}") from None
    tokenizer = load_tokenizer(folder, args.trust_remote_code, args.revision, args.chat_template)
    return {
        "folder": str(folder),
        "config": config,
        "architecture": architecture,
        "points": points,
        "hidden_size": text["hidden_size"],
        "vocab_size": text["vocab_size"],
        "context": text.get("max_position_embeddings"),
        "device": device,
        "gpus": gpus,
        "tokenizer": tokenizer,
        "template_kwargs": template_kwargs,
        "engine_arguments": parse_engine_arguments(args.engine_args),
    }


def identity(args, target: dict) -> dict:
    """What these states are; a resumed run must agree on every field."""
    fingerprint = tokenizer_fingerprint(target["tokenizer"])
    fields = {
        "model": Path(args.model).name if Path(args.model).is_dir() else args.model,
        "revision": args.revision,
        "architecture": target["architecture"],
        "config_hash": hash_of(target["config"]),
        "weights_hash": weights_fingerprint(target["folder"]),
        "tokenizer_hash": fingerprint["tokenizer"],
        "chat_template_hash": fingerprint["chat_template"],
        "template_kwargs": target["template_kwargs"],
        "supervise": args.supervise,
        "max_length": args.max_length,
        "over_length": args.over_length,
        "capture_points": list(target["points"].points),
        "num_layers": target["points"].num_layers,
        "hidden_size": target["hidden_size"],
        "vocab_size": target["vocab_size"],
        "last_state": "pre-norm",
        "dtype": args.state_dtype,
        "model_dtype": args.dtype,
        "engine_version": version("sglang"),
        "engine_arguments": {"device": target["device"], **target["engine_arguments"]},
        "seed": args.seed,
    }
    if args.last_state != "all":
        fields["last_state_rows"] = args.last_state
    if args.regenerate:
        fields["regenerated"] = {"temperature": args.temperature, "max_new_tokens": args.max_new_tokens}
    return fields


def weights_fingerprint(folder: str) -> str:
    """xxh3-128 over names, sizes, and the first and last 64 KB of the weight files: another fine-tune, another hash."""
    digest = xxhash.xxh3_128()
    files = (path for path in Path(folder).iterdir() if path.suffix in (".safetensors", ".bin", ".gguf"))
    for path in sorted(files, key=lambda path: path.name):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 16))
            file.seek(max(size - (1 << 16), 0))
            digest.update(file.read())
    return digest.hexdigest()


def read_rows(args) -> list:
    rows = load_rows(args.data, args.split, args.limit)
    return list(one_row_per_turn(rows)) if args.supervise == "each" else rows


def tokenize(args, target: dict, rows: list, run_directory, out: Path | None, progress) -> tuple[list, set[int]]:
    """Samples with token ids and loss mask, and which of them (by index) are still to be captured.

    Skipped rows are recorded in the directory; rows captured before must still be the same.
    """
    progress.stage(f"tokenizing {len(rows):,} rows")
    result = tokenize_rows(
        rows,
        target["tokenizer"],
        supervise="last" if args.supervise == "each" else args.supervise,
        max_length=args.max_length,
        over_length=args.over_length,
        context_length=target["context"] and target["context"] - 1,  # the engine answers with one token
        vocab_size=target["vocab_size"],
        template_kwargs=target["template_kwargs"],
        workers=args.tokenizer_workers or os.cpu_count() or 1,
        worker_tokenizer={
            "model": target["folder"],
            "trust_remote_code": args.trust_remote_code,
            "revision": args.revision,
            "chat_template": args.chat_template,
        },
    )
    for text, count in [*result.skipped.items(), *result.remarks.items()]:
        progress.note(f"{count:,} rows: {text}")
    if run_directory is None:
        return result.rows, {sample.index for sample in result.rows}
    sources = {row.index: row.source for row in rows}
    run_directory.unskip([sample.index for sample in result.rows])
    run_directory.skip([Skipped(index, reason, sources.get(index)) for index, reason in result.skipped_rows])
    for sample in result.rows:
        run_directory.check_row(sample.index, sample.row_hash)
    for index, reason in result.skipped_rows:
        run_directory.check_row(index, f"none ({reason})")
    pending = set(run_directory.pending())
    to_do = [sample for sample in result.rows if sample.index in pending]
    lengths, kept = [len(sample.input_ids) for sample in to_do], last_rows_kept(args.last_state, to_do)
    sizes = (len(target["points"].points), target["hidden_size"], args.state_dtype, run_directory.layout)
    require_disk(out, plan_bytes(lengths, *sizes, kept), args.force)
    check_ring(args, target, lengths)
    return result.rows, pending


def check_ring(args, target: dict, lengths: list[int]) -> None:
    """Two longest samples (one that ends in a forward pass, one that begins) and two passes must fit the ring."""
    per_token = bytes_per_token(len(target["points"].points), target["hidden_size"], args.state_dtype) + 32
    chunk = chunk_tokens(args, target) or 16384
    need = (2 * max(lengths, default=0) + 2 * chunk) * per_token + (1 << 20)
    if need > args.ring_gb * 1e9:
        raise UserError(
            f"--ring-gb {args.ring_gb}: two of the longest samples and two forward passes of {chunk} tokens need "
            f"{need / 1e9:.3f} GB; raise it, or lower --max-length or --chunk-tokens"
        )


def chunk_tokens(args, target: dict) -> int | None:
    """Tokens a forward pass at most; None: SGLang's own choice, by the memory of the GPU."""
    given = target["engine_arguments"].get("chunked_prefill_size")
    if given is None:
        return args.chunk_tokens or (2048 if target["device"] == "cpu" else None)
    if not isinstance(given, int) or args.chunk_tokens:
        raise UserError(
            f"--engine-args chunked_prefill_size {given!r} and --chunk-tokens {args.chunk_tokens}: expected one number "
            f"of tokens a forward pass; give --chunk-tokens alone"
        )
    return given if given > 0 else target["engine_arguments"].get("max_prefill_tokens", 16384)  # -1: not in chunks


def own_share(samples: list, pending: set[int], rows_per_block: int, placement: Placement) -> list:
    """The pending samples of this replica: whole blocks, the largest first to the replica with the least to do."""
    blocks: dict[int, list] = {}
    for sample in samples:
        if sample.index in pending:
            blocks.setdefault(sample.index // rows_per_block, []).append(sample)
    load = [0] * placement.replicas
    share = []
    for block in sorted(blocks.values(), key=lambda block: -sum(len(sample.input_ids) for sample in block)):
        replica = load.index(min(load))
        load[replica] += sum(len(sample.input_ids) for sample in block)
        share += block if replica == placement.replica else []
    return sorted(share, key=lambda sample: sample.index)


def place_process(args, device: str, gpus: int) -> Placement:
    job = Job.from_environment()
    per_node = gpus if device == "cuda" else max(job.local_world_size, args.tp if job.world_size == 1 else 0)
    return place(args.tp, job.rank, job.world_size, job.local_world_size, per_node)
