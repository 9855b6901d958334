"""The one owner of layer numbers: which hidden states are captured, and what every other format calls them.

Capture point k is the residual stream after k decoder layers, which is what enters `layers[k]`: the sum of hidden
states and residual, complete over tensor-parallel ranks, before any norm. The last state is the residual stream
after all L layers, before the final norm. No other file adds or subtracts one from a layer number.
"""

from dataclasses import dataclass

from common.errors import UserError

# How SGLang turns `eagle_config.eagle_aux_hidden_state_layer_ids` of a drafter into the layers before which it
# captures (`set_eagle3_layers_to_capture` of each target class in 0.5.14): these add one to every id.
SGLANG_ADDS_ONE = (
    "ApertusForCausalLM",
    "BailingMoeForCausalLM",
    "BailingMoeV2ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma4ForCausalLM",
    "Glm4MoeForCausalLM",
    "GptOssForCausalLM",
    "LlamaForCausalLM",
    "MiniMaxM2ForCausalLM",
    "MistralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
# These take the ids as they are, unless the first is 1: then they add one to every id.
SGLANG_TAKES_RAW = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM",
    "KimiK25ForConditionalGeneration",
)


@dataclass(frozen=True)
class CapturePoints:
    """The captured points of a target with `num_layers` decoder layers, in ascending order."""

    points: tuple[int, ...]
    num_layers: int

    def __post_init__(self):
        object.__setattr__(self, "points", tuple(int(point) for point in self.points))
        if not self.points:
            raise UserError("capture points: none given; name at least one layer number")
        if list(self.points) != sorted(set(self.points)):
            raise UserError(f"capture points {list(self.points)} must be ascending and distinct")
        outside = [point for point in self.points if not 1 <= point < self.num_layers]
        if outside:
            raise UserError(
                f"capture points {outside} are out of range: this model has {self.num_layers} layers, "
                f"so points run from 1 to {self.num_layers - 1} (the last state is always captured besides)"
            )

    @classmethod
    def default(cls, num_layers: int) -> "CapturePoints":
        """An early, a middle and a late point, `[3, L//2 + 1, L - 2]`: 3/31/59 for the 61 layers of Kimi-K2.5."""
        points = (3, num_layers // 2 + 1, num_layers - 2)
        if num_layers < 7:
            raise UserError(
                f"no default capture points for a model of {num_layers} layers: name them with --capture-points, "
                f"between 1 and {num_layers - 1}"
            )
        return cls(points, num_layers)

    @classmethod
    def speculators_default(cls, num_layers: int) -> "CapturePoints":
        """What speculators 0.5 and later captures through vLLM unless told otherwise; its ids are points."""
        return cls((2, num_layers // 2, num_layers - 3), num_layers)

    def names(self) -> list[str]:
        """What messages call the captured tensors, in stored order: the points and the last state."""
        return [f"point {point}" for point in self.points] + ["last state"]

    def hooked_layers(self) -> list[int]:
        """Indices i of `layers[i]` whose *output* is each stored tensor: the points, then the last state."""
        return [point - 1 for point in self.points] + [self.num_layers - 1]

    def sglang_layers_to_capture(self) -> list[int]:
        """SGLang's own `layers_to_capture` on the running model: it captures what enters `layers[k]`."""
        return list(self.points)

    def speculators_v1_ids(self) -> list[int]:
        """Layer ids of speculators 0.4 and older: "output of layer i", the last layer included."""
        return self.hooked_layers()

    def serving_ids(self, architecture: str) -> list[int]:
        """`eagle_aux_hidden_state_layer_ids` that make SGLang 0.5.14 capture exactly these points on this target.

        Raises `UserError` for an architecture whose rule is not known: a wrong guess costs most of the acceptance.
        """
        if architecture in SGLANG_ADDS_ONE:
            return [point - 1 for point in self.points]
        if architecture in SGLANG_TAKES_RAW:
            ids = list(self.points)
            if ids[0] == 1:
                raise UserError(
                    f"{architecture}: SGLang adds one to every id of this family when the first is 1, so points that "
                    f"start at 1 cannot be served; choose points from 2 on"
                )
            return ids
        raise UserError(
            f"{architecture}: it is not known how SGLang numbers the captured layers of this target family; "
            f"known families: {', '.join(SGLANG_ADDS_ONE + SGLANG_TAKES_RAW)}"
        )
