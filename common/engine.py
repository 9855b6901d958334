"""SGLang's offline Engine, in this process tree, configured so that hidden states can be captured safely.

    engine = start_engine(settings, log=Path("states/logs/engine.log"))     # about a minute
    answers = await engine.async_generate(input_ids=[[1, 2, 3]], sampling_params={...}, rid=["capture-0-3"])
    stop_engine(engine)

The engine's schedulers are child processes; the tap (common/tap.py) lives in them. This module owns the arguments:
what capture needs, what it cannot live with (refused by name), and what a CPU needs. `EngineDied` is raised in place of
SGLang's own reaction to a dead child, which is to kill the whole process tree.
"""

import asyncio
import atexit
import contextlib
import importlib.util
import json
import logging
import os
import re
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from common.capture_points import CapturePoints
from common.errors import OWN_CODE, UserError
from common.placement import Placement, free_port
from common.tap_link import ENVIRONMENT as LINE_VARIABLE
from common.tap_link import Links

# Arguments that capture cannot live with: name -> (test of the value, why).
UNSAFE = {
    "enable_attn_tp_input_scattered": (bool, "layers hand over partial sums, so states would be one rank's share"),
    "enable_dp_attention": (bool, "each rank sees other requests, so rows would be missing"),
    "dp_size": (lambda n: n > 1, "SGLang's data parallelism hides requests; use torchrun: one replica a process"),
    "enable_two_batch_overlap": (bool, "layers run outside their modules, so hooks see nothing"),
    "enable_single_batch_overlap": (bool, "layers run outside their modules, so hooks see nothing"),
    "pp_size": (lambda n: n > 1, "early layers would be in other processes; use --tp"),
    "attn_cp_size": (lambda n: n > 1, "ranks would hold parts of a prompt"),
    "moe_dp_size": (lambda n: n > 1, "ranks would hold parts of a batch"),
    "moe_a2a_backend": (lambda name: name not in (None, "none"), "layers hand over token slices instead of all rows"),
    "enable_mixed_chunk": (bool, "decoding rows would mix with prompt rows"),
    "disable_radix_cache": (lambda value: not value, "cached prefixes are never computed, so rows would be missing"),
    "disable_prefill_cuda_graph": (lambda value: not value, "replayed graphs run no Python hooks"),
    "enforce_disable_flashinfer_allreduce_fusion": (
        lambda value: not value,
        "fused all-reduce leaves one rank's partial sum in the layer's output",
    ),
    "enable_aiter_allreduce_fusion": (bool, "fused all-reduce leaves one rank's partial sum in the layer's output"),
    "enable_return_hidden_states": (bool, "it mixes rows under chunked prefill and is many times slower; hooks do it"),
    "speculative_algorithm": (bool, "capture needs the plain target; speculation is for eval_acceptance.py"),
    "enable_torch_compile": (bool, "compiled layers run no Python hooks"),
    "forward_hooks": (bool, "they are set from the capture points"),
    "enable_hierarchical_cache": (bool, "cached prefixes are never computed, so rows would be missing"),
    "tokenizer_worker_num": (lambda n: n > 1, "prompts come as token ids; there is nothing to tokenise"),
}
# Arguments that are set from a flag, or from what the scripts know; another value would leave them in the dark.
PLACED = "torchrun's --nnodes and --nproc-per-node, with --tp"
OWNED = {
    "model_path": "--model", "revision": "--revision", "trust_remote_code": "--trust-remote-code", "tp_size": "--tp",
    "device": "--device", "dtype": "--dtype", "random_seed": "--seed", "base_gpu_id": PLACED, "gpu_id_step": PLACED,
    "nnodes": PLACED, "node_rank": PLACED, "dist_init_addr": PLACED, "nccl_port": PLACED,
    "skip_tokenizer_init": "nothing: prompts come as token ids", "enable_multimodal": "nothing: prompts are text",
    "watchdog_timeout": "nothing: a full ring may hold a forward pass back for long, and that is no hang",
    "custom_sigquit_handler": "nothing: a process that dies is reported by the run itself",
}  # fmt: skip
SILENCE_SECONDS = 1800.0  # an answer and the disk take seconds to minutes; beyond this the engine hangs
CPU_MAX_TOTAL_TOKENS = 32_768  # key/value cache on the CPU, in tokens
MOST_DECODING = 512  # requests that decode at once, with CUDA graphs for all of them: without, a third of the speed
LAYER_PREFIXES = ("model", "language_model.model", "model.language_model", "language_model")


