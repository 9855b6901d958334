"""SGLang's own drafter classes on the CPU, a reference for tests/test_sglang_module.py (run in a process of its own).

    python tests/sglang_module.py cases.pt results.pt

A case holds the config, the exported weights, the embedding and one document; everything but the attention kernel
is SGLang's code: its module, its weight loading, its rope, its norms. The attention backend here keeps keys and values
and computes softmax over all of them, which is what any of its kernels does for one request. A drafter with latent
attention comes as the folder that was exported, goes through SGLang's ModelConfig, and runs on the absorbed path: the
backend keeps latents.
"""

import logging
import os
import sys
from dataclasses import MISSING
from pathlib import Path
from types import SimpleNamespace

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

import torch


class Attention:
    """All keys and values so far, causal within a new extension."""

    prefill_attention_backend_str = decode_attention_backend_str = "torch_native"

    def __init__(self):
        self.keys = self.values = None

    def forward(self, q, k, v, layer, _batch, _save=True, **_):
        new = q.shape[0]
        old = 0 if self.keys is None else self.keys.shape[0]
        self.keys = k if old == 0 else torch.cat((self.keys, k))
        self.values = v if old == 0 else torch.cat((self.values, v))
        group = layer.tp_q_head_num // layer.tp_k_head_num
        keys, values = (x.repeat_interleave(group, dim=1) for x in (self.keys, self.values))
        scores = torch.einsum("qhd,khd->hqk", q.view(new, -1, layer.head_dim), keys) * layer.scaling
        seen = torch.arange(old + new)[None] <= old + torch.arange(new)[:, None]
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).reshape(new, -1)


def start(rendezvous):
    """The process groups and global arguments that the modules look up; no engine."""
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    arguments = ServerArgs.__new__(ServerArgs)  # defaults only: building real ones would look for a model
    for name, field in ServerArgs.__dataclass_fields__.items():
        setattr(arguments, name, None if field.default is MISSING else field.default)
    arguments.device = "cpu"
    set_global_server_args_for_scheduler(arguments)
    init_distributed_environment(1, 0, rendezvous, 0, "gloo")
    initialize_model_parallel(1, 1)
    return arguments


def llama(case):
    from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
    from transformers import LlamaConfig

    model = LlamaForCausalLMEagle3(LlamaConfig(**case["config"])).eval()
    model.load_weights(iter(case["weights"].items()))
    return model, {}


def latent(case, arguments):
    """The module of an exported folder, and what SGLang made of it: its config, weights it skipped or did not get."""
    from safetensors.torch import load_file
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.models import kimi_k25_eagle3
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)
    config = ModelConfig(case["folder"], is_draft_model=True, dtype="float32")
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "scaling", "context_len")
    found = {name: getattr(config, name) for name in names} | {"attention_arch": config.attention_arch.name}
    (architecture,) = config.hf_config.architectures
    # on a CPU its rope knows deepseek_yarn alone; for a device without a name it builds the one of a GPU
    arguments.device = "cpu" if case["scaled"] else None
    model = getattr(kimi_k25_eagle3, architecture)(config.hf_config).eval()
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    skipped = []
    handler = logging.Handler()
    handler.emit = lambda record: skipped.append(record.getMessage())
    kimi_k25_eagle3.logger.addHandler(handler)
    model.load_weights(iter(load_file(Path(case["folder"]) / "model.safetensors").items()))
    empty = [name for name, parameter in model.named_parameters() if bool(parameter.isnan().any())]
    found |= {"skipped": skipped, "empty": empty, "module_scaling": model.model.midlayer.self_attn.scaling}
    return model, found


def run(case, arguments) -> dict:
    """Logits [steps, N] and fed-back states [steps, H] of every chain, by the position at which it begins; the target
    ids of all draft ids; and what `latent` found."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    model, found = latent(case, arguments) if "folder" in case else llama(case)
    count = case["draft_vocab_size"]
    model.model.embed_tokens.weight.data[: case["embedding"].shape[0]] = case["embedding"]

    def step(attention, token_ids, positions, hidden):
        batch = SimpleNamespace(
            mm_input_embeds=None, spec_info=SimpleNamespace(hidden_states=hidden), contains_mm_inputs=lambda: False,
            forward_mode=SimpleNamespace(
                is_extend=lambda: False, is_draft_extend_v2=lambda: False, is_decode_or_idle=lambda: True,
            ),
            attn_cp_metadata=None,
        )  # fmt: skip
        with forward_context(ForwardContext(attn_backend=attention)):
            normed, (state,) = model.model(token_ids, positions, batch)
        return normed @ model.lm_head.weight[:count].T, state

    chains, fed_back = {}, {}
    for t, tokens in case["chains"].items():  # tokens: x[t+1], then those of the later steps
        attention, ids = Attention(), case["input_ids"]
        logits, states = step(attention, ids[1 : t + 2], torch.arange(t + 1), case["aux_states"][: t + 1])
        chain, state = [logits[-1]], states[-1:]
        back = [state[0]]
        for k, token in enumerate(tokens[1:].tolist(), 1):
            logits, state = step(attention, torch.tensor([token]), torch.tensor([t + k]), state)
            chain.append(logits[0])
            back.append(state[0])
        chains[t], fed_back[t] = torch.stack(chain), torch.stack(back)
    return {"logits": chains, "states": fed_back, "hot_token_id": model.get_hot_token_id(), **found}


@torch.no_grad()
def main(cases_path, results_path):
    arguments = start(f"file://{results_path}.rendezvous")
    torch.save([run(case, arguments) for case in torch.load(cases_path, weights_only=True)], results_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
