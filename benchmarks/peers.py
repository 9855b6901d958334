"""One row of benchmarks/training.py for a public trainer: its own model, loss, optimizer and step, states in memory.

    python benchmarks/peers.py speculators kimi dense      # speculators 0.9.0, AdamW, its head frozen as it always is
    python benchmarks/peers.py specforge kimi chat,dense   # SpecForge 0.2.0, its head trained as it always is

Called by benchmarks/training.py, in a process of its own; prints RESULT {json} for each workload. Chat documents reach
each trainer as its own loader would bring them: speculators packs them into 8,192 tokens (here by common/batches.py, so
without its padding), SpecForge pads four documents to the longest of them.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

from benchmarks.training import DIMS, PEAK, STEPS, chat_mix, mean_length, workload  # noqa: E402

TOKENS, SEQUENCE = 8192, 2048


def peer_flops(d, documents, columns_of_teacher, head_passes, fc_passes):
    """Operations of a trainer that computes every position at every step (dense documents, no work left out)."""
    h, q, kv = d["hidden"], d["heads"] * d["head_dim"], d["kv"] * d["head_dim"]
    layer = 2 * h * q + 4 * h * kv + q * h + 3 * h * d["ffn"]
    tokens = sum(documents)
    linear = 2 * 3 * layer * STEPS + 2 * head_passes * h * d["draft"] * STEPS + 2 * fc_passes * 3 * h * h
    linear += 2 * h * columns_of_teacher
    attention = sum(3 * 4 * q * (n * (n + 1) / 2 + n * k) for n in documents for k in range(STEPS))
    return tokens * linear + attention


def draft_ids(d):
    return torch.randperm(d["vocab"], generator=torch.Generator().manual_seed(0))[: d["draft"]].sort().values


def timer(device):
    if device == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    return time.perf_counter()


def speculators_row(d, load, device, warm, steps):
    """Returns (milliseconds of each step, documents of each batch, useful operations of each batch)."""
    from torch._dynamo.variables import functions

    if device == "cuda":
        # torch 2.11.0 cannot trace an autotuned kernel whose prune_configs_by it meets twice (pytorch #177600): look
        # its attributes up as plain sources
        def wrap(self, user_obj, tx, variable, name):
            from torch._dynamo.source import AttrSource
            from torch._dynamo.variables.builder import VariableBuilder

            return VariableBuilder(tx, AttrSource(variable.kernel_source, f"{name}"))(user_obj)

        functions.DynamoTritonHOPifier.wrap_user_defined_obj = wrap
    import speculators.train.trainer as trainer_module
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from speculators.train.trainer import Trainer, TrainerConfig
    from transformers import LlamaConfig

    if device == "cpu":
        trainer_module.get_local_rank = lambda: "cpu"
        torch.accelerator.synchronize = lambda *_: None
    layer = LlamaConfig(
        vocab_size=d["vocab"], hidden_size=d["hidden"], intermediate_size=d["ffn"], num_hidden_layers=1,
        num_attention_heads=d["heads"], num_key_value_heads=d["kv"], head_dim=d["head_dim"], hidden_act="silu",
        max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=False, sliding_window=2048,
        use_sliding_window=True, layer_types=["sliding_attention"],
    )  # fmt: skip
    layer._attn_implementation = "simple_flex_attention" if device == "cuda" else "eager"
    proposal = GreedyTokenProposalConfig(speculative_tokens=STEPS)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=d["draft"], norm_before_residual=True, norm_before_fc=True,
        norm_output=True, fc_norm=False, eagle_aux_hidden_state_layer_ids=[2, 30, 58],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3", proposal_methods=[proposal], default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["X"]),
        ),
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = Eagle3DraftModel(config)
    model.float()
    chosen = draft_ids(d)
    t2d = torch.zeros(d["vocab"], dtype=torch.bool)
    t2d[chosen] = True
    model.load_vocab_mappings(t2d, chosen - torch.arange(d["draft"]))
    with torch.no_grad():
        head = torch.randn(d["draft"], d["hidden"], device=device) * 0.02
        model.lm_head.weight.copy_(head)
        model.verifier_lm_head.weight.copy_(head)
        model.embed_tokens.weight.normal_(0, 0.02)
        model.verifier_norm.weight.fill_(1.0)
    for part in (model.embed_tokens, model.lm_head, model.verifier_lm_head):
        part.weight.requires_grad_(False)

    def batch(masks):
        lengths = [len(mask) for mask in masks]
        room = (TOKENS if d["vocab"] > 1000 else 512) if load == "chat" else sum(lengths)
        rest = room - sum(lengths)
        lengths += [rest] if rest else []
        mask = torch.cat([torch.from_numpy(m) for m in masks] + [torch.zeros(rest, dtype=torch.int64)])
        numbers = torch.arange(len(lengths), device=device)
        return dict(
            hidden_states=torch.randn(1, room, 3 * d["hidden"], device=device, dtype=torch.bfloat16),
            verifier_last_hidden_states=torch.randn(1, room, d["hidden"], device=device, dtype=torch.bfloat16),
            input_ids=torch.randint(0, d["vocab"], (1, room), device=device), loss_mask=mask[None].to(device),
            document_ids=numbers.repeat_interleave(torch.tensor(lengths, device=device))[None],
            position_ids=torch.cat([torch.arange(n, device=device) + 1 for n in lengths])[None], error_records=0,
        )  # fmt: skip

    groups = workload(load, TOKENS if load == "chat" and d["vocab"] > 1000 else None, d["vocab"] < 1000)[0][:4]

    class Loader:
        batch_sampler = None
        batches, number = [batch(group) for group in groups], 0

        def __len__(self):
            return max(self.number, 1)

        def __iter__(self):
            return (dict(self.batches[i % len(self.batches)]) for i in range(self.number))

    keywords, _ = Eagle3DraftModel.get_trainer_kwargs(
        loss_fn="kl_div", loss_implementation="fused" if device == "cuda" else "eager", ttt_steps=STEPS,
        ttt_step_loss_decay=1.0,
    )  # fmt: skip
    loader = Loader()
    trainer = Trainer(model, TrainerConfig(
        lr=1e-3, num_epochs=1, save_path="/tmp/speculators-benchmark", train_call_kwargs=keywords, optimizer="adamw",
        muon_lr=1e-3, scheduler_total_steps=1000, log_freq=10**9,
    ), loader)  # fmt: skip
    trainer.global_step, loader.number = 1, max(warm, len(groups))
    trainer.train_epoch(0)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    marks = []
    trainer.global_step, loader.number = 1, steps + 1
    trainer.train_epoch(0, step_callback=lambda *_: marks.append(timer(device)))
    used = [groups[(i + 1) % len(groups)] for i in range(steps)]
    flops = [peer_flops(d, [len(m) for m in masks], d["draft"], 2, 3) for masks in used]
    return marks, [[len(m) for m in masks] for masks in used], [sum(m.sum() for m in masks) for masks in used], flops


def specforge_row(d, load, device, warm, steps):
    """As `speculators_row`."""
    import specforge.algorithms.eagle3.model as eagle3_module
    import torch.distributed as dist
    from specforge.algorithms.eagle3.model import OnlineEagle3Model
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from specforge.modeling.target.target_head import TargetHead
    from specforge.optimizer import BF16Optimizer
    from specforge.runtime.contracts import TrainBatch
    from specforge.training.backend import FSDPTrainingBackend, ParallelConfig
    from specforge.training.controller import TrainerCore
    from specforge.training.strategies.base import Eagle3TrainStrategy
    from transformers import LlamaConfig

    if device == "cpu":
        from specforge.core.loss import _compute_loss

        eagle3_module.LogSoftmaxLoss = type("PlainLoss", (), {"apply": staticmethod(_compute_loss)})
    attention = "flex_attention" if device == "cuda" else "sdpa"
    address = dict(init_method="tcp://127.0.0.1:29555", rank=0, world_size=1)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device == "cuda" else "gloo", **address)
    config = LlamaConfig(
        vocab_size=d["vocab"], hidden_size=d["hidden"], intermediate_size=d["ffn"], num_hidden_layers=1,
        num_attention_heads=d["heads"], num_key_value_heads=d["kv"], head_dim=d["head_dim"], hidden_act="silu",
        max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=False, pad_token_id=0, pretraining_tp=1,
    )  # fmt: skip
    config.draft_vocab_size = d["draft"]
    torch.manual_seed(0)
    with torch.device(device):
        drafter = LlamaForCausalLMEagle3(config, attention_backend=attention)
    chosen = draft_ids(d)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.02)
        t2d = torch.zeros(d["vocab"], dtype=torch.bool)
        t2d[chosen] = True
        drafter.t2d.copy_(t2d)
        drafter.d2t.copy_(chosen - torch.arange(d["draft"]))
    drafter.freeze_embedding()
    drafter = drafter.to(device=device, dtype=torch.bfloat16)
    model = OnlineEagle3Model(draft_model=drafter, length=STEPS, attention_backend=attention)
    model = model.to(device=device, dtype=torch.bfloat16)
    head = TargetHead.__new__(TargetHead)
    torch.nn.Module.__init__(head)
    head.config, head.hidden_size, head.vocab_size = config, d["hidden"], d["vocab"]
    head.fc = torch.nn.Linear(d["hidden"], d["vocab"], bias=False, device=device, dtype=torch.bfloat16)
    with torch.no_grad():  # the teacher's most likely token lies in the draft vocabulary, as in real data
        head.fc.weight.normal_(0, 0.02)
        head.fc.weight[chosen.to(device)] *= 2.0
    head.freeze_weights()
    head.eval()

    def optimizer(module):
        return BF16Optimizer(
            module, lr=1e-4, max_grad_norm=0.5, warmup_ratio=0.015, lr_scheduler="cosine", total_steps=1000
        )

    backend = FSDPTrainingBackend(ParallelConfig.from_distributed(), optimizer_factory=optimizer)
    unwrapped = {} if device == "cuda" else dict(wrap=False)
    wrapped = backend.prepare_model(model, optimizer_target=model.draft_model, **unwrapped)
    core = TrainerCore(Eagle3TrainStrategy(wrapped, target_head=head, compact_teacher=False), backend)

    def batch(masks):
        longest = max(len(mask) for mask in masks)
        loss_mask, attention_mask = (torch.zeros(len(masks), longest, dtype=torch.int64) for _ in range(2))
        for row, mask in enumerate(masks):
            loss_mask[row, : len(mask)] = torch.from_numpy(mask)
            attention_mask[row, : len(mask)] = 1
        shape = (len(masks), longest)
        tensors = dict(
            input_ids=torch.randint(0, d["vocab"], shape, device=device), attention_mask=attention_mask.to(device),
            loss_mask=loss_mask.to(device), target=torch.randn(*shape, d["hidden"], device=device).bfloat16(),
            hidden_state=torch.randn(*shape, 3 * d["hidden"], device=device, dtype=torch.bfloat16),
        )  # fmt: skip
        metadata = {"target_repr": "hidden_state"}
        return TrainBatch(sample_ids=["x"] * len(masks), strategy="eagle3", metadata=metadata, tensors=tensors)

    if load == "chat":
        masks = chat_mix() if d["vocab"] > 1000 else [mask[:256] for mask in chat_mix(16)]
        groups = [masks[i : i + 4] for i in range(0, 16, 4)]
    else:
        groups = workload("dense", None, d["vocab"] < 1000)[0]
    batches = [batch(group) for group in groups]
    for i in range(max(warm, len(groups))):
        core.train_step(batches[i % len(batches)])
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    marks = [timer(device)]
    for i in range(steps):
        core.train_step(batches[i % len(batches)])
        marks.append(timer(device))
    used = [groups[i % len(groups)] for i in range(steps)]
    flops = [peer_flops(d, [len(m) for m in masks], d["vocab"], 3, 2) for masks in used]
    return marks, [[len(m) for m in masks] for masks in used], [sum(m.sum() for m in masks) for masks in used], flops


def measure(options, load):
    """One row as a dict, like `measure` of benchmarks/training.py."""
    started, d = time.perf_counter(), DIMS[options.dims]
    row = speculators_row if options.peer == "speculators" else specforge_row
    marks, documents, supervised, flops = row(d, load, options.device, options.warm, options.steps)
    if options.device == "cuda":
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)]
    else:
        times = [1e3 * (b - a) for a, b in zip(marks, marks[1:], strict=False)]
    seconds = sum(times) / 1e3 if load == "chat" else statistics.median(times) * len(times) / 1e3
    tokens = sum(map(sum, documents))
    result = dict(
        name=f"{options.peer}-{options.dims}-{load}", ms=statistics.median(times),
        spread_ms=max(times) - min(times), tokens_per_second=tokens / seconds,
        samples_per_second=tokens / seconds / mean_length(d) if load == "chat" else sum(map(len, documents)) / seconds,
        supervised_per_second=float(sum(supervised)) / seconds,
        mfu=sum(flops) / seconds / PEAK, total_s=time.perf_counter() - started,
    )  # fmt: skip
    if options.device == "cuda":
        result["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        result["reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=("speculators", "specforge"))
    parser.add_argument("dims", choices=tuple(DIMS))
    parser.add_argument("workloads", help="dense, chat, or both with a comma: one after the other in this process")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    for load in options.workloads.split(","):
        print("RESULT " + json.dumps(measure(options, load)), flush=True)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