class EngineDied(UserError):
    """A process of the engine ended by itself or was killed; what is committed stays, and the run can be resumed."""


@dataclass
class EngineSettings:
    """What decides how the engine runs."""

    model: str
    points: CapturePoints
    tp: int = 1
    trust_remote_code: bool = False
    device: str = "cuda"  # or "cpu"
    dtype: str = "auto"  # of the model: auto, bfloat16, float16, float32
    chunk_tokens: int | None = None  # tokens a forward pass; None: SGLang's choice by GPU memory
    seed: int = 0
    decode_graphs: bool = False  # CUDA graphs for decoding: worth their start-up time only with --regenerate
    extra: dict = field(default_factory=dict)  # further ServerArgs, by name
    placement: Placement = field(default_factory=lambda: Placement(0, 1, True, 0, 1, 0, 0))
    init_address: str | None = None  # host:port of the replica's first node, when it spans nodes
    writers: int = 1  # processes a tensor-parallel rank that write files
    links: Links | None = None  # made here when absent; on the further nodes of a replica only `line` is known
    line: str | None = None  # where the scheduler processes report to, from `Links.where`

    def server_arguments(self) -> dict:
        """All arguments of sglang.ServerArgs. Raises UserError for an unsafe or unknown one, naming it."""
        arguments = {
            "model_path": self.model,
            "trust_remote_code": self.trust_remote_code,
            "tp_size": self.tp,
            "dtype": self.dtype,
            "random_seed": self.seed,
            "device": self.device,
            "chunked_prefill_size": self.chunk_tokens,
            "base_gpu_id": self.placement.base_gpu,
            "nnodes": self.placement.engine_nodes,
            "node_rank": self.placement.engine_node,
            "dist_init_addr": self.init_address,
            "nccl_port": free_port(self.placement.replica),
            "skip_tokenizer_init": True,  # prompts and answers are token ids
            "enable_multimodal": False,  # and text: a multimodal target would ask for its image processor
            "disable_radix_cache": True,
            "disable_prefill_cuda_graph": True,
            "disable_decode_cuda_graph": not self.decode_graphs,
            "enable_mixed_chunk": False,
            "enforce_disable_flashinfer_allreduce_fusion": True,
            "forward_hooks": self.hooks(),
            "log_level": "info",
            "watchdog_timeout": 24 * 3600,  # a full ring makes a forward pass wait for the disk: that is not a hang
            "custom_sigquit_handler": report_dead_child,
        }
        if self.decode_graphs:
            arguments |= {"cuda_graph_max_bs_decode": MOST_DECODING, "max_running_requests": MOST_DECODING}
        if self.device == "cpu":
            arguments |= {
                "attention_backend": "torch_native",
                "sampling_backend": "pytorch",
                "grammar_backend": "none",
                "disable_cuda_graph": True,
                "disable_overlap_schedule": True,
                "max_total_tokens": CPU_MAX_TOTAL_TOKENS,
            }
        for name, value in self.extra.items():
            if name in OWNED:
                raise UserError(f"engine argument {name}={value!r}: this is not for --engine-args; use {OWNED[name]}")
            if name in UNSAFE and UNSAFE[name][0](value):
                raise UserError(f"engine argument {name}={value!r} is unsafe while capturing: {UNSAFE[name][1]}")
            arguments[name] = value
        return arguments

    def hooks(self) -> list[dict]:
        """Forward hooks on the layers whose outputs are stored, and on the logits processor."""
        specs = []
        for slot, layer in enumerate(self.points.hooked_layers()):
            modules = [f"{prefix}.layers.{layer}" for prefix in LAYER_PREFIXES]
            specs.append(self.hook(f"capture {slot}", modules, "common.tap:layer_hook", {"slot": slot}))
        modules = ["logits_processor", "language_model.logits_processor"]
        return [*specs, self.hook("capture logits", modules, "common.tap:logits_hook", {})]

    @staticmethod
    def hook(name: str, modules: list[str], factory: str, config: dict) -> dict:
        return {"name": name, "target_modules": modules, "hook_factory": factory, "config": config}


