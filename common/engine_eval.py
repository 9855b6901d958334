"""Acceptance and speed in SGLang's own engine: the same conversations with EAGLE-3 and without.

Called by eval_acceptance.py (--prompts). One engine after the other: one for each drafter and setting, then one without
speculation, which also measures the logit gap where the two answers part. Every engine answers the same conversations
in the same order at each batch size (requests kept in flight), all turns of a conversation one after the other. Before
anything is reported, the running engine's `layers_to_capture` must be the drafter's capture points.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from common.engine_figures import Reply, by_category, compare_outputs, summarise
from common.errors import UserError
from common.offline_eval import Setting, free_gpu, spread
from common.report import Report, names_of

MOST_GAPS = 32  # diverging answers whose logit gap is looked up
FORBIDDEN = ("speculative_", "forward_hooks", "model_path", "skip_tokenizer_init")  # set here, not by --engine-args


@dataclass
class ServingSettings:
    """An engine that answers, with a drafter or without; what common/engine.py `start_engine` needs."""

    model: str
    drafter: str | None  # folder in SGLang's format; None: plain decoding
    setting: Setting | None
    layers_file: str | None  # where the running model writes its layers_to_capture
    tp: int = 1
    device: str = "cuda"
    trust_remote_code: bool = False
    seed: int = 0
    max_requests: int = 16
    extra: dict = field(default_factory=dict)

    def server_arguments(self) -> dict:
        """All arguments of sglang.ServerArgs; raises UserError for one in `extra` that would undo the measurement."""
        from common.engine import CPU_MAX_TOTAL_TOKENS, LAYER_PREFIXES, report_dead_child

        arguments = {
            "model_path": self.model,
            "trust_remote_code": self.trust_remote_code,
            "tp_size": self.tp,
            "random_seed": self.seed,
            "device": self.device,
            "skip_tokenizer_init": True,  # prompts and answers are token ids
            "enable_multimodal": False,  # and text: a multimodal target would ask for its image processor
            "disable_radix_cache": True,  # a prompt seen at another batch size must not come for free
            "disable_prefill_cuda_graph": True,  # replayed graphs run no hooks, and this one reads the layers back
            "max_running_requests": self.max_requests,
            "log_level": "info",
            "custom_sigquit_handler": report_dead_child,
        }
        if self.device == "cuda":
            arguments["cuda_graph_max_bs_decode"] = self.max_requests
        else:
            arguments |= {
                "attention_backend": "torch_native", "sampling_backend": "pytorch", "grammar_backend": "none",
                "disable_cuda_graph": True, "disable_overlap_schedule": True, "max_total_tokens": CPU_MAX_TOTAL_TOKENS,
            }  # fmt: skip
        if self.drafter is not None:
            arguments |= {
                "speculative_algorithm": "EAGLE3",
                "speculative_draft_model_path": self.drafter,
                "speculative_num_steps": self.setting.num_steps,
                "speculative_eagle_topk": self.setting.topk,
                "speculative_num_draft_tokens": self.setting.tree_tokens,
                "forward_hooks": [
                    {
                        "name": "layers read back",
                        "target_modules": list(LAYER_PREFIXES),
                        "hook_factory": "common.engine_eval:layers_hook",
                        "config": {"path": self.layers_file},
                    }
                ],
            }
        for name, value in self.extra.items():
            if name.startswith(FORBIDDEN):
                raise UserError(f"--engine-args {name}: this evaluation sets it itself")
            arguments[name] = value
        return arguments


def layers_hook(config: dict):
    """Hook factory, in the scheduler process: writes `layers_to_capture` of the running target to config["path"]."""

    def hook(module, args, output):
        path = Path(config["path"])
        if hasattr(module, "layers_to_capture") and not path.exists():
            temporary = path.with_suffix(f".{os.getpid()}")  # every tensor-parallel rank writes
            temporary.write_text(json.dumps([int(layer) for layer in module.layers_to_capture]))
            temporary.replace(path)

    return hook


def check_layers(layers_file: Path, expected: list[int], drafter: str) -> list[int]:
    """The layers before which the running engine captures; raises UserError when they are not the drafter's points."""
    if not layers_file.exists():
        raise UserError(
            f"{drafter}: the engine did not say which layers it captures (no module with layers_to_capture ran), so "
            f"its figures would be unfounded; this target family needs support in common/engine_eval.py"
        )
    found = json.loads(layers_file.read_text())
    if list(found) != list(expected):
        raise UserError(
            f"{drafter}: it was trained on the states at {list(expected)}, but the engine feeds it those at {found}: "
            f"correct eagle_config.eagle_aux_hidden_state_layer_ids in its config.json; no figures are reported"
        )
    return found


