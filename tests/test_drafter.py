"""The drafter against an independent float64 re-computation of CONVENTIONS 5, its alignment, its invariances."""

import math
import random
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import silu, softmax
from torch.utils._python_dispatch import TorchDispatchMode

from common import drafter_layer_mla, losses, ttt_attention
from common.drafter import Drafter, DrafterConfig, ttt_loss
from common.drafting import DraftChain, draft
from common.errors import UserError
from common.losses import Teacher
from common.packing import count_positions, pack_documents, query_positions
from common.rope import inverse_frequencies, rotate, score_factor
from common.ttt_attention import QUERIES_PER_BLOCK
from common.vocab import build_draft_vocab, target_ids

H, V, N, K = 24, 61, 37, 8
MLA = dict(q_lora_rank=14, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
DEEPSEEK_YARN = dict(
    type="yarn", factor=16.0, original_max_position_embeddings=32, beta_fast=32, beta_slow=1, mscale=0.7,
    mscale_all_dim=1.3,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)


def document(length, supervised, seed=0, points=3, width=H):
    """supervised: list of token positions, or a fraction."""
    g = torch.Generator().manual_seed(seed + 1000 * length)
    mask = torch.zeros(length, dtype=torch.int64)
    if isinstance(supervised, float):
        mask[:] = torch.rand(length, generator=g) < supervised
    else:
        mask[supervised] = 1
    return SimpleNamespace(
        input_ids=torch.randint(0, V, (length,), generator=g),
        loss_mask=mask,
        states=[torch.randn(length, width, generator=g, dtype=torch.float64) for _ in range(points + 1)],
    )


def make(kind="llama", seed=0, dtype=torch.float64, target_scaling=None, **overrides):
    """(drafter of this type with random weights, teacher); target_scaling: the rope scaling of the target."""
    target = dict(
        hidden_size=H, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=40, vocab_size=V,
        max_position_embeddings=512, rms_norm_eps=1e-5, rope_scaling=target_scaling, **(MLA if kind == "mla" else {}),
    )  # fmt: skip
    config = DrafterConfig.from_target(
        target, kind, capture_points=(2, 5, 7), draft_vocab_size=N, initializer_range=0.3, **overrides
    )
    h = config.hidden_size
    g = torch.Generator().manual_seed(seed)
    drafter = Drafter(config)
    counts = torch.randint(1, 50, (V,), generator=g)
    drafter.set_vocab(*build_draft_vocab(counts, N))
    drafter.set_embedding(torch.randn(V, h, generator=g, dtype=torch.float64))
    drafter.init_weights(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.rand(parameter.shape, generator=g) + 0.5)
    drafter.to(dtype)
    head = torch.randn(V, h, generator=g, dtype=torch.float64)
    teacher = Teacher(torch.rand(h, generator=g, dtype=torch.float64) + 0.5, head[target_ids(drafter.d2t)], 1e-6)
    drafter.check_loaded()
    return drafter, teacher.to(dtype=dtype)


class Plain:
    """Section 5 by the book, one position and one document at a time, from the exported names alone."""

    def __init__(self, drafter, doc):
        self.w, self.c, self.doc = drafter.state_dict(), drafter.config, doc
        self.embed = drafter.embed_tokens
        self.first = [self.step(t, 0, None, int(doc.input_ids[t + 1]), {}) for t in range(len(doc.input_ids) - 1)]

    def norm(self, x, name):
        return x / torch.sqrt((x * x).mean() + self.c.rms_norm_eps) * self.w[name]

    def rotate(self, x, position):
        half = x.shape[-1] // 2
        frequencies, magnitude = inverse_frequencies(x.shape[-1], self.c.rope_theta, self.c.rope_scaling)
        angle = position * frequencies.double()
        a, b = x[:, :half], x[:, half:]
        return magnitude * torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    def heads(self, x, position):
        """Query, keys and values of each head, [heads, d], from the layer's input."""
        w, c, names = self.w, self.c, "midlayer.self_attn."
        if c.drafter_type == "mla":
            return self.latent_heads(x, position)
        q, key, value = ((w[f"{names}{n}_proj.weight"] @ x).view(-1, c.head_dim) for n in "qkv")
        return self.rotate(q, position), self.rotate(key, position), value

    def latent_heads(self, x, position):
        """Head by head, as DeepSeek-V2 writes them (equations 9 to 19); rope by complex numbers, neighbours a pair."""
        w = {n.split(".")[2]: t for n, t in self.w.items() if "self_attn" in n}
        norms = {n: f"midlayer.self_attn.{n}.weight" for n in ("q_a_layernorm", "kv_a_layernorm")}
        frequencies, magnitude = inverse_frequencies(4, self.c.rope_theta, self.c.rope_scaling)
        turn = torch.polar(torch.tensor(magnitude, dtype=torch.float64), position * frequencies.double())
        turned = lambda pairs: torch.view_as_real(torch.view_as_complex(pairs.view(2, 2)) * turn).flatten()  # noqa: E731
        query_latent = self.norm(w["q_a_proj"] @ x, norms["q_a_layernorm"])
        down = w["kv_a_proj_with_mqa"] @ x
        latent, shared = self.norm(down[:10], norms["kv_a_layernorm"]), turned(down[10:].clone())
        queries, keys, values = [], [], []
        for head in range(4):
            q = w["q_b_proj"][10 * head : 10 * head + 10] @ query_latent
            up = w["kv_b_proj"][11 * head : 11 * head + 11] @ latent
            queries.append(torch.cat((q[:6], turned(q[6:].clone()))))
            keys.append(torch.cat((up[:6], shared)))
            values.append(up[6:])
        return queries, keys, values

    def score_scale(self):
        scaling = self.c.rope_scaling or {}
        scale = 1 / math.sqrt(self.c.head_dim)
        if scaling.get("rope_type") == "deepseek_yarn":
            scale *= (1 + 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"])) ** 2
        return scale

    def step(self, t, k, state, token, own):
        """own: list of this position's (key, value) of steps 1..k-1; returns dict with everything of step k."""
        w, c, layer = self.w, self.c, "midlayer."
        if k == 0:
            points = [s[t].double() for s in self.doc.states[:-1]]
            if c.fc_norm:
                points = [self.norm(p, f"fc_norm.{i}.weight") for i, p in enumerate(points)]
            state = w["fc.weight"] @ torch.cat(points)
        x = torch.cat((self.norm(self.embed[token], layer + "input_layernorm.weight"),
                       self.norm(state, layer + "hidden_norm.weight")))  # fmt: skip
        q, key, value = self.heads(x, t + k)
        made = dict(key=key, value=value)
        if k == 0:
            earlier = [] if t == 0 else self.keys[:t]
            self.keys = [*earlier, (key, value)]
            seen = list(self.keys)
        else:
            seen = [(f["key"], f["value"]) for f in self.first[: t + 1]] + own + [(key, value)]
        group = c.num_attention_heads // c.num_key_value_heads
        heads = []
        for h in range(c.num_attention_heads):
            scores = torch.stack([q[h] @ kk[h // group] for kk, _ in seen]) * self.score_scale()
            heads.append(softmax(scores, 0) @ torch.stack([vv[h // group] for _, vv in seen]))
        state = state + w[layer + "self_attn.o_proj.weight"] @ torch.cat(heads)
        y = self.norm(state, layer + "post_attention_layernorm.weight")
        mlp = {n: w[f"{layer}mlp.{n}_proj.weight"] for n in ("gate", "up", "down")}
        state = state + mlp["down"] @ (silu(mlp["gate"] @ y) * (mlp["up"] @ y))
        normed = self.norm(state, "norm.weight")
        return made | dict(state=normed if c.norm_output else state, logits=w["lm_head.weight"] @ normed)

    def chain(self, t, tokens):
        """Steps 0..len(tokens): own states, given tokens from step 1 on."""
        steps, own = [self.first[t]], []
        for k, token in enumerate(tokens, 1):
            steps.append(self.step(t, k, steps[-1]["state"], int(token), own))
            own.append((steps[-1]["key"], steps[-1]["value"]))
        return steps


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize(
    "overrides",
    [{}, dict(fc_norm=True, norm_output=True), dict(rope_scaling=LLAMA3), dict(kind="mla"),
     dict(kind="mla", fc_norm=True, norm_output=True, target_scaling=DEEPSEEK_YARN)],
    ids=["plain", "fc_norm+norm_output", "llama3", "mla", "mla+fc_norm+norm_output+deepseek_yarn"],
)  # fmt: skip
def test_equals_float64_recomputation_over_seven_chained_steps(overrides):
    drafter, _ = make(**overrides)
    doc = document(14, [6, 7, 8, 11])
    batch = pack_documents([document(5, 0.5), doc], 7)
    plain = Plain(drafter, doc)
    chain = DraftChain(drafter, batch)
    mine = torch.nonzero(batch.query_documents == 1).flatten()
    positions = batch.positions[batch.query_rows][mine]
    assert len(mine) > 5
    for k in range(8):
        if k:
            chain.advance(batch.chain_ids[:, k])
        logits = torch.cat([x for _, x in chain.logit_chunks()])
        for slot, t in zip(mine.tolist(), positions.tolist(), strict=True):
            expected = plain.chain(t, batch.chain_ids[slot, 1 : k + 1])[-1]
            assert relative(logits[slot], expected["logits"]) < 1e-6, (k, t)  # rope frequencies are float32
            assert relative(chain.state[slot], expected["state"]) < 1e-6, (k, t)


def test_the_recomputation_notices_what_breaks_drafters_in_public():
    """Each of these is a real bug of somebody's trainer; the comparison above would fail on all of them."""
    drafter, _ = make()
    doc = document(14, [6, 7, 8])
    batch = pack_documents([doc], 3)
    plain, slot = Plain(drafter, doc), 4
    t = int(batch.positions[batch.query_rows[slot]])
    expected = plain.chain(t, batch.chain_ids[slot, 1:3])[-1]["logits"]

    def logits_after_two_steps(changed_batch=batch, shift=0):
        chain = DraftChain(drafter, changed_batch)
        chain.positions = chain.positions + shift
        chain.advance(changed_batch.chain_ids[:, 1])
        chain.advance(changed_batch.chain_ids[:, 2])
        return next(chain.logit_chunks())[1][slot]

    assert relative(logits_after_two_steps(), expected) < 1e-6
    swapped = SimpleNamespace(**{**vars(doc), "states": [doc.states[i] for i in (1, 0, 2, 3)]})
    assert relative(logits_after_two_steps(pack_documents([swapped], 3)), expected) > 1e-3
    assert relative(logits_after_two_steps(shift=1), expected) > 1e-3  # rotary position of later steps
    ids = SimpleNamespace(**{**vars(doc), "input_ids": doc.input_ids.roll(1)})  # embedding of x[t], not x[t+1]
    assert relative(logits_after_two_steps(pack_documents([ids], 3)), expected) > 1e-3


def test_the_recomputation_notices_what_breaks_latent_attention(monkeypatch):
    """Rotated half against half, scores without mscale, rope of the other magnitude: none is close."""
    drafter, _ = make("mla", target_scaling=DEEPSEEK_YARN)
    doc = document(14, [6, 7, 8])
    batch = pack_documents([doc], 3)
    slot = 4
    expected = Plain(drafter, doc).chain(int(batch.positions[batch.query_rows[slot]]), [])[-1]["logits"]

    def error():
        return relative(next(DraftChain(drafter, batch).logit_chunks())[1][slot], expected)

    assert error() < 1e-6
    scale, sizes = drafter.score_scale, drafter.sizes
    drafter.score_scale = drafter.config.head_dim**-0.5
    assert error() > 1e-3
    drafter.score_scale, drafter.sizes = scale, sizes._replace(rope_magnitude=1.0)
    assert error() > 1e-3
    drafter.sizes = sizes
    with monkeypatch.context() as patch:
        patch.setattr(drafter_layer_mla, "rotate_pairs", rotate)
        assert error() > 1e-3
    assert error() < 1e-6


def plain_loss(drafter, teacher, documents, num_steps, decay):
    """The loss straight from CONVENTIONS 5, position by position."""
    sums, counts, back = [0.0] * num_steps, [0] * num_steps, target_ids(drafter.d2t)
    hits = [0] * num_steps
    for doc in documents:
        length = len(doc.input_ids)
        if length < 3:
            continue
        plain = Plain(drafter, doc)
        for t in range(length - 2):
            steps = plain.chain(t, doc.input_ids[t + 2 : min(t + 1 + num_steps, length)])
            for k in range(num_steps):
                predicted = t + 2 + k
                if predicted < length and doc.loss_mask[predicted]:
                    last = doc.states[-1][t + 1 + k].double()
                    last = last / torch.sqrt((last * last).mean() + teacher.eps) * teacher.norm
                    p, logits = softmax(teacher.head @ last, 0), steps[k]["logits"]
                    sums[k] += -(p * torch.log_softmax(logits, 0)).sum()
                    counts[k] += 1
                    hits[k] += int(back[logits.argmax()] == doc.input_ids[predicted])
    return sum(decay**k * s / max(c, 1) for k, (s, c) in enumerate(zip(sums, counts, strict=True))), counts, hits


@pytest.mark.parametrize("kind", ["llama", "mla"])
def test_loss_and_gradients_equal_the_definition(kind):
    drafter, teacher = make(kind, target_scaling=DEEPSEEK_YARN if kind == "mla" else None)
    documents = [document(n, 0.5, seed=n) for n in (1, 2, 7, 12)]
    batch = pack_documents(documents, 4)
    loss, metrics = ttt_loss(drafter, batch, teacher, 4, 0.8)
    loss.backward()
    with torch.no_grad():
        expected, counts, hits = plain_loss(drafter, teacher, documents, 4, 0.8)
        assert abs(loss - expected) / expected < 1e-6
        assert metrics["counted"].tolist() == counts and metrics["hits"].tolist() == hits
        for name, parameter in drafter.named_parameters():  # a directional derivative of each weight
            direction = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            shift = 1e-5 / direction.norm() * direction
            up, down = [], []
            for sign, out in ((1, up), (-1, down)):
                parameter.add_(sign * shift)
                out.append(plain_loss(drafter, teacher, documents, 4, 0.8)[0])
                parameter.sub_(sign * shift)
            numeric = (up[0] - down[0]) / 2
            assert abs((parameter.grad * shift).sum() - numeric) < 1e-4 * abs(numeric) + 1e-12, name


@pytest.mark.parametrize("reply", [1, 2, 3])
def test_a_three_token_prompt_trains_exactly_these_positions(reply):
    """x[0..2] prompt, x[3..] reply: the pairs (t, k) with x[t+2+k] in the reply, and no other."""
    doc = document(3 + reply, list(range(3, 3 + reply)))
    batch = pack_documents([doc], 7)
    trained = {
        (int(batch.positions[batch.query_rows[c]]), k)
        for c in range(batch.num_queries)
        for k in range(7)
        if batch.counts[c, k]
    }
    by_hand = {
        1: {(1, 0), (0, 1)},
        2: {(1, 0), (0, 1), (2, 0), (1, 1), (0, 2)},
        3: {(1, 0), (0, 1), (2, 0), (1, 1), (0, 2), (3, 0), (2, 1), (1, 2), (0, 3)},
    }
    assert trained == by_hand[reply]
    assert batch.num_predicted == reply and batch.num_queries == reply + 1
    assert count_positions(doc.loss_mask, 7) == (reply + 1, reply)
    pairs = {
        (int(batch.positions[batch.query_rows[batch.slots[r, k]]]), k, int(batch.predicted_ids[r]))
        for r in range(reply) for k in range(7) if batch.weights[r, k]
    }  # fmt: skip
    assert pairs == {(t, k, int(doc.input_ids[t + 2 + k])) for t, k in trained}
    for c in range(batch.num_queries):
        t = int(batch.positions[batch.query_rows[c]])
        for k in range(7):
            if batch.counts[c, k]:
                assert torch.equal(batch.last_states[batch.teacher_rows[c, k]], doc.states[-1][t + 1 + k])
                assert batch.chain_ids[c, k + 1] == doc.input_ids[t + 2 + k]


def test_only_counted_positions_get_a_query():
    mask = torch.zeros(100, dtype=torch.int64)
    mask[50:60] = 1
    assert query_positions(mask, 7).tolist() == list(range(42, 58))  # 10 supervised, 6 more that reach them
    assert query_positions(mask, 1).tolist() == list(range(48, 58))
    assert query_positions(mask[:2], 7).tolist() == []


@pytest.mark.parametrize(
    "kind,dtype,limit",
    [("llama", torch.float64, 1e-12), ("llama", torch.float32, 1e-5), ("mla", torch.float64, 1e-12)],
)
def test_padding_and_packing_change_nothing(kind, dtype, limit):
    drafter, teacher = make(kind, dtype=dtype)
    documents = [document(n, 0.4, seed=n) for n in (9, 30, 3, 17)]
    total = torch.stack([pack_documents([d], 5).weights.sum(0) for d in documents]).sum(0)

    def run(groups, counted=None, **budgets):
        drafter.zero_grad()
        loss = 0.0
        for group in groups:
            part, _ = ttt_loss(drafter, pack_documents(group, 5, **budgets), teacher, 5, 0.8, counted)
            part.backward()
            loss = loss + part.detach()
        return loss, [p.grad.clone() for p in drafter.parameters()]

    loss, gradients = run([documents])
    for other in (
        run([documents], tokens=128, queries=96),
        run([documents[::-1]], tokens=64, queries=64, predicted=60),
        run([[d] for d in documents], counted=total),
        run([documents[:1], documents[1:]], counted=total, tokens=80, queries=64),
    ):
        assert abs(other[0] - loss) / loss < limit
        for mine, theirs in zip(other[1], gradients, strict=True):
            assert relative(mine, theirs) < limit * 10


def test_a_prompt_that_changes_beyond_reach_changes_nothing_and_within_does():
    """Documents are isolated; inside a document the prompt's states matter (they are keys)."""
    drafter, teacher = make()
    a, b = document(12, [9, 10]), document(12, [9, 10], seed=5)
    reference = ttt_loss(drafter, pack_documents([a], 3), teacher, 3, 1.0)[0]
    alone = ttt_loss(drafter, pack_documents([b, a], 3), teacher, 3, 1.0)[1]["entropy_sum"]
    both = ttt_loss(drafter, pack_documents([b], 3), teacher, 3, 1.0)[1]["entropy_sum"]
    mine = ttt_loss(drafter, pack_documents([a], 3), teacher, 3, 1.0)[1]["entropy_sum"]
    assert relative(alone, both + mine) < 1e-12
    a.states[0][2] += 1.0
    assert abs(ttt_loss(drafter, pack_documents([a], 3), teacher, 3, 1.0)[0] - reference) > 1e-9


def test_nothing_supervised_gives_zero_loss_and_gradients():
    drafter, teacher = make()
    loss, metrics = ttt_loss(drafter, pack_documents([document(6, [])], 3, tokens=16, queries=16), teacher, 3, 0.8)
    loss.backward()
    assert loss == 0 and not metrics["counted"].any()
    assert not any(p.grad.any() for p in drafter.parameters())


def test_drafting_feeds_back_its_own_tokens():
    drafter, _ = make()
    doc = document(11, [4, 5, 8])
    batch = pack_documents([doc], K)
    plain, names = Plain(drafter, doc), target_ids(drafter.d2t)
    drafted = draft(drafter, batch, K)
    assert torch.equal(drafted, draft(drafter, batch, K))
    for c in range(batch.num_queries):
        t, tokens = int(batch.positions[batch.query_rows[c]]), []
        for _ in range(K):
            tokens.append(int(names[plain.chain(t, tokens)[-1]["logits"].argmax()]))
        assert drafted[c].tolist() == tokens
    true = draft(drafter, batch, K, own_tokens=False)
    assert torch.equal(true[:, 0], drafted[:, 0]) and not torch.equal(true, drafted)


@pytest.mark.parametrize("kind", ["llama", "mla"])
def test_branches_of_a_chain(kind):
    drafter, _ = make(kind)
    batch = pack_documents([document(20, 0.5)], 3)
    chain = DraftChain(drafter, batch)
    ids, logprobs = chain.top(3)
    assert (logprobs[:, 0] >= logprobs[:, 1]).all() and logprobs.exp().sum(-1).max() <= 1 + 1e-6
    branches = chain.select(torch.arange(batch.num_queries).repeat_interleave(3))
    branches.advance(ids.flatten())
    single = DraftChain(drafter, batch)
    single.advance(ids[:, 1].contiguous())
    assert relative(branches.state[1::3], single.state) < 1e-12
    assert relative(branches.state[0::3], single.state) > 1e-3


@pytest.mark.parametrize("kind", ["llama", "mla"])
def test_compiled_parts_equal_eager(kind):
    """mla: with its heads filled up to the width of the attention kernels, too."""
    drafter, teacher = make(kind, dtype=torch.float32)
    batch = pack_documents([document(20, 0.5), document(9, 0.5)], 3, tokens=32, queries=32)
    eager = ttt_loss(drafter, batch, teacher, 3, 0.8)[0]
    eager.backward()
    gradients = [p.grad.clone() for p in drafter.parameters()]
    drafter.zero_grad()
    drafter.compile_parts()
    compiled = ttt_loss(drafter, batch, teacher, 3, 0.8)[0]
    compiled.backward()
    assert abs(compiled - eager) / eager < 1e-5
    for mine, theirs in zip((p.grad for p in drafter.parameters()), gradients, strict=True):
        assert relative(mine, theirs) < 1e-4
    if kind == "mla":
        query, keys, values, _ = drafter.first_step(drafter.weights(), batch)
        assert query.shape[-1] == keys.shape[-1] == values.shape[-1] == 16  # heads of 10, values of 5
        assert not query[..., 10:].any() and not values[..., 5:].any()


def test_an_unloaded_weight_shows():
    drafter, teacher = make()
    state = drafter.state_dict()
    fresh = Drafter(drafter.config).double()
    fresh.set_embedding(drafter.embed_tokens)
    state.pop("midlayer.mlp.up_proj.weight")
    fresh.load_state_dict(state, strict=False)
    with pytest.raises(UserError, match="midlayer.mlp.up_proj.weight"):
        fresh.check_loaded()
    loss, _ = ttt_loss(fresh, pack_documents([document(9, 0.5)], 3), teacher, 3, 0.8)
    assert loss.isnan()


def test_state_dict_has_the_names_that_sglang_loads():
    layer = "midlayer."
    expected = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    expected |= {f"{layer}self_attn.{n}_proj.weight" for n in "qkvo"}
    expected |= {f"{layer}mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
    expected |= {f"{layer}{n}.weight" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    assert set(make()[0].state_dict()) == expected
    assert set(make(fc_norm=True)[0].state_dict()) == expected | {f"fc_norm.{i}.weight" for i in range(3)}
    expected -= {f"{layer}self_attn.{n}_proj.weight" for n in "qkv"}
    latent = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
    assert set(make("mla")[0].state_dict()) == expected | {f"{layer}self_attn.{name}.weight" for name in latent}


def test_sizes_from_targets():
    kimi = dict(
        architectures=["KimiK25ForConditionalGeneration"],
        text_config=dict(hidden_size=7168, num_attention_heads=64, num_key_value_heads=64, kv_lora_rank=512,
                         intermediate_size=18432, vocab_size=163840, max_position_embeddings=262144, rms_norm_eps=1e-5,
                         rope_theta=50000.0, rope_scaling=dict(type="yarn", factor=64.0, beta_fast=32.0, beta_slow=1.0,
                                                               mscale=1.0, mscale_all_dim=1.0,
                                                               original_max_position_embeddings=4096)),
    )  # fmt: skip
    c = DrafterConfig.from_target(kimi, capture_points=(3, 31, 59), draft_vocab_size=32000)
    assert (c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.intermediate_size) == (64, 8, 128, 18432)
    assert c.max_position_embeddings == 262144 and c.rope_theta == 50000.0
    assert c.rope_scaling["rope_type"] == "yarn" and "mscale" not in c.rope_scaling
    assert DrafterConfig(**c.to_dict()) == c and not set(MLA) & set(c.to_dict())
    text = kimi["text_config"] | dict(q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    c = DrafterConfig.from_target(dict(text_config=text), "mla", capture_points=(3,), draft_vocab_size=0, v_head_dim=96)
    assert [getattr(c, name) for name in MLA] == [1536, 512, 128, 64, 96] and c.drafter_type == "mla"
    assert (c.num_attention_heads, c.num_key_value_heads, c.head_dim) == (64, 64, 192)
    assert c.rope_scaling | {"type": "yarn"} == text["rope_scaling"] | {"rope_type": "deepseek_yarn"}
    assert DrafterConfig(**c.to_dict()) == c
    smol = dict(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536, vocab_size=49152,
                max_position_embeddings=8192, rope_parameters=dict(rope_theta=100000, rope_type="default"))  # fmt: skip
    c = DrafterConfig.from_target(smol, capture_points=(3, 16, 28), draft_vocab_size=0, intermediate_size=800)
    assert (c.head_dim, c.rope_theta, c.rope_scaling, c.draft_vocab_size) == (64, 100000.0, None, 49152)
    assert c.intermediate_size == 800
    with pytest.raises(UserError, match="num_attention_heads"):
        DrafterConfig.from_target(dict(hidden_size=8, vocab_size=9), capture_points=(1,), draft_vocab_size=0)


def test_sizes_that_do_not_go_together_are_refused():
    llama = dict(hidden_size=64, num_attention_heads=4, intermediate_size=128, vocab_size=99, head_dim=16,
                 max_position_embeddings=512)  # fmt: skip
    more = dict(capture_points=(2,), draft_vocab_size=0)
    flags = "--q-lora-rank, --kv-lora-rank, --qk-nope-head-dim, --qk-rope-head-dim, --v-head-dim"
    with pytest.raises(UserError, match=f"multi-head latent attention.*: give {flags}$"):
        DrafterConfig.from_target(llama, "mla", **more)
    with pytest.raises(UserError, match="give --q-lora-rank$"):  # DeepSeek-V2-Lite has queries without a latent
        DrafterConfig.from_target(llama | MLA | dict(q_lora_rank=None), "mla", **more)
    made = DrafterConfig.from_target(llama, "mla", **more, **MLA)
    assert made.head_dim == 10 and made.num_key_value_heads == 4
    with pytest.raises(UserError, match="--head-dim: a drafter of type mla has no such size"):
        DrafterConfig.from_target(llama, "mla", **more, **MLA, head_dim=16)
    with pytest.raises(UserError, match="--v-head-dim: a drafter of type llama has no such size"):
        DrafterConfig.from_target(llama, **more, v_head_dim=16)
    with pytest.raises(UserError, match="type mla: rope scaling 'llama3', expected default, deepseek_yarn"):
        DrafterConfig.from_target(llama | dict(rope_scaling=LLAMA3), "mla", **more, **MLA)
    with pytest.raises(UserError, match="type llama: rope scaling 'deepseek_yarn', expected"):
        DrafterConfig.from_target(llama, **more, rope_scaling=DEEPSEEK_YARN | dict(rope_type="deepseek_yarn"))


LLAMA = dict(hidden_size=64, num_attention_heads=4, intermediate_size=128, vocab_size=99, head_dim=16,
             max_position_embeddings=512)  # fmt: skip


@pytest.mark.parametrize(
    "kind, changes, overrides, message",
    [
        ("llama", {}, dict(num_attention_heads=0), "num_attention_heads 0: expected a whole number"),
        ("llama", {}, dict(hidden_size=0), "hidden_size 0"),
        ("llama", {}, dict(intermediate_size=-1), "intermediate_size -1"),
        ("llama", {}, dict(num_key_value_heads=0), "num_key_value_heads 0"),
        ("llama", {}, dict(max_position_embeddings=0), "max_position_embeddings 0"),
        ("llama", {}, dict(draft_vocab_size=-5), "draft_vocab_size -5"),
        ("llama", {}, dict(head_dim=15), "head_dim 15 is odd"),
        ("llama", dict(num_attention_heads="4"), {}, "num_attention_heads '4'"),
        ("llama", dict(intermediate_size=128.5), {}, "intermediate_size 128.5"),
        ("mla", {}, dict(v_head_dim=0), "v_head_dim 0"),
        ("mla", {}, dict(qk_rope_head_dim=3), "qk_rope_head_dim 3 is odd"),
        ("llama", dict(rope_scaling=[2.0]), {}, "rope scaling .2.0.: expected a mapping"),
        ("llama", dict(rope_parameters=7), {}, "rope_parameters is 7, expected a mapping"),
        ("llama", dict(rope_parameters={"sliding_attention": {"rope_theta": 1e4}}), {},
         "rope_parameters has sliding_attention, expected full_attention"),
    ],
)  # fmt: skip
def test_a_size_or_rope_that_cannot_be_is_refused_by_name(kind, changes, overrides, message):
    latent = MLA if kind == "mla" else {}
    given = dict(capture_points=(2,), draft_vocab_size=0) | latent | overrides
    with pytest.raises(UserError, match=message):
        DrafterConfig.from_target(LLAMA | changes, kind, **given)


def test_a_rope_of_each_layer_type_gives_that_of_full_attention():
    ropes = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
             "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}  # fmt: skip
    c = DrafterConfig.from_target(LLAMA | dict(rope_parameters=ropes), capture_points=(2,), draft_vocab_size=0)
    assert (c.rope_theta, c.rope_scaling) == (1e6, {"rope_type": "linear", "factor": 8.0})


@pytest.mark.parametrize(
    "scaling, message",
    [
        ("linear", "'linear': expected a mapping"),
        (dict(rope_type=["linear"]), "rope_type is .'linear'., expected one of"),
        (dict(rope_type="linear", factor="8"), "factor is '8', expected a number"),
        (dict(rope_type="linear", factor=math.nan), "factor is nan, expected a number"),
        (dict(rope_type="linear", factor=0), "factor is 0.0, expected more than 0"),
        (LLAMA3 | dict(low_freq_factor=0, high_freq_factor=0), "low_freq_factor is 0.0, expected more than 0"),
        (dict(rope_type=None, type="linear"), "'linear' lacks factor"),
    ],
)
def test_a_rope_scaling_that_cannot_be_is_refused(scaling, message):
    with pytest.raises(UserError, match=message):
        inverse_frequencies(64, 1e4, scaling)


def test_packing_refuses_what_does_not_fit():
    with pytest.raises(UserError, match="need 9 tokens, the batch holds 8"):
        pack_documents([document(9, 0.5)], 3, tokens=8)
    broken = document(9, 0.5)
    broken.states[1] = broken.states[1][:-1]
    with pytest.raises(UserError, match="document 0: 9 tokens"):
        pack_documents([broken], 3)


def packed_by_hand(documents, num_steps, tokens, queries, predicted):
    """The tensors of `pack_documents` from its alignment alone, one position and step at a time."""
    width, points = documents[0].states[0].shape[1], len(documents[0].states) - 1
    made = {name: [] for name in pack_documents([document(3, [2])], 1).tensors()}
    pairs = start = first_query = first_predicted = 0
    for number, each in enumerate(documents):
        ids, mask, length = each.input_ids.tolist(), each.loss_mask.tolist(), len(each.input_ids)
        at = lambda t, ids=ids, length=length: ids[t] if t < length else 0  # noqa: E731
        counts = [[t + 2 + k < length and mask[t + 2 + k] for k in range(num_steps)] for t in range(length)]
        queries_here = [t for t in range(length) if any(counts[t])]
        predicted_here = [s for s in range(2, length) if mask[s]]
        for t in range(length):
            made["embed_ids"].append(at(t + 1))
            made["positions"].append(t)
            made["aux_states"].append(torch.cat([state[t] for state in each.states[:-1]]))
        for t in queries_here:
            made["query_rows"].append(start + t)
            made["query_starts"].append(start)
            made["query_documents"].append(number)
            made["chain_ids"].append([at(t + 1 + k) for k in range(num_steps + 1)])
            made["counts"].append([bool(each) for each in counts[t]])
            made["teacher_rows"].append(
                [first_predicted + predicted_here.index(t + 2 + k) if counts[t][k] else 0 for k in range(num_steps)]
            )
            pairs += t + 1
        for s in predicted_here:
            made["last_states"].append(each.states[-1][s - 1])
            made["predicted_ids"].append(ids[s])
            sources = [s - 2 - k for k in range(num_steps)]
            made["slots"].append([first_query + queries_here.index(t) if t >= 0 else 0 for t in sources])
            made["weights"].append([float(t >= 0) for t in sources])
        start, first_query = start + length, first_query + len(queries_here)
        first_predicted += len(predicted_here)
    blank = dict(aux_states=torch.zeros(points * width).double(), last_states=torch.zeros(width).double(),
                 chain_ids=[0] * (num_steps + 1), counts=[False] * num_steps, teacher_rows=[0] * num_steps,
                 slots=[0] * num_steps, weights=[0.0] * num_steps, query_rows=tokens - 1, query_documents=-1,
                 query_starts=start if start < tokens else tokens - length)  # fmt: skip
    made["positions"] += range(tokens - start)
    room = dict(embed_ids=tokens, aux_states=tokens, positions=tokens, last_states=predicted, predicted_ids=predicted,
                slots=predicted, weights=predicted)  # fmt: skip
    for name, rows in made.items():
        rows += [blank.get(name, 0)] * (room.get(name, queries) - len(rows))
        made[name] = torch.stack(rows) if name.endswith("states") else torch.tensor(rows)
    return made, (len(documents), start, first_query, first_predicted, pairs)


def test_packing_is_what_its_alignment_says():
    chance = random.Random(5)
    used = {}
    for seed in range(40):
        documents = [
            document(chance.choice([1, 2, 3, 4, 9, 17, 30]), chance.choice([0.0, 0.1, 0.5, 1.0]), seed, width=2)
            for _ in range(chance.randint(1, 6))
        ]
        steps = chance.randint(1, 7)
        counts = [count_positions(each.loss_mask, steps) for each in documents]
        needs = sum(len(each.input_ids) for each in documents), *(sum(column) for column in zip(*counts, strict=True))
        for rooms in (tuple(max(need, 1) for need in needs), (200, 210, 190)):
            room = dict(zip(("tokens", "queries", "predicted"), rooms, strict=True))
            expected, numbers = packed_by_hand(documents, steps, **room)
            into = used.get(steps) if rooms[0] == 200 else None
            for batch in pack_documents(documents, steps, **room), pack_documents(documents, steps, **room, into=into):
                for name, tensor in batch.tensors().items():
                    wanted = expected[name]
                    assert torch.equal(tensor, wanted) and tensor.dtype == wanted.dtype, (seed, name)
                found = batch.num_documents, batch.num_tokens, batch.num_queries, batch.num_predicted, batch.num_pairs
                assert found == numbers
                used[steps] = batch if rooms[0] == 200 else used.get(steps)


def test_packing_into_reused_buffers_leaves_nothing_behind():
    budgets = dict(tokens=64, queries=64)
    used = pack_documents([document(40, 0.9), document(20, 0.9)], 4, **budgets)
    fresh = pack_documents([document(7, 0.5)], 4, **budgets)
    again = pack_documents([document(7, 0.5)], 4, **budgets, into=used)
    for name, tensor in fresh.tensors().items():
        assert torch.equal(again.tensors()[name], tensor), name


class Largest(TorchDispatchMode):
    """Most elements of any tensor made while it is active."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        made = function(*arguments, **(keywords or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


def test_no_tensor_is_quadratic_in_tokens_or_tokens_by_vocabulary(monkeypatch):
    drafter, teacher = make(dtype=torch.float32)
    tokens, rows = 1500, 50
    monkeypatch.setitem(losses.LOGITS_PER_CHUNK, "cpu", rows * 3 * N)
    batch = pack_documents([document(tokens, 1.0)], 3)
    batch.aux_states, batch.last_states = batch.aux_states.float(), batch.last_states.float()
    with Largest() as largest:
        ttt_loss(drafter, batch, teacher, 3, 0.8)[0].backward()
    linear = tokens * max(3 * H, 4 * H, 2 * 40)  # states, layer input, FFN
    block = 4 * QUERIES_PER_BLOCK * (tokens + 3)  # scores of one block of queries, all heads
    assert largest.elements <= max(linear, block) < 4 * tokens * tokens / 10
    with Largest() as largest:  # the check can fail: whole blocks are seen
        monkeypatch.setattr(ttt_attention, "QUERIES_PER_BLOCK", tokens)
        ttt_loss(drafter, batch, teacher, 3, 0.8)
    assert largest.elements >= 4 * (tokens - 2) * (tokens - 2)


def test_rope_scaling_is_known_by_either_name_and_a_field_that_is_none_is_missing():
    yarn = dict(factor=64.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0)
    old, new = ({name: "deepseek_yarn", **yarn} for name in ("type", "rope_type"))
    assert score_factor(old) == score_factor(new) == pytest.approx(2.0, abs=0.01)
    assert score_factor({"type": "yarn", **yarn}) == 1.0
    with pytest.raises(UserError, match="'yarn' lacks original_max_position_embeddings"):
        inverse_frequencies(64, 1e4, {"type": "yarn", **yarn, "original_max_position_embeddings": None})