def available_device() -> tuple[str, int]:
    """("cuda", GPUs of this node) or ("cpu", 0)."""
    import torch

    return ("cuda", torch.cuda.device_count()) if torch.cuda.is_available() else ("cpu", 0)


def require_known_architecture(architecture: str) -> None:
    """UserError unless the installed SGLang has a model class of that name. Reads its source; imports nothing."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("SGLang is not installed here; run `make setup`, or pip install -r requirements.txt")
    models = Path(spec.submodule_search_locations[0]) / "srt" / "models"
    if not any(f"class {architecture}(" in path.read_text(errors="replace") for path in models.glob("*.py")):
        raise UserError(
            f"unknown architecture {architecture}: this SGLang has no model class of that name; "
            f"check 'architectures' in config.json, or choose a model that SGLang serves"
        )


def prepare_environment(device: str, tp: int) -> None:
    """Environment variables that must be set before SGLang is imported."""
    # The store of torchrun's agent makes every rank of the engine's own rendezvous a client of a server nobody starts.
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    os.environ["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"  # Engine() returns on the further nodes of a replica
    root = str(Path(__file__).resolve().parent.parent)  # the hooks are imported by name in the scheduler processes
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    if device == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        if os.environ.get("SGLANG_CPU_OMP_THREADS_BIND", "").count("|") != tp - 1:
            os.environ.pop("SGLANG_CPU_OMP_THREADS_BIND", None)  # of an engine with another number of ranks
        if tp > 1:
            cores = os.cpu_count() or 1
            os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank % cores) for rank in range(tp))
            os.environ["SGLANG_NCCL_SO_PATH"] = "/nonexistent"  # or SGLang loads NCCL and asks for a GPU


def start_engine(settings: EngineSettings, log: Path):
    """Start the engine; everything that SGLang prints goes to `log`.

    On the further nodes of a replica the engine takes no requests: its `tokenizer_manager` is None.

    Raises UserError, with the engine's own last word, when it does not come up.
    """
    prepare_environment(settings.device, settings.tp)
    links = getattr(settings, "links", None)
    if links is None and not getattr(settings, "line", None):
        links = Links(settings.tp, getattr(settings, "writers", 0))
    os.environ[LINE_VARIABLE] = links.where if links else settings.line
    arguments = settings.server_arguments()
    log.parent.mkdir(parents=True, exist_ok=True)
    offset = log.stat().st_size if log.exists() else 0
    with output_to(log):
        import sglang
        from sglang.srt.entrypoints.engine import Engine
        from sglang.srt.server_args import ServerArgs

        from common import tap

        if unknown := sorted(set(arguments) - set(ServerArgs.__dataclass_fields__)):
            raise UserError(f"engine argument {unknown[0]!r} does not exist in SGLang {sglang.__version__}")

        class CaptureEngine(Engine):
            run_scheduler_process_func = staticmethod(tap.run_scheduler)
            run_detokenizer_process_func = staticmethod(tap.run_detokenizer)

        try:
            engine = CaptureEngine(**arguments)
        except Exception as error:  # whatever SGLang stumbles over; the log has it in full
            kill_children()
            quieten_logging(log)  # SGLang has a word to say when this process ends
            cause = cause_in(log, offset) or f"{type(error).__name__}: {error}"  # a child's last word before our own
            traceback.print_exc()
            if "trust_remote_code=True" in f"{cause} {error}":
                cause = OWN_CODE
            raise UserError(f"the engine did not start: {cause} (whole log: {log})") from None
        except KeyboardInterrupt:
            kill_children()
            quieten_logging(log)
            raise
    engine.links = links
    quieten_logging(log)
    if engine.tokenizer_manager is not None:
        engine.tokenizer_manager.signal_handler_class = ChildSignals
    return engine


@contextlib.contextmanager
def output_to(log: Path):
    """Send what this process and children born meanwhile print to `log`; children keep it for life."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
        os.close(saved[0])
        os.close(saved[1])


