"""Small models with real random weights, saved as checkpoints that both SGLang and transformers load.

The weights are large enough that neighbouring layers differ by tens of percent: a capture point shifted by one layer
cannot pass for rounding. Used by the engine tests; each is a few megabytes and takes a second or two to write.
"""

import json
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 512
# Head sizes that the attention kernels of a GPU take: for `**sizes` below.
QWEN3_ON_GPU = {"head_dim": 64}
DEEPSEEK_ON_GPU = {"kv_lora_rank": 512, "q_lora_rank": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
                   "v_head_dim": 128}  # fmt: skip


def llama(folder: Path, layers: int = 61, vocab: int = VOCAB) -> Path:
    config = AutoConfig.for_model(
        "llama", vocab_size=vocab, hidden_size=64, intermediate_size=128, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048, rms_norm_eps=1e-5,
        bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    )
    return save(config, folder)


def qwen3(folder: Path, layers: int = 8) -> Path:
    config = AutoConfig.for_model(
        "qwen3", vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=True,
    )
    return save(config, folder)


def qwen3_moe(folder: Path, layers: int = 12, **sizes) -> Path:
    config = dict(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=layers,
        head_dim=16, num_attention_heads=4, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], max_position_embeddings=2048, bos_token_id=1,
        eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    return save(AutoConfig.for_model("qwen3_moe", **config | sizes), folder)


def deepseek_v3(folder: Path, layers: int = 61, vocab: int = VOCAB, **sizes) -> Path:
    """Multi-head latent attention and mixture of experts, as in Kimi-K2.5's language model."""
    config = dict(
        vocab_size=vocab, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=8, num_experts_per_tok=2,
        n_group=1, topk_group=1, first_k_dense_replace=1, kv_lora_rank=32, q_lora_rank=48, qk_rope_head_dim=16,
        qk_nope_head_dim=32, v_head_dim=32, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=False,
        rope_scaling={
            "type": "yarn", "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024,
            "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    )  # fmt: skip
    save(AutoConfig.for_model("deepseek_v3", **config | sizes), folder)
    path = folder / "config.json"  # SGLang reads fields that transformers does not write
    written = json.loads(path.read_text())
    written |= {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    written["rope_scaling"] = {
        "type": "yarn", "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024, "beta_fast": 32,
        "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    }
    written.setdefault("rope_theta", 10000.0)
    path.write_text(json.dumps(written, indent=1))
    return folder


def with_tokenizer_of(source: Path, folder: Path) -> Path:
    """`folder` with the tokenizer and chat template of `source`: a whole checkpoint."""
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        if (source / name).exists():
            shutil.copy(source / name, folder / name)
    return folder


def save(config, folder: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.copy_(1 + 0.1 * torch.randn_like(weight))
            elif "embed" in name or "lm_head" in name:
                weight.normal_(0, 0.5)
            else:
                weight.normal_(0, 1.2 / weight.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return folder
