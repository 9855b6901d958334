"""The EAGLE-3 drafter: one decoder layer over fused capture points, as SGLang's `LlamaForCausalLMEagle3` runs it.

What others use:

* `DrafterConfig`, `DrafterConfig.from_target(hf_config, **overrides)`: sizes, read off the target.
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

from dataclasses import asdict, dataclass

import torch
from torch import nn

from common import drafter_layer as layer
from common import rope
from common.errors import UserError
from common.losses import Teacher, ttt_cross_entropy
from common.packing import PackedBatch
from common.target import text_config
from common.ttt_attention import ttt_attention
from common.vocab import draft_ids, target_ids

# A target without classic key/value heads (MLA) gets a drafter with this many; its query heads keep the target's count.
MLA_KEY_VALUE_HEADS = 8
MLA_HEAD_DIM = 128


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes of a drafter; the same names as the config.json that SGLang reads, where it has them."""

    hidden_size: int  # H, also the width of the target's embedding
    target_hidden_size: int  # H_target of the captured states
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int  # the target's
    draft_vocab_size: int  # N; equal to vocab_size when the drafter's head is full
    capture_points: tuple[int, ...]  # P of them, order of the columns of fc
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None  # as in Hugging Face configs: rope_type default, linear, llama3, yarn
    fc_norm: bool = False  # an RMS norm on each capture point before fc
    norm_output: bool = False  # feed norm(h) instead of h to the next step
    initializer_range: float = 0.02

    def __post_init__(self):
        object.__setattr__(self, "capture_points", tuple(self.capture_points))
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"drafter: {self.num_attention_heads} query heads cannot share {self.num_key_value_heads} kv heads"
            )
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise UserError(f"drafter: draft_vocab_size {self.draft_vocab_size} of a vocabulary of {self.vocab_size}")
        rope.inverse_frequencies(self.head_dim, self.rope_theta, self.rope_scaling)  # refuses an unknown kind now

    @classmethod
    def from_target(cls, hf_config: dict, **overrides) -> "DrafterConfig":
        """Derive a drafter from the target's config.json (its `text_config` where it is nested).

        Heads, FFN width, rope, eps and max_position_embeddings are the target's. A target with multi-head latent
        attention (DeepSeek, Kimi) has no key/value heads to copy: its drafter gets the same number of query heads,
        8 kv heads and heads of 128, and plain yarn where the target scales its rope so. overrides: any field; those
        that are None are ignored. `capture_points` and `draft_vocab_size` must be among them (0: full). Raises
        UserError naming a field that the config lacks.
        """
        text = text_config(hf_config)
        overrides = {name: value for name, value in overrides.items() if value is not None}

        def read(*names, default=None):
            for name in names:
                if text.get(name) is not None:
                    return text[name]
            if default is None:
                raise UserError(
                    f"target config.json lacks {' or '.join(names)}: give the drafter its own as an argument"
                )
            return default

        latent = text.get("kv_lora_rank") is not None
        parameters = text.get("rope_parameters") or {}  # transformers >= 5
        scaling = parameters or text.get("rope_scaling")
        hidden = overrides.get("hidden_size") or read("hidden_size")
        heads = overrides.get("num_attention_heads") or read("num_attention_heads")
        made = dict(
            hidden_size=hidden,
            target_hidden_size=read("hidden_size"),
            num_attention_heads=heads,
            num_key_value_heads=min(MLA_KEY_VALUE_HEADS, heads)
            if latent
            else read("num_key_value_heads", default=heads),
            head_dim=MLA_HEAD_DIM if latent else read("head_dim", default=hidden // heads),
            vocab_size=read("vocab_size"),
            max_position_embeddings=read("max_position_embeddings"),
            rms_norm_eps=read("rms_norm_eps", default=1e-5),
            rope_theta=float(parameters.get("rope_theta") or read("rope_theta", default=10000.0)),
            rope_scaling=_drafter_scaling(scaling, text),
        )
        if "intermediate_size" not in overrides:
            made["intermediate_size"] = read("intermediate_size")
        made.update(overrides)
        for name in ("capture_points", "draft_vocab_size"):
            if name not in made:
                raise UserError(f"DrafterConfig.from_target: {name} must be given")
        made["draft_vocab_size"] = made["draft_vocab_size"] or made["vocab_size"]
        return cls(**made)

    def to_dict(self) -> dict:
        return asdict(self)

    @property
    def num_points(self) -> int:
        return len(self.capture_points)


def _drafter_scaling(scaling: dict | None, text: dict) -> dict | None:
    """The target's rope scaling in the form that SGLang applies to a Llama drafter; None for plain rope."""
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
    if scaling is None or kind == "default":
        return None
    keep = {name: value for name, value in scaling.items() if name not in ("type", "rope_theta")}
    keep["rope_type"] = kind
    if "yarn" in kind:  # deepseek_yarn scales scores in MLA only; the drafter's own attention takes plain yarn
        keep = {n: v for n, v in keep.items() if n not in ("mscale", "mscale_all_dim", "attention_factor")}
        keep["rope_type"] = "yarn"
        keep.setdefault("original_max_position_embeddings", text.get("original_max_position_embeddings"))
    return keep


class Weight(nn.Module):
    """One bias-free weight matrix or norm weight, NaN until something fills it."""

    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, float("nan")))