# ---- conversations ---------------------------------------------------------------------------------------------------


async def converse(engine, tokenizer, rows: list, batch_size: int, sampling: dict, tick, skipped: Counter) -> list:
    """Answer all turns of all rows, `batch_size` conversations in flight; `Reply`s sorted by row and turn."""
    from common.regeneration import fill, next_prompt, script_of

    waiting = list(reversed(rows))
    replies: list[Reply] = []

    async def answer_row(row):
        script, turn = script_of(row), 0
        while (prompt := next_prompt(script, row, tokenizer)) is not None:
            answer = await engine.async_generate(input_ids=prompt, sampling_params=sampling)
            ids, meta = list(answer["output_ids"]), answer["meta_info"]
            finish = meta.get("finish_reason") or {}
            if finish.get("type") == "abort":
                raise UserError(f"{row.place}: the engine refused it: {finish.get('message')}")
            turn += 1
            replies.append(Reply(row.index, turn, row.category, prompt, ids, meta))
            if not fill(script, row, tokenizer, tokenizer.decode(ids, skip_special_tokens=False)):
                skipped["answers that the template shows otherwise than generated"] += 1
            tick(sum(len(reply.output) for reply in replies))

    async def worker():
        while waiting:
            row = waiting.pop()
            try:
                await answer_row(row)
            except UserError as error:
                skipped[f"conversations left: {str(error).removeprefix(row.place + ': ')[:120]}"] += 1

    await asyncio.gather(*(worker() for _ in range(batch_size)))
    return sorted(replies, key=lambda reply: (reply.row, reply.turn))


def watched(engine, work):
    """The result of a coroutine in the engine's event loop; raises EngineDied when a process of the engine ends
    meanwhile: nobody else would answer, and the wait would never end."""
    from common.engine import EngineDied, when_it_dies

    async def race():
        died = asyncio.Event()
        when_it_dies(engine, died.set)
        task, death = asyncio.create_task(work), asyncio.create_task(died.wait())
        await asyncio.wait({task, death}, return_when=asyncio.FIRST_COMPLETED)
        for each in (task, death):
            each.cancel()
        if task.done() and not task.cancelled():
            return task.result()
        raise EngineDied("a process of the engine died; its log says why")

    try:
        return engine.loop.run_until_complete(race())
    finally:
        engine.links.on_message = lambda rank, kind, content: None


def warm_up(engine, batch_size: int, sampling: dict) -> None:
    """A few tokens for `batch_size` requests at once: kernels compiled, memory allocated, hooks run."""
    short = {**sampling, "max_new_tokens": 8, "ignore_eos": True}

    async def ask():
        prompt = list(range(10, 26))
        requests = [engine.async_generate(input_ids=prompt, sampling_params=short) for _ in range(batch_size)]
        await asyncio.gather(*requests)

    watched(engine, ask())


def run_once(engine, tokenizer, rows: list, batch_size: int, sampling: dict, tick=lambda tokens: None) -> dict:
    """{"replies", "seconds", "tokens", "tokens_per_second", "skipped": {reason: count}} of one pass over all rows."""
    skipped: Counter = Counter()
    started = time.monotonic()
    replies = watched(engine, converse(engine, tokenizer, rows, batch_size, sampling, tick, skipped))
    seconds = time.monotonic() - started
    if not replies:
        raise UserError(f"the engine answered none of {len(rows)} conversations: {dict(skipped)}")
    tokens = sum(len(reply.output) for reply in replies)
    return {"replies": replies, "seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds,
            "skipped": dict(skipped)}  # fmt: skip


