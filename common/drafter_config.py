"""Sizes of a drafter: the names of the config.json that SGLang reads, derived from the target where nothing is given.

common/drafter.py builds a `Drafter` from a `DrafterConfig` and passes it on to everybody who imports it from there;
common/export.py writes it, common/load_drafter.py reads it. The type of the drafter is told by its sizes: "mla" has
those of latent attention.
"""

from dataclasses import asdict, dataclass

from common import rope
from common.errors import UserError
from common.target import text_config

# A Llama drafter of a target without classic key/value heads (MLA) gets this many; its query heads are the target's.
MLA_KEY_VALUE_HEADS = 8
MLA_HEAD_DIM = 128
SIZES = ("hidden_size", "target_hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
         "intermediate_size", "vocab_size", "draft_vocab_size", "max_position_embeddings")  # fmt: skip
MLA_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes of a drafter; the same names as the config.json that SGLang reads, where it has them."""

    hidden_size: int  # H, also the width of the target's embedding
    target_hidden_size: int  # H_target of the captured states
    num_attention_heads: int
    num_key_value_heads: int  # mla: as many as query heads
    head_dim: int  # of queries and keys; mla: qk_nope_head_dim + qk_rope_head_dim
    intermediate_size: int
    vocab_size: int  # the target's
    draft_vocab_size: int  # N; equal to vocab_size when the drafter's head is full
    capture_points: tuple[int, ...]  # P of them, order of the columns of fc
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None  # as in Hugging Face configs: default, linear, llama3, yarn; mla: deepseek_yarn
    fc_norm: bool = False  # an RMS norm on each capture point before fc
    norm_output: bool = False  # feed norm(h) instead of h to the next step
    initializer_range: float = 0.02
    q_lora_rank: int | None = None  # this and the next four: sizes of latent attention, None for a Llama layer
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None

    def __post_init__(self):
        object.__setattr__(self, "capture_points", tuple(self.capture_points))
        require_sizes({name: getattr(self, name) for name in SIZES})
        kinds = ("default", "deepseek_yarn") if self.drafter_type == "mla" else ("default", "linear", "llama3", "yarn")
        kind = rope.kind_of(self.rope_scaling)
        if kind not in kinds:
            raise UserError(f"drafter of type {self.drafter_type}: rope scaling {kind!r}, expected {', '.join(kinds)}")
        if self.drafter_type == "mla":
            if absent := [name for name in MLA_SIZES if getattr(self, name) is None]:
                raise UserError(f"drafter of type mla: {', '.join(absent)} must be given")
            require_sizes({name: getattr(self, name) for name in MLA_SIZES})
            expected = self.num_attention_heads, self.qk_nope_head_dim + self.qk_rope_head_dim
            if (found := (self.num_key_value_heads, self.head_dim)) != expected:
                raise UserError(f"drafter of type mla: (kv heads, head_dim) are {found}, expected {expected}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"drafter: {self.num_attention_heads} query heads cannot share {self.num_key_value_heads} kv heads"
            )
        if self.draft_vocab_size > self.vocab_size:
            raise UserError(f"drafter: draft_vocab_size {self.draft_vocab_size} of a vocabulary of {self.vocab_size}")
        if self.rotary_dim % 2:
            name = "head_dim" if self.drafter_type == "llama" else "qk_rope_head_dim"
            raise UserError(f"drafter: {name} {self.rotary_dim} is odd, rope turns pairs; give an even {flag(name)}")
        rope.inverse_frequencies(self.rotary_dim, self.rope_theta, self.rope_scaling)  # refuses a lacking field now

    @classmethod
    def from_target(cls, hf_config: dict, drafter_type: str = "llama", **overrides) -> "DrafterConfig":
        """Derive a drafter from the target's config.json (its `text_config` where it is nested).

        Heads, FFN width, rope, eps and max_position_embeddings are the target's. A target with multi-head latent
        attention (DeepSeek, Kimi) has no key/value heads to copy: its Llama drafter gets the same number of query
        heads, 8 kv heads and heads of 128, and plain yarn where the target scales its rope so; its drafter of type mla
        has the target's latent sizes and its very rope. overrides: any field; those that are None are ignored.
        `capture_points` and `draft_vocab_size` must be among them (0: full). Raises UserError naming a field that the
        config lacks, or one that a drafter of this type has no use for.
        """
        text = text_config(hf_config)
        overrides = {name: value for name, value in overrides.items() if value is not None}
        useless = MLA_SIZES if drafter_type == "llama" else ("num_key_value_heads", "head_dim")
        if given := [flag(name) for name in useless if name in overrides]:
            raise UserError(f"{', '.join(given)}: a drafter of type {drafter_type} has no such size")

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
        parameters = _rope_parameters(text)
        scaling = parameters or text.get("rope_scaling")
        hidden = overrides["hidden_size"] if "hidden_size" in overrides else read("hidden_size")
        heads = overrides["num_attention_heads"] if "num_attention_heads" in overrides else read("num_attention_heads")
        require_sizes(dict(hidden_size=hidden, num_attention_heads=heads))
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
            rope_scaling=_drafter_scaling(scaling, text, drafter_type),
        )
        if drafter_type == "mla":
            sizes = {name: overrides.get(name, text.get(name)) for name in MLA_SIZES}
            if absent := [flag(name) for name, size in sizes.items() if size is None]:
                raise UserError(f"drafter of type mla: the target's config.json has no such sizes (is it a model with "
                                f"multi-head latent attention?): give {', '.join(absent)}")  # fmt: skip
            require_sizes(sizes)
            head_dim = sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]
            made |= sizes | dict(num_key_value_heads=heads, head_dim=head_dim)
        if "intermediate_size" not in overrides:
            made["intermediate_size"] = read("intermediate_size")
        made.update(overrides)
        for name in ("capture_points", "draft_vocab_size"):
            if name not in made:
                raise UserError(f"DrafterConfig.from_target: {name} must be given")
        made["draft_vocab_size"] = made["draft_vocab_size"] or made["vocab_size"]
        return cls(**made)

    def to_dict(self) -> dict:
        """Keyword arguments of the same config; without the latent sizes of a drafter that has none."""
        return {name: value for name, value in asdict(self).items() if value is not None or name not in MLA_SIZES}

    @property
    def drafter_type(self) -> str:
        return "llama" if self.kv_lora_rank is None else "mla"

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that rope turns."""
        return self.head_dim if self.drafter_type == "llama" else self.qk_rope_head_dim

    @property
    def num_points(self) -> int:
        return len(self.capture_points)