class Drafter(nn.Module):
    """See the top of this file. Parameters are float32 masters; buffers d2t int64 [N], t2d bool [V]."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config
        self.compute_dtype: torch.dtype | None = None
        self.compiled: tuple = ()
        c, h, d = config, config.hidden_size, config.head_dim
        self.fc = Weight(h, c.num_points * c.target_hidden_size)
        if c.fc_norm:
            self.fc_norm = nn.ModuleList(Weight(c.target_hidden_size) for _ in range(c.num_points))
        self.midlayer = nn.ModuleDict(
            {
                "self_attn": nn.ModuleDict(
                    {
                        "q_proj": Weight(c.num_attention_heads * d, 2 * h),
                        "k_proj": Weight(c.num_key_value_heads * d, 2 * h),
                        "v_proj": Weight(c.num_key_value_heads * d, 2 * h),
                        "o_proj": Weight(h, c.num_attention_heads * d),
                    }
                ),
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
        frequencies, magnitude = rope.inverse_frequencies(d, c.rope_theta, c.rope_scaling)
        self.sizes = layer.Sizes(c.num_attention_heads, c.num_key_value_heads, d, c.rms_norm_eps, magnitude)
        self.register_buffer("rope_frequencies", frequencies, persistent=False)
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
        """Compile the layer (common/drafter_layer.py) for training; drafting without gradients stays eager."""
        parts = (layer.before_attention_first, layer.before_attention_later, layer.after_attention)
        self.compiled = tuple(torch.compile(part, fullgraph=True, dynamic=False) for part in parts)

    def _parts(self):
        if self.compiled and torch.is_grad_enabled():
            return self.compiled
        return layer.before_attention_first, layer.before_attention_later, layer.after_attention

    def weights(self) -> layer.Weights:
        """Masters cast to the compute dtype; call once per forward pass."""
        attention, mlp = self.midlayer["self_attn"], self.midlayer["mlp"]
        dtype = self.compute_dtype or self.fc.weight.dtype

        def cast(*modules):
            parts = [module.weight.to(dtype) for module in modules]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return layer.Weights(
            fc=cast(self.fc),
            fc_norm=tuple(norm.weight for norm in self.fc_norm) if self.config.fc_norm else (),
            qkv=cast(attention["q_proj"], attention["k_proj"], attention["v_proj"]),
            o=cast(attention["o_proj"]),
            gate_up=cast(mlp["gate_proj"], mlp["up_proj"]),
            down=cast(mlp["down_proj"]),
            input_norm=self.midlayer["input_layernorm"].weight,
            hidden_norm=self.midlayer["hidden_norm"].weight,
            post_norm=self.midlayer["post_attention_layernorm"].weight,
            norm=self.norm.weight,
            embed_tokens=self.embed_tokens,
            rope_frequencies=self.rope_frequencies,
        )

    def first_step(self, w: layer.Weights, batch: PackedBatch):
        """Step 0 up to attention. Returns query [C, heads, d], keys and values [T, kv, d], residual [C, H]."""
        return self._parts()[0](w, self.sizes, batch.aux_states, batch.embed_ids, batch.positions, batch.query_rows)

    def later_step(self, w: layer.Weights, state: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor):
        """Step k > 0 up to attention, for states [C, H] of step k-1, tokens [C], rotary positions t+k [C].

        Returns query [C, heads, d], own key and value [C, kv, d]; the residual is `state` itself.
        """
        return self._parts()[1](w, self.sizes, state, token_ids, positions)

    def finish_step(self, w: layer.Weights, attended: torch.Tensor, residual: torch.Tensor):
        """After attention [C, heads, d]. Returns the state to feed back and the normed state for the head, [C, H]."""
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
                empty = keys.new_empty(0, rows.shape[0], *keys.shape[1:])
            else:
                query, key, value = self.later_step(w, state, batch.chain_ids[:, k].contiguous(), positions + k)
                residual = state
                own_keys.append(key)
                own_values.append(value)
            attended = ttt_attention(
                query, keys, values,
                torch.stack(own_keys) if own_keys else empty, torch.stack(own_values) if own_values else empty,
                rows, starts,
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