def logit_gaps(engine, differences: list[dict]) -> None:
    """Adds "gap" to each difference (the first MOST_GAPS): log p(best) - log p(second) of the plain target there.

    A small gap is a near-tie that batch size and kernel decide; a large one is a wrong token. Takes "context" out.
    """
    contexts = [difference.pop("context") for difference in differences]
    sampling = {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True}
    for difference, context in list(zip(differences, contexts, strict=True))[:MOST_GAPS]:
        asked = engine.async_generate(
            input_ids=context, sampling_params=sampling, return_logprob=True, top_logprobs_num=2
        )
        answer = watched(engine, asked)
        first, second = answer["meta_info"]["output_top_logprobs"][0][:2]
        difference["gap"] = float(first[0] - second[0])
        difference["best_two"] = [int(first[1]), int(second[1])]


@dataclass
class Session:
    """What all engine runs of one evaluation share."""

    arguments: object  # eval_acceptance.Arguments
    config: dict  # the target's config.json
    rows: list
    tokenizer: object
    device: str
    progress: object
    folder: Path  # temporary
    layers: dict = field(default_factory=dict)  # drafter path -> layers read back from the running engine

    def answer_all(self, drafter: str | None, setting: Setting | None, name: str, layers_file=None, check=None,
                   keep=None, after=None) -> dict[int, dict]:  # fmt: skip
        """Start an engine, answer everything at every batch size ({batch size: run_once()}), stop it.

        check() is called once the engine has run its first tokens, keep(batch size, result) for each result as soon as
        it is there, after(engine, results) before the engine stops.
        """
        from common.engine import parse_engine_arguments, start_engine, stop_engine

        arguments, progress = self.arguments, self.progress
        serving = ServingSettings(
            arguments.model, drafter, setting, layers_file, arguments.tp, self.device, arguments.trust_remote_code,
            arguments.seed, max(arguments.batch_sizes), parse_engine_arguments(arguments.engine_args),
        )  # fmt: skip
        sampling = {"temperature": arguments.temperature, "max_new_tokens": arguments.max_new_tokens}
        progress.stage(f"loading the engine: {name}")
        log = Path(arguments.output) / "logs" / f"{name.replace('/', '-').replace(' ', '-')}.log"
        free_gpu()
        engine = start_engine(serving, log)
        results = {}
        try:
            for batch_size in arguments.batch_sizes:
                progress.stage(f"{name}, {batch_size} at once")
                warm_up(engine, batch_size, sampling)
                if check is not None and not results:
                    check()
                started = time.monotonic()

                def tick(tokens, started=started):
                    progress.update(progress.done or 0, tokens_per_second=tokens / (time.monotonic() - started))

                results[batch_size] = run_once(engine, self.tokenizer, self.rows, batch_size, sampling, tick)
                for reason, count in results[batch_size]["skipped"].items():
                    progress.note(f"warning: {name}, {batch_size} at once: {count} {reason}")
                progress.update((progress.done or 0) + 1)
                if keep is not None:
                    keep(batch_size, results[batch_size])
            if after is not None:
                after(engine, results)
        finally:
            stop_engine(engine)
        return results


