"""The EAGLE-3 drafter: one decoder layer over fused capture points, as SGLang runs it: with a Llama layer
(`LlamaForCausalLMEagle3`) or with latent attention (`Eagle3DeepseekV2ForCausalLM`, called "mla").

What others use:

* `DrafterConfig`, `DrafterConfig.from_target(hf_config, drafter_type, **overrides)` (common/drafter_config.py).
* `Drafter(config)`: its `state_dict()` has exactly the keys SGLang loads (`fc.weight`, `midlayer.*`, `norm.weight`,
  `lm_head.weight`, buffers `d2t` and `t2d`; `fc_norm.{i}.weight` when asked). Everything starts as NaN, so a weight
  that nothing loaded shows in the first loss; `init_weights` or `load_state_dict` fills them and `check_loaded` names
  what is left. The embedding is the target's, frozen, set by `set_embedding` and not part of the state dict.
* `ttt_loss(drafter, batch, teacher, num_steps, decay)`: the training loss (true tokens, own states) and its metrics.
  `drafter` may be wrapped in DDP (build it with `broadcast_buffers=False`) or sharded by FSDP2: the work is `forward`.
* `draft(drafter, batch, num_steps)` and `DraftChain` (common/drafting.py): drafting for evaluation, own tokens.

Batches are `common.packing.PackedBatch`: the alignment of positions, tokens and teachers is defined there. The
teacher is `common.losses.Teacher.from_target(parts, target_ids(drafter.d2t))`; `parts` are
`common.target.load_target_parts(path)`.

Masters and compute: `drafter.compute_dtype` (None: the parameters' own dtype) is what weights and states are cast to
inside `forward`; on a GPU keep float32 parameters and set torch.bfloat16. `compile_parts()` compiles the layer for
training at fixed shapes (budgets: multiples of 16). Nothing here synchronises with the device.
Callers: train_drafter.py, eval_acceptance.py, common/checkpoints.py.
"""

import torch
from torch import nn

from common import drafter_layer as layer
from common import drafter_layer_mla as layer_mla
from common import rope
from common.drafter_config import MLA_SIZES, DrafterConfig
from common.errors import UserError
from common.losses import Teacher, ttt_cross_entropy
from common.packing import PackedBatch
from common.state_dtypes import code_values
from common.ttt_attention import fused_width, ttt_attention
from common.vocab import draft_ids, target_ids


class Weight(nn.Module):
    """One bias-free weight matrix or norm weight, NaN until something fills it."""

    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, float("nan")))


