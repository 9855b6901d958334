"""What SGLang makes of an exported drafter's layer ids, asked of a running engine without speculative decoding.

EAGLE-3 decodes on a GPU only, but the part that turns `eagle_aux_hidden_state_layer_ids` of the drafter's config.json
into the layers that the target captures is plain Python. `serve_drafter`, called in the scheduler process through
tests/faults.py, runs SGLang's own: the beginning of `ModelRunner.__init__` with the arguments that eval_acceptance.py
starts an engine with, then `init_aux_hidden_state_capture` on the model that is running. The layers are read back as
eval_acceptance.py does it, by its hook, from the next forward pass.
"""

import copy
from pathlib import Path

import torch

from common import tap
from common.drafter import Drafter, DrafterConfig
from common.engine_eval import ServingSettings, check_layers
from common.export import export_sglang
from common.offline_eval import Setting
from common.target import load_target_parts
from common.vocab import build_draft_vocab


def random_drafter(target: Path, folder: Path, points, serving_ids: list[int] | None = None) -> Path:
    """An untrained drafter for the checkpoint `target`, exported as train_drafter.py does it; serving_ids: other
    layer ids than the exporter's own."""
    parts = load_target_parts(target)
    d2t, t2d = build_draft_vocab(torch.arange(parts.vocab_size, 0, -1), min(parts.vocab_size, 1000))
    config = DrafterConfig.from_target(
        parts.config, capture_points=tuple(points), draft_vocab_size=len(d2t), intermediate_size=128
    )
    drafter = Drafter(config)
    drafter.set_vocab(d2t, t2d)
    drafter.init_weights(0, parts.lm_head)
    export_sglang(folder, drafter, parts.config, str(target), serving_ids)
    return folder


def serve_drafter(scheduler, drafter: str, layers_file: str) -> None:
    """In the scheduler process: from now on the target captures what this drafter asks for."""
    from sglang.srt.model_executor.hook_manager import register_forward_hooks
    from sglang.srt.model_executor.model_runner import ModelRunner

    class ReadUntilHere(Exception):
        pass

    class BeginningOfRunner(ModelRunner):
        def model_specific_adjustment(self):  # what __init__ calls once it has read the drafter's config
            raise ReadUntilHere

    arguments = ServingSettings(
        scheduler.server_args.model_path, drafter, Setting(3, 1, 4), layers_file, device=scheduler.server_args.device
    ).server_arguments()
    asked = copy.copy(scheduler.server_args)
    for name, value in arguments.items():
        if name.startswith("speculative_"):
            setattr(asked, name, value)
    running = scheduler.tp_worker.model_runner
    names = ("mem_fraction_static", "gpu_id", "tp_rank", "tp_size", "moe_ep_rank", "moe_ep_size", "pp_rank", "pp_size")
    beginning = BeginningOfRunner.__new__(BeginningOfRunner)
    try:
        beginning.__init__(
            running.model_config, nccl_port=0, server_args=asked, **{name: getattr(running, name) for name in names}
        )
    except ReadUntilHere:
        pass
    beginning.model = running.model
    beginning.init_aux_hidden_state_capture()
    register_forward_hooks(running.model, arguments["forward_hooks"])


def stop_serving(scheduler) -> None:
    """Back to a target that captures nothing of its own."""
    for module in tap.model.modules():
        if hasattr(module, "layers_to_capture"):
            module.layers_to_capture = []
        if hasattr(module, "capture_aux_hidden_states"):
            module.capture_aux_hidden_states = False


def layers_read_back(engine, drafter: Path, points: list[int], layers_file: Path) -> list[int]:
    """The layers before which the engine captures for this drafter; UserError when they are not `points`."""
    engine.collective_rpc("serve_drafter", drafter=str(drafter), layers_file=str(layers_file))
    try:
        engine.generate(input_ids=[100, 101, 102], sampling_params={"temperature": 0.0, "max_new_tokens": 1})
        return check_layers(layers_file, points, str(drafter))
    finally:
        engine.collective_rpc("stop_serving")