def require_type(config: DrafterConfig, wanted: str, where, otherwise: str) -> None:
    """Raise `UserError` unless the drafter found at `where` is of the wanted type; otherwise: what else one may do."""
    if config.drafter_type != wanted:
        raise UserError(
            f"{where}: a drafter of type {config.drafter_type}, but --drafter-type is {wanted}; give --drafter-type "
            f"{config.drafter_type}, or {otherwise}"
        )


def require_sizes(sizes: dict) -> None:
    """Raise `UserError` naming every size that is not a whole number of 1 or more."""
    if wrong := [f"{n} {v!r}" for n, v in sizes.items() if isinstance(v, bool) or not isinstance(v, int) or v < 1]:
        raise UserError(f"drafter: {', '.join(wrong)}: expected a whole number of 1 or more; correct the argument, or "
                        f"the config.json that it was read from")  # fmt: skip


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _rope_parameters(text: dict) -> dict:
    """`rope_parameters` of transformers >= 5, or {}; those of full attention where each layer type has its own."""
    parameters = text.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        raise UserError(f"target config.json: rope_parameters is {parameters!r}, expected a mapping")
    if "rope_theta" in parameters or not any(isinstance(value, dict) for value in parameters.values()):
        return parameters
    if not isinstance(parameters.get("full_attention"), dict):
        raise UserError(f"target config.json: rope_parameters has {', '.join(parameters)}, expected full_attention, "
                        f"whose rope the drafter takes; add it, or give rope_theta at its top")  # fmt: skip
    return parameters["full_attention"]


def _drafter_scaling(scaling: dict | None, text: dict, drafter_type: str) -> dict | None:
    """The target's rope scaling in the form that SGLang applies to a drafter of this type; None for plain rope."""
    kind = rope.kind_of(scaling)
    if scaling is None or kind == "default":
        return None
    keep = {name: value for name, value in scaling.items() if name not in ("type", "rope_theta")}
    keep["rope_type"] = kind
    if "yarn" in kind:
        if drafter_type == "llama":  # deepseek_yarn scales scores in MLA only; a Llama layer takes plain yarn
            keep = {n: v for n, v in keep.items() if n not in ("mscale", "mscale_all_dim", "attention_factor")}
        keep["rope_type"] = "yarn" if drafter_type == "llama" else "deepseek_yarn"
        keep.setdefault("original_max_position_embeddings", text.get("original_max_position_embeddings"))
    return keep