def _attention_weights(c: DrafterConfig) -> nn.ModuleDict:
    h, heads = c.hidden_size, c.num_attention_heads
    if c.drafter_type == "mla":
        return nn.ModuleDict(
            {
                "q_a_proj": Weight(c.q_lora_rank, 2 * h),
                "q_a_layernorm": Weight(c.q_lora_rank),
                "q_b_proj": Weight(heads * c.head_dim, c.q_lora_rank),
                "kv_a_proj_with_mqa": Weight(c.kv_lora_rank + c.qk_rope_head_dim, 2 * h),
                "kv_a_layernorm": Weight(c.kv_lora_rank),
                "kv_b_proj": Weight(heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
                "o_proj": Weight(h, heads * c.v_head_dim),
            }
        )
    return nn.ModuleDict(
        {
            "q_proj": Weight(heads * c.head_dim, 2 * h),
            "k_proj": Weight(c.num_key_value_heads * c.head_dim, 2 * h),
            "v_proj": Weight(c.num_key_value_heads * c.head_dim, 2 * h),
            "o_proj": Weight(h, heads * c.head_dim),
        }
    )


class Drafter(nn.Module):
    """See the top of this file. Parameters are float32 masters; buffers d2t int64 [N], t2d bool [V]."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config
        self.compute_dtype: torch.dtype | None = None
        self.compiled: tuple = ()
        c, h = config, config.hidden_size
        self.fc = Weight(h, c.num_points * c.target_hidden_size)
        if c.fc_norm:
            self.fc_norm = nn.ModuleList(Weight(c.target_hidden_size) for _ in range(c.num_points))
        self.midlayer = nn.ModuleDict(
            {
                "self_attn": _attention_weights(c),
                "mlp": nn.ModuleDict(
                    {
                        "gate_proj": Weight(c.intermediate_size, h),
                        "up_proj": Weight(c.intermediate_size, h),
                        "down_proj": Weight(h, c.intermediate_size),
                    }
                ),
                "input_layernorm": Weight(h),
                "hidden_norm": Weight(h),
                "post_attention_layernorm": Weight(h),
            }
        )
        self.norm = Weight(h)
        self.lm_head = Weight(c.draft_vocab_size, h)
        self.register_buffer("d2t", torch.zeros(c.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(c.vocab_size, dtype=torch.bool))
        frequencies, magnitude = rope.inverse_frequencies(c.rotary_dim, c.rope_theta, c.rope_scaling)
        if c.drafter_type == "mla":
            self.sizes = layer_mla.Sizes(c.num_attention_heads, *(getattr(c, name) for name in MLA_SIZES),
                                         c.rms_norm_eps, magnitude)  # fmt: skip
            self.score_scale = c.head_dim**-0.5 * rope.score_factor(c.rope_scaling)
        else:
            heads = c.num_attention_heads, c.num_key_value_heads, c.head_dim
            self.sizes, self.score_scale = layer.Sizes(*heads, c.rms_norm_eps, magnitude), None
        self.register_buffer("rope_frequencies", frequencies, persistent=False)
        self.register_buffer("code_values", torch.tensor(code_values()), persistent=False)
        self.register_buffer("embed_tokens", None, persistent=False)  # [V, H], the target's
        self.register_buffer("draft_of_target", None, persistent=False)  # [V] draft id, -1 outside
        self.register_load_state_dict_post_hook(lambda module, _keys: module._index_vocab())

    # -- filling ------------------------------------------------------------------------------------------------

    def set_embedding(self, embed_tokens: torch.Tensor) -> None:
        """Give the drafter the target's embedding [V, H]; kept as it is (bf16 from most checkpoints), never trained."""
        expected = (self.config.vocab_size, self.config.hidden_size)
        if embed_tokens.shape[0] < expected[0] or embed_tokens.shape[1] != expected[1]:
            raise UserError(f"target embedding is {tuple(embed_tokens.shape)}, the drafter expects {expected}")
        self.embed_tokens = embed_tokens.to(self.fc.weight.device)

    def set_vocab(self, d2t: torch.Tensor, t2d: torch.Tensor) -> None:
        """Set the draft vocabulary (common/vocab.py): d2t int64 [N], t2d bool [V]."""
        if d2t.shape != self.d2t.shape or t2d.shape != self.t2d.shape or int(t2d.sum()) != d2t.shape[0]:
            raise UserError(
                f"draft vocabulary: d2t {tuple(d2t.shape)}, t2d {tuple(t2d.shape)} with {int(t2d.sum())} set; "
                f"expected {tuple(self.d2t.shape)} and {tuple(self.t2d.shape)} with {self.config.draft_vocab_size} set"
            )
        self.d2t.copy_(d2t)
        self.t2d.copy_(t2d)
        self._index_vocab()

    def _index_vocab(self) -> None:
        self.draft_of_target = draft_ids(self.d2t, self.config.vocab_size)

    @torch.no_grad()
    def init_weights(self, seed: int, lm_head: torch.Tensor | None = None) -> None:
        """Fresh weights: normal(0, initializer_range) matrices, norms of one, the head from the target's.

        lm_head: the target's full head [V, H] (its rows of the draft vocabulary are taken, so `set_vocab` comes
        first), or None for a random head. Same seed, same weights, on every device.
        """
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                draw = torch.empty(parameter.shape, dtype=torch.float32)
                parameter.copy_(draw.normal_(0, self.config.initializer_range, generator=generator))
        if lm_head is not None and lm_head.shape[1] == self.config.hidden_size:
            self.lm_head.weight.copy_(lm_head[target_ids(self.d2t).to(lm_head.device)])

    def check_loaded(self) -> None:
        """Raise UserError naming every weight with a NaN, and an absent embedding or draft vocabulary."""
        missing = [name for name, value in self.named_parameters() if bool(value.isnan().any())]
        missing += ["embed_tokens"] if self.embed_tokens is None else []
        missing += ["d2t/t2d"] if int(self.t2d.sum()) != self.config.draft_vocab_size else []
        if missing:
            raise UserError(f"drafter weights not loaded (or NaN): {', '.join(missing)}")

    # -- the layer ----------------------------------------------------------------------------------------------

    def compile_parts(self) -> None:
        """Compile the layer (common/drafter_layer.py) for training; drafting without gradients stays eager.

        The heads of latent attention are then made as wide as the attention kernels want them, once, where compiled
        code writes the zeros at no cost of its own; else each of a step's calls fills up all keys and keeps the copy.
        """
        if self.config.drafter_type == "mla":
            self.sizes = self.sizes._replace(width=fused_width(self.config.head_dim, self.config.v_head_dim))
        self.compiled = tuple(torch.compile(part, fullgraph=True, dynamic=False) for part in self._parts())

    def _parts(self):
        if self.compiled and torch.is_grad_enabled():
            return self.compiled
        kind = layer if self.config.drafter_type == "llama" else layer_mla
        return kind.before_attention_first, kind.before_attention_later, kind.after_attention

    def weights(self) -> layer.Weights:
        """Masters cast to the compute dtype; call once per forward pass."""
        attention, mlp = self.midlayer["self_attn"], self.midlayer["mlp"]
        dtype = self.compute_dtype or self.fc.weight.dtype

        def cast(*modules):
            parts = [module.weight.to(dtype) for module in modules]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        latent = ()
        if self.config.drafter_type == "mla":
            latent = layer_mla.LatentWeights(
                attention["q_a_layernorm"].weight, cast(attention["q_b_proj"]),
                attention["kv_a_layernorm"].weight, cast(attention["kv_b_proj"]),
            )  # fmt: skip
        entry = ("q_a_proj", "kv_a_proj_with_mqa") if latent else ("q_proj", "k_proj", "v_proj")
        return layer.Weights(
            fc=cast(self.fc),
            fc_norm=tuple(norm.weight for norm in self.fc_norm) if self.config.fc_norm else (),
            qkv=cast(*(attention[name] for name in entry)),
            o=cast(attention["o_proj"]),
            gate_up=cast(mlp["gate_proj"], mlp["up_proj"]),
            down=cast(mlp["down_proj"]),
            input_norm=self.midlayer["input_layernorm"].weight,
            hidden_norm=self.midlayer["hidden_norm"].weight,
            post_norm=self.midlayer["post_attention_layernorm"].weight,
            norm=self.norm.weight,
            embed_tokens=self.embed_tokens,
            rope_frequencies=self.rope_frequencies,
            code_values=self.code_values,
            latent=latent,
        )

    def first_step(self, w: layer.Weights, batch: PackedBatch):
        """Step 0 up to attention. Returns query [C, heads, d], keys [T, kv, d], values [T, kv, e], residual [C, H].

        e is d but for latent attention.
        """
        points = batch.aux_states, batch.aux_scales
        return self._parts()[0](w, self.sizes, *points, batch.embed_ids, batch.positions, batch.query_rows)

    def later_step(self, w: layer.Weights, state: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor):
        """Step k > 0 up to attention, for states [C, H] of step k-1, tokens [C], rotary positions t+k [C].

        Returns query [C, heads, d], own key [C, kv, d] and value [C, kv, e]; the residual is `state` itself.
        """
        return self._parts()[1](w, self.sizes, state, token_ids, positions)

    def finish_step(self, w: layer.Weights, attended: torch.Tensor, residual: torch.Tensor):
        """After attention [C, heads, e]. Returns the state to feed back and the normed state for the head, [C, H]."""
        state, normed = self._parts()[2](w, self.sizes, attended, residual)
        return (normed if self.config.norm_output else state), normed

    # -- training -----------------------------------------------------------------------------------------------

    def forward(self, batch: PackedBatch, teacher: Teacher, num_steps: int, decay: float, counted=None):
        """The work of `ttt_loss`, as a method so that DDP and FSDP2 can wrap it."""
        w = self.weights()
        rows, starts = batch.query_rows, batch.query_starts
        positions = batch.positions[rows]
        hidden, own_keys, own_values, state = [], [], [], None
        for k in range(num_steps):
            if k == 0:
                query, keys, values, residual = self.first_step(w, batch)
                none = [x.new_empty(0, rows.shape[0], *x.shape[1:]) for x in (keys, values)]
            else:
                query, key, value = self.later_step(w, state, batch.chain_ids[:, k].contiguous(), positions + k)
                residual = state
                own_keys.append(key)
                own_values.append(value)
            attended = ttt_attention(
                query, keys, values, *((torch.stack(own_keys), torch.stack(own_values)) if k else none), rows, starts,
                scale=self.score_scale,
            )  # fmt: skip
            state, normed = self.finish_step(w, attended, residual)
            hidden.append(normed)
        weights = batch.weights[:, :num_steps]
        number = weights.sum(0)  # [K] positions that count at each step
        counted = number if counted is None else counted[:num_steps].to(number)
        decays = decay ** torch.arange(num_steps, device=number.device)
        coefficients = weights * (decays / counted.clamp(min=1))
        loss, entropy, hits = ttt_cross_entropy(
            hidden, self.lm_head.weight, teacher, batch.last_states, batch.slots[:, :num_steps], coefficients,
            self.draft_of_target[batch.predicted_ids],
        )  # fmt: skip
        return loss, {"entropy_sum": entropy, "hits": hits, "counted": number}


def ttt_loss(
    drafter: nn.Module,
    batch: PackedBatch,
    teacher: Teacher,
    num_steps: int,
    decay: float,
    counted: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Training-time-test loss with true tokens and own states (EAGLE-3, Li et al. 2025).

    loss = sum over k of decay ** k * (mean over positions that count at step k of the soft-target cross-entropy).
    drafter: a `Drafter`, or DDP around one. batch: on the drafter's device, laid out for at least `num_steps` steps.
    counted: [num_steps], the divisor of each step's sum; by default what this batch holds. Give the total over ranks
    and accumulation steps and add up losses (under DDP, which averages gradients, multiply the loss by the world
    size): then any split of the same documents trains alike. A batch with nothing that counts has loss 0 and zero
    gradients.
    Returns the loss (scalar, float32) and sums over this batch, all [num_steps] on the device, not synchronised:
    `entropy_sum` (cross-entropy; divide by `counted`), `hits` (most likely draft token is the text's token; text
    tokens outside the draft vocabulary are misses), `counted`.
    """
    return drafter(batch, teacher, num_steps, decay, counted)