def in_engine(arguments, settings: list[Setting], found: Report) -> int:
    """All engine runs of eval_acceptance.py, into "engine" and "parity" of the report as they end; the exit status."""
    from common.conversations import load_rows
    from common.engine import available_device
    from common.load_drafter import load_drafter
    from common.progress import Progress
    from common.target import checkpoint_folder, load_config
    from common.tokenizing import load_tokenizer

    arguments = copy.copy(arguments)
    arguments.model = str(checkpoint_folder(arguments.model))
    config = load_config(arguments.model)
    points = tuple(arguments.capture_points) if arguments.capture_points else None
    drafters = {path: load_drafter(path, config, points) for path in arguments.drafter}
    rows = spread(load_rows(arguments.prompts), arguments.max_samples)
    tokenizer = load_tokenizer(arguments.model, arguments.trust_remote_code)
    device, gpus = available_device()
    if device == "cpu":
        raise UserError("SGLang's EAGLE-3 needs a GPU, and none is visible; offline evaluation (--data) runs without")
    if arguments.tp > gpus:
        raise UserError(f"--tp {arguments.tp}: only {gpus} GPUs are visible")

    total = (len(drafters) * len(settings) + 1) * len(arguments.batch_sizes)
    heartbeat = Path(arguments.output) / "heartbeat.json"
    runs: list[dict] = []
    with tempfile.TemporaryDirectory(prefix="acceptance-") as folder:
        with Progress("engine", total, unit="runs", heartbeat=heartbeat) as progress:
            session = Session(arguments, config, rows, tokenizer, device, progress, Path(folder))
            found.content["engine"] = runs
            speculative = answer_with_drafters(session, drafters, settings, found)

            def keep(batch_size, plain):
                for run in runs:
                    if run["batch_size"] == batch_size:
                        run["plain"] = timing(plain)
                        run["speed_up"] = run["speculative"]["tokens_per_second"] / plain["tokens_per_second"]
                found.save()

            def compare(engine, plain):
                """Only what is decoded greedily: drawn answers differ whatever the drafter does."""
                results = [result for each in speculative.values() for result in each.values()]
                for run, result in zip(runs, results, strict=True) if arguments.temperature == 0 else ():
                    same = compare_outputs(result["replies"], plain[run["batch_size"]]["replies"])
                    try:
                        logit_gaps(engine, same["differences"])
                    finally:
                        run.update(same)
                found.save()

            found.begin("plain decoding")
            session.answer_all(None, None, "plain", keep=keep, after=compare)
            if arguments.check_parity:
                from common.parity import parity_of_all

                progress.stage("parity: capturing the engine's replies and scoring them offline")
                return 0 if parity_of_all(arguments, config, drafters, speculative, Path(folder), found) else 1
    return 0


def answer_with_drafters(session: Session, drafters: dict, settings: list[Setting], found: Report) -> dict:
    """{(drafter path, setting): {batch size: run_once()}}; one engine for each. Each result is reported at once."""
    from common.capture_points import CapturePoints
    from common.export import export_sglang
    from common.target import text_config

    out, names = {}, names_of(list(drafters))
    for number, (path, (drafter, raw)) in enumerate(drafters.items()):
        served = Path(path)
        if "speculators_model_type" in raw or session.arguments.capture_points:
            served = session.folder / f"drafter-{number}"
            export_sglang(served, drafter, session.config, session.arguments.model)
        layers = text_config(session.config)["num_hidden_layers"]
        expected = CapturePoints(drafter.config.capture_points, layers).sglang_layers_to_capture()
        for position, setting in enumerate(settings):
            layers_file = session.folder / f"layers-{number}-{position}.json"

            def check(layers_file=layers_file, expected=expected, path=path):
                session.layers[path] = check_layers(layers_file, expected, path)

            def keep(batch_size, result, path=path, setting=setting):
                run = report_run(session.arguments, path, names[path], setting, batch_size, result)
                found.content["engine"].append(run | {"layers_to_capture": session.layers[path]})
                found.save()

            name = f"{names[path]} {setting.num_steps}/{setting.topk}/{setting.tree_tokens}"
            found.begin(f"the engine with {name}")
            out[path, setting] = session.answer_all(str(served), setting, name, str(layers_file), check, keep)
    return out


def report_run(arguments, drafter: str, name: str, setting: Setting, batch_size: int, result: dict) -> dict:
    """One entry of report.json's "engine": a drafter, a setting, a batch size; the plain engine's share comes later."""
    figures = summarise(result["replies"], setting, arguments.bootstrap, arguments.seed)
    return {
        "drafter": drafter, "name": name, "num_steps": setting.num_steps, "topk": setting.topk,
        "draft_tokens": setting.tree_tokens, "batch_size": batch_size, "speculative": {**figures, **timing(result)},
        "by_category": by_category(result["replies"], setting), "plain": None, "speed_up": None,
        **compare_outputs([], []),
    }  # fmt: skip


def timing(result: dict) -> dict:
    return {name: result[name] for name in ("seconds", "tokens", "tokens_per_second", "skipped")}