def quieten_logging(log: Path) -> None:
    """Messages that SGLang logs in this process go to its log file as well."""
    root = logging.getLogger()
    root.handlers = [logging.FileHandler(log)]


def cause_in(log: Path, offset: int) -> str | None:
    """The last exception that the engine printed into its log after `offset`, as one line."""
    text = log.read_text(errors="replace")[offset:]
    lines = [line for line in text.splitlines() if re.match(r"^[\w.]*(Error|Exception|Interrupt)\b.*: ", line)]
    lines = [line for line in lines if not line.startswith(("RuntimeError: Initialization failed", "EOFError"))]
    return lines[-1][:500] if lines else None


# ---- children that die ---------------------------------------------------------------------------------------------


def report_dead_child(signum=None, frame=None):
    """SIGQUIT from SGLang's children that fail: while the engine starts and, on further nodes, at any time."""
    raise EngineDied("a process of the engine failed")


def expect_the_end() -> None:
    """From here on a process of the engine may fail, because another node has stopped its own."""
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    ChildSignals.on_dead_child = lambda: None


class ChildSignals:
    """SGLang's tokenizer manager installs these in the event loop; what they call is ours to set."""

    on_dead_child = staticmethod(lambda: None)
    on_terminate = staticmethod(lambda: None)

    def __init__(self, tokenizer_manager):
        pass

    def sigterm_handler(self, signum=None, frame=None):
        ChildSignals.on_terminate()

    def running_phase_sigquit_handler(self, signum=None, frame=None):
        ChildSignals.on_dead_child()


def when_it_dies(engine, call) -> None:
    """Inside the engine's running event loop: have call() called there when a process of the engine dies; at once, if
    one has died before."""
    loop = asyncio.get_running_loop()
    ChildSignals.on_dead_child = call
    engine.links.on_message = lambda rank, kind, content: loop.call_soon_threadsafe(call) if kind == "lost" else None
    if engine.links.lost:
        call()


def stop_engine(engine) -> None:
    """End the engine's processes. SGLang's own shutdown would kill every child of this process, whoever started it."""
    atexit.unregister(engine.shutdown)
    if engine.tokenizer_manager is not None and engine.tokenizer_manager._subprocess_watchdog is not None:
        engine.tokenizer_manager._subprocess_watchdog.stop()
    if engine.send_to_rpc is not None:
        engine.send_to_rpc.close(linger=0)
    kill_children(set(engine.get_all_child_pids()))
    if engine.links is not None:
        engine.links.close()


def gone_silent(engine, seconds: float) -> EngineDied:
    """What to raise when nothing has come back for `seconds`; the children print their stacks into the log first."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        name = " ".join(child.cmdline())
        if child.pid in engine.get_all_child_pids() or "common.tap_writer" in name:
            child.send_signal(signal.SIGUSR2)  # see leave_signals_to_the_main_process in tap_link.py
    time.sleep(1.0)
    return EngineDied(f"the engine has been silent for {seconds:.0f} s; its stacks are in its log")


def kill_children(pids: set[int] | None = None) -> None:
    """End the children of this process (all, or these) and theirs, and wait until they are gone."""
    import psutil

    chosen = [child for child in psutil.Process().children() if pids is None or child.pid in pids]
    children = [process for child in chosen for process in (child, *child.children(recursive=True))]
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(signal.SIGKILL)
    psutil.wait_procs(children, timeout=30)


def parse_engine_arguments(text: str | None) -> dict:
    """`--engine-args '{"mem_fraction_static": 0.8}'` as a dict."""
    if not text:
        return {}
    try:
        arguments = json.loads(text)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise UserError(f"--engine-args {text!r}: expected a JSON object such as {{\"mem_fraction_static\": 0.8}}")
    return arguments
