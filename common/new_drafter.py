"""The drafter that a training run begins with, made from its arguments: train_drafter.py calls it."""

from dataclasses import replace

from common import checkpoints
from common.capture_points import CapturePoints
from common.drafter import Drafter, DrafterConfig
from common.drafter_config import MLA_SIZES, require_type
from common.errors import UserError
from common.export import serving_ids_for
from common.load_drafter import load_drafter
from common.target import TargetParts, text_config
from common.vocab import build_draft_vocab

SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", *MLA_SIZES)


def build_drafter(arguments, target: TargetParts, points: CapturePoints, frequencies, found, note):
    """The drafter with its vocabulary and weights: of the checkpoint, of --init-from, or fresh.

    arguments: train_drafter.TrainArguments. found: what `checkpoints.latest` returned. note(line): for the person.
    """
    if found:
        config = DrafterConfig(**found[1]["identity"]["drafter"])
        require_type(config, arguments.drafter_type, found[0], "train into another --output")
        drafter, stored = Drafter(config), checkpoints.weights_of(found[0])
        drafter.load_state_dict(stored)
        drafter.set_vocab(stored["d2t"], stored["t2d"])
        return drafter
    if arguments.init_from:
        drafter, _ = load_drafter(arguments.init_from, target.config)
        require_type(drafter.config, arguments.drafter_type, arguments.init_from, "start from another (--init-from)")
        refuse_other_sizes(arguments, drafter.config)
        note(f"starting from {arguments.init_from}, whose sizes and draft vocabulary are kept")
        of_target = text_config(target.config).get("max_position_embeddings") or 0
        longest = arguments.max_position_embeddings or max(drafter.config.max_position_embeddings, of_target)
        if longest != (before := drafter.config.max_position_embeddings):
            note(f"it is to be served with contexts of {longest:,} tokens (--max-position-embeddings), not {before:,}")
            drafter.config = replace(drafter.config, max_position_embeddings=longest)
        return drafter
    d2t, t2d = build_draft_vocab(frequencies, arguments.draft_vocab_size)
    if len(d2t) < arguments.draft_vocab_size:
        distinct = int((frequencies > 0).sum())
        note(f"draft vocabulary: only {distinct:,} tokens are supervised, fewer than {arguments.draft_vocab_size:,}")
    covered = frequencies[t2d].sum() / frequencies.sum()
    note(f"draft vocabulary: {len(d2t):,} of {len(t2d):,} tokens cover {covered:.2%} of the supervised tokens")
    names = (*SIZES, "max_position_embeddings", "fc_norm", "norm_output")
    drafter = Drafter(DrafterConfig.from_target(
        target.config, arguments.drafter_type, capture_points=points.points, draft_vocab_size=len(d2t),
        **{name: getattr(arguments, name) for name in names},
    ))  # fmt: skip
    drafter.set_vocab(d2t, t2d)
    drafter.init_weights(arguments.seed, target.lm_head)
    return drafter


def refuse_other_sizes(arguments, config: DrafterConfig) -> None:
    """`UserError` for an argument that asks for another drafter than that of --init-from."""
    asked = {name: getattr(arguments, name) for name in SIZES if getattr(arguments, name) is not None}
    asked |= {name: True for name in ("fc_norm", "norm_output") if getattr(arguments, name)}
    if (number := arguments.draft_vocab_size) != type(arguments).draft_vocab_size:  # it has a default
        asked["draft_vocab_size"] = number or config.vocab_size
    for name, value in asked.items():
        if value != (found := getattr(config, name)):
            raise UserError(f"--{name.replace('_', '-')} {value}: the drafter of --init-from has {found}, and starting "
                            f"from it keeps that; leave the argument out, or start without --init-from")  # fmt: skip


def choose_serving_ids(given: list[int] | None, config: DrafterConfig, target_config: dict, note) -> list[int]:
    """SGLang's layer ids: those given, else by the family's rule. `UserError` for too few, too many or no rule."""
    if given is None:
        return serving_ids_for(config, target_config)
    points = list(config.capture_points)
    if len(given) != len(points):
        raise UserError(f"--serving-ids {given}: {len(given)} ids for {len(points)} capture points {points}; give one "
                        f"id for each point, in their order")  # fmt: skip
    try:
        known = serving_ids_for(config, target_config)
    except UserError:  # the family's rule is not known: what the argument is for
        known = given
    if known != given:
        note(f"warning: --serving-ids {given} are used, but by its family's rule this target captures {points} with "
             f"{known}; leave --serving-ids out to use those")  # fmt: skip
    return given
