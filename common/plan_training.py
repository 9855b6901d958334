"""The arithmetic of training on states that are not captured yet: time, reading, memory. For `extract.py --plan`.

It assumes what train_drafter.py does by default: seven TTT steps, a draft vocabulary of 32,000, and a drafter whose
sizes are read off the target.
"""

import numpy as np

from common.errors import UserError
from common.plan import H200_TFLOPS, time_text

TTT_STEPS, DRAFT_VOCAB, TOKENS_PER_STEP, BUFFERS = 7, 32_000, 65_536, 4  # buffers: one in use, three read ahead
MEASURED_SHARE = 0.73  # of H200_TFLOPS, reached by a training step at Kimi-K2.5 dimensions (benchmarks/LOG.md)
DISK_GB_PER_SECOND = 1.3  # one drive of the machine the figures come from; several drives add up


def training_plan(samples: list, target: dict, nbytes: int, bytes_per_token: int, gpus: int) -> dict | None:
    """Figures of one epoch over `samples` (input_ids, loss_mask) on `gpus` H200s; None where no drafter can be derived.

    nbytes: of the whole directory, which an epoch reads once.
    """
    import torch

    from common.drafter import DrafterConfig
    from common.packing import count_positions, query_positions
    from common.train_step import useful_flops

    try:
        config = DrafterConfig.from_target(
            target["config"], capture_points=target["points"].points,
            draft_vocab_size=min(DRAFT_VOCAB, target["vocab_size"]),
        )  # fmt: skip
    except UserError:
        return None  # train_drafter.py will say which sizes it wants as arguments
    tokens = queries = predicted = pairs = 0
    for sample in samples:
        mask = torch.from_numpy(np.asarray(sample.loss_mask))
        rows, targets = count_positions(mask, TTT_STEPS)
        tokens, queries, predicted = tokens + len(mask), queries + rows, predicted + targets
        pairs += int((query_positions(mask, TTT_STEPS) + 1).sum())
    flops = useful_flops(config, tokens, queries, predicted, pairs, TTT_STEPS)
    seconds = flops / (MEASURED_SHARE * H200_TFLOPS * 1e12) / gpus
    return {
        "queries": queries,
        "flops_per_epoch": flops,
        "compute_seconds_per_epoch_h200": seconds,
        "read_bytes_per_epoch": nbytes,
        "read_gb_per_second_to_keep_up": nbytes / seconds / 1e9,
        "read_seconds_per_epoch": nbytes / (DISK_GB_PER_SECOND * 1e9),
        "host_memory_bytes": BUFFERS * TOKENS_PER_STEP * bytes_per_token,  # all ranks together
    }


def training_text(plan: dict, gpus: int) -> str:
    compute, reading = plan["compute_seconds_per_epoch_h200"], plan["read_seconds_per_epoch"]
    if max(compute, reading) < 1:
        return f"training: {time_text(compute)} an epoch on {gpus} H200"
    return (
        f"training: {time_text(compute)} an epoch of arithmetic on {gpus} H200 ({TTT_STEPS} TTT steps, at the measured "
        f"{MEASURED_SHARE:.0%}); an epoch reads {plan['read_bytes_per_epoch'] / 1e9:,.1f} GB once: "
        f"{plan['read_gb_per_second_to_keep_up']:.1f} GB/s keep the GPUs busy, one drive of {DISK_GB_PER_SECOND} GB/s "
        f"takes {time_text(reading)}; host memory {plan['host_memory_bytes'] / 1e9:.1f} GB of pinned batches "
        f"(train_drafter.py's defaults)"
    )
