"""The engine mode without a GPU: arguments, figures from recorded `meta_info`, output comparison, layer read-back."""

import asyncio
import json
from types import SimpleNamespace

import pytest
import torch

import eval_acceptance
from common import report
from common.engine_eval import ServingSettings, check_layers, layers_hook, logit_gaps, run_once
from common.engine_figures import Reply, by_category, compare_outputs, summarise
from common.errors import UserError
from common.offline_eval import Setting
from tests.acceptance_fixtures import copying_drafter, in_hub_cache, permutation, write_drafter, write_target

CHAIN = Setting(num_steps=3, topk=1, tree_tokens=4)


def recorded(correct, cycles, histogram, tokens, **changes):
    """The part of SGLang 0.5.14's meta_info that matters, as its tokenizer manager builds it."""
    return {
        "id": "x", "finish_reason": {"type": "stop", "matched": 2}, "prompt_tokens": 20, "completion_tokens": tokens,
        "cached_tokens": 0, "spec_accept_rate": correct / (3 * cycles), "spec_accept_length": tokens / cycles,
        "spec_num_correct_drafts": correct, "spec_num_proposed_drafts": 3 * cycles, "spec_verify_ct": cycles,
        "spec_correct_drafts_histogram": histogram, **changes,
    }  # fmt: skip


def reply(row, meta, turn=1, category=None, prompt=(1, 2), output=(3, 4)):
    return Reply(row, turn, category, list(prompt), list(output), meta)


def test_figures_by_hand():
    # two replies: 4 cycles with 0, 1, 3, 3 accepted; 2 cycles with 0 and 2
    replies = [reply(0, recorded(7, 4, [1, 1, 0, 2], 12)), reply(1, recorded(2, 2, [1, 0, 1], 5))]
    found = summarise(replies, CHAIN)
    assert found["tau"] == pytest.approx(1 + 9 / 6)
    assert found["step0_accuracy"] == pytest.approx(1 - 2 / 6)
    assert found["emitted_per_cycle"] == pytest.approx((11 + 4) / 6)
    assert found["histogram"] == [2, 1, 1, 2] and found["cycles"] == 6
    # SGLang's own spec_accept_length counts the prefill's token and is something else
    assert found["tau"] != pytest.approx((12 + 5) / 6)
    low, high = found["tau_95"]  # resamples of two: 1 + 4/4, 1 + 9/6 or 1 + 14/8
    assert (low, high) == pytest.approx((1 + 1.0, 1 + 7 / 4))


def test_turns_of_a_conversation_are_one_sample():
    split = [reply(0, recorded(7, 4, [1, 1, 0, 2], 12)), reply(0, recorded(2, 2, [1, 0, 1], 5), turn=2)]
    assert summarise(split, CHAIN)["tau"] == pytest.approx(2.5)
    assert summarise(split, CHAIN)["tau_95"] is None  # one conversation: nothing to resample


def test_step0_only_for_a_chain():
    tree = Setting(num_steps=3, topk=4, tree_tokens=16)
    assert summarise([reply(0, recorded(7, 4, [1, 1, 0, 2], 12))], tree)["step0_accuracy"] is None


def test_replies_without_a_verify_step_are_counted():
    plain = {"completion_tokens": 1, "finish_reason": {"type": "stop"}}
    found = summarise([reply(0, recorded(7, 4, [1, 1, 0, 2], 12)), reply(1, plain)], CHAIN)
    assert found["without_verify"] == 1 and found["tau"] == pytest.approx(1 + 7 / 4)
    with pytest.raises(UserError, match="it did not speculate"):
        summarise([reply(1, plain)], CHAIN)


def test_more_accepted_than_drafted_is_an_error():
    with pytest.raises(UserError, match="accepted 4 drafts in a cycle of 3"):
        summarise([reply(0, recorded(4, 1, [0, 0, 0, 0, 1], 6))], CHAIN)


def test_categories():
    replies = [reply(0, recorded(7, 4, [1, 1, 0, 2], 12), category="math"),
               reply(1, recorded(2, 2, [1, 0, 1], 5), category="chat")]  # fmt: skip
    replies.append(reply(2, {"completion_tokens": 1}, category="short"))
    groups = by_category(replies, CHAIN)
    assert {name: group["tau"] for name, group in groups.items()} == {"math": 1 + 7 / 4, "chat": 2.0, "short": None}
    assert groups["short"]["without_verify"] == 1


def test_outputs_compared_where_prompts_are_equal():
    plain = [reply(0, {}, output=(5, 6, 7)), reply(1, {}, output=(5, 6)), reply(1, {}, turn=2, prompt=(1, 9)),
             reply(2, {}, output=(5,)), reply(3, {})]  # fmt: skip
    drafted = [reply(0, {}, output=(5, 6, 7)), reply(1, {}, output=(5, 8)), reply(1, {}, turn=2, prompt=(1, 8)),
               reply(2, {}, output=(5, 6)), reply(4, {})]  # fmt: skip
    found = compare_outputs(drafted, plain)
    assert found["compared"] == 3 and found["other_prompt"] == 3  # rows 3 and 4: only one of the two answered
    assert found["identical_share"] == pytest.approx(1 / 3)
    first, second = found["differences"]
    assert (first["row"], first["position"], first["with_drafter"], first["plain"]) == (1, 1, 8, 6)
    assert first["context"] == [1, 2, 5]
    assert (second["position"], second["with_drafter"], second["plain"]) == (1, 6, None)


def test_gap_of_the_first_difference():
    asked = []

    class Engine:  # answers in the shape of SGLang's output_top_logprobs: [(log p, token, text), ...] a position
        loop, links = asyncio.new_event_loop(), SimpleNamespace(lost=False)

        async def async_generate(self, input_ids, sampling_params, return_logprob, top_logprobs_num):
            asked.append(input_ids)
            return {"meta_info": {"output_top_logprobs": [[(-0.7, 6, None), (-0.75, 8, None)]]}}

    differences = [{"row": 1, "context": [1, 2, 5]}]
    logit_gaps(Engine(), differences)
    assert asked == [[1, 2, 5]]
    assert differences == [{"row": 1, "gap": pytest.approx(0.05), "best_two": [6, 8]}]


# ---- arguments -------------------------------------------------------------------------------------------------------


def test_arguments_with_and_without_drafter():
    with_drafter = ServingSettings("m", "d", CHAIN, "/tmp/layers", tp=2, max_requests=16).server_arguments()
    plain = ServingSettings("m", None, None, None, tp=2, max_requests=16).server_arguments()
    assert {name: value for name, value in with_drafter.items() if name.startswith("speculative")} == {
        "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "d", "speculative_num_steps": 3,
        "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4,
    }  # fmt: skip
    own = ("speculative", "forward_hooks")
    assert {name: value for name, value in with_drafter.items() if not name.startswith(own)} == plain
    (hook,) = with_drafter["forward_hooks"]
    assert hook["hook_factory"] == "common.engine_eval:layers_hook" and "model" in hook["target_modules"]
    assert ServingSettings("m", "d", CHAIN, "x", device="cpu").server_arguments()["attention_backend"] == "torch_native"


def test_arguments_exist_in_sglang():
    server_args = pytest.importorskip("sglang.srt.server_args")
    known = set(server_args.ServerArgs.__dataclass_fields__)
    for device in ("cpu", "cuda"):
        arguments = ServingSettings("m", "d", CHAIN, "x", device=device).server_arguments()
        assert set(arguments) <= known, set(arguments) - known


@pytest.mark.parametrize("name", ["speculative_num_steps", "forward_hooks", "model_path"])
def test_arguments_that_would_undo_the_measurement(name):
    with pytest.raises(UserError, match=f"--engine-args {name}: this evaluation sets it itself"):
        ServingSettings("m", "d", CHAIN, "x", extra={name: 5}).server_arguments()
    assert ServingSettings("m", "d", CHAIN, "x", extra={"mem_fraction_static": 0.5}).server_arguments()[
        "mem_fraction_static"] == 0.5  # fmt: skip


# ---- layers read back ------------------------------------------------------------------------------------------------


def test_layers_are_read_from_the_module_that_ran(tmp_path):
    class Decoder(torch.nn.Module):
        layers_to_capture = [3, 16, 27]

        def forward(self, x):
            return x

    path = tmp_path / "layers.json"
    other, decoder = torch.nn.Identity(), Decoder()
    for module in (other, decoder):
        module.register_forward_hook(layers_hook({"path": str(path)}))
    other(torch.ones(1))
    with pytest.raises(UserError, match="did not say which layers"):
        check_layers(path, [3, 16, 27], "drafter/")
    decoder(torch.ones(1))
    assert check_layers(path, [3, 16, 27], "drafter/") == [3, 16, 27]
    with pytest.raises(UserError, match=r"trained on the states at \[2, 15, 26\], but the engine feeds it .* \[3, 16"):
        check_layers(path, [2, 15, 26], "drafter/")


# ---- conversations ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    from common.tokenizing import load_tokenizer

    return load_tokenizer(str(smollm2))


class EchoEngine:
    """Answers every prompt with its number of tokens, late or early: order must not depend on it."""

    def __init__(self, tokenizer):
        self.loop, self.tokenizer, self.in_flight, self.most = asyncio.new_event_loop(), tokenizer, 0, 0
        self.prompts, self.links = [], SimpleNamespace(lost=False)

    async def async_generate(self, input_ids, sampling_params):
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        await asyncio.sleep(0.002 * (len(input_ids) % 3))
        self.in_flight -= 1
        self.prompts.append(input_ids)
        ids = self.tokenizer.encode(f"{len(input_ids)}<|im_end|>", add_special_tokens=False)
        return {"output_ids": ids, "meta_info": recorded(1, 1, [0, 1], len(ids))}


def test_all_turns_in_order_and_no_more_than_asked_in_flight(tokenizer, tmp_path):
    from common.conversations import load_rows

    path = tmp_path / "prompts.jsonl"
    lines = [{"turns": [f"question {i}", "and then?"], "category": "a"} for i in range(5)]
    path.write_text("\n".join(map(json.dumps, lines)))
    engine = EchoEngine(tokenizer)
    result = run_once(engine, tokenizer, load_rows(str(path)), 2, {"temperature": 0.0})
    assert engine.most == 2
    assert [(reply.row, reply.turn) for reply in result["replies"]] == [(i, t) for i in range(5) for t in (1, 2)]
    for first, second in zip(result["replies"][::2], result["replies"][1::2], strict=True):
        shown = tokenizer.decode(second.prompt)
        assert tokenizer.decode(first.output[:-1]) in shown and "and then?" in shown  # its own answer is in the prompt
        assert second.prompt[: len(first.prompt) + len(first.output)] == first.prompt + first.output
    assert result["tokens"] == sum(len(reply.output) for reply in result["replies"]) and result["skipped"] == {}


def test_table_of_runs():
    figures = summarise([reply(0, recorded(7, 4, [1, 1, 0, 2], 12)), reply(1, recorded(2, 2, [1, 0, 1], 5))], CHAIN)
    run = {"name": "d", "num_steps": 3, "topk": 1, "draft_tokens": 4, "batch_size": 8, "speed_up": 1.5,
           "speculative": {**figures, "tokens_per_second": 150.0}, "plain": {"tokens_per_second": 100.0},
           "identical_share": 0.5, "differences": [{"gap": 0.06}]}  # fmt: skip
    run["by_category"] = {"math": {"tau": 2.75}, "chat": {"tau": 2.0}}
    assert report.engine_category_rows([run]) == (["tau, 8 at once", "d 3/1/4"], [["chat", "2.00"], ["math", "2.75"]])
    text = report.markdown({"engine": [run], "versions": {"torch": "2"}}, None)
    assert "| d | 3/1/4 | 8 | 2.50 (2.00-2.75)" in text and "| math | 2.75 |" in text
    _, (row,) = report.engine_rows([run])
    assert row == ["d", "3/1/4", "8", "2.50 (2.00-2.75)", "66.7%", "100", "150", "1.50x",
                   "50.0% (parted at gaps up to 0.06)"]  # fmt: skip
    _, (row,) = report.engine_rows([run | {"differences": [{"gap": 0.06}, {}]}])
    assert row[-1] == "50.0% (first 1 parted at gaps up to 0.06)"
    run["speculative"]["without_verify"] = 3
    assert report.engine_remarks([run]) == [
        "d 3/1/4, 8 at once: 3 of 2 replies ended with their first token and say nothing of the drafter."
    ]
    run["speculative"]["skipped"] = {"conversations left: too long": 2}
    assert "d 3/1/4, 8 at once, with the drafter: 2 conversations left: too long." in report.markdown(
        {"engine": [run], "versions": {}}, None)  # fmt: skip


def a_command(tmp_path, **changes) -> SimpleNamespace:
    """Arguments of the engine mode, with a target, drafters and prompts on disk."""
    target = write_target(tmp_path / "t")
    drafters = [str(write_drafter(tmp_path / name / "final", copying_drafter(permutation()))) for name in ("a", "b")]
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"turns": [f"question {n}"]}) for n in range(4)) + "\n")
    return eval_acceptance.Arguments(**{
        "model": str(target), "drafter": drafters, "prompts": [str(tmp_path / "p.jsonl")], "batch_sizes": [1, 2],
        "output": str(tmp_path / "o"), "bootstrap": 10, **changes,
    })  # fmt: skip


def test_engine_mode_without_a_gpu_says_so(tmp_path, monkeypatch):
    from common import engine, engine_eval, tokenizing

    arguments = a_command(tmp_path, model="tiny/target")
    in_hub_cache(tmp_path / "home", "tiny/target", tmp_path / "t")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    monkeypatch.setattr(engine, "available_device", lambda: ("cpu", 0))
    monkeypatch.setattr(tokenizing, "load_tokenizer", lambda *_: None)
    with pytest.raises(UserError, match="needs a GPU, and none is visible"):
        engine_eval.in_engine(arguments, [CHAIN], report.Report(tmp_path / "o" / "report.json", {}))


@pytest.fixture
def evaluated(tokenizer, tmp_path, monkeypatch, capsys):
    """evaluated(fails=..., **arguments): (whatever main() raised, report.json, what is printed, rows asked) of the
    engine mode whose engines are `EchoEngine`s. fails: what a log's name holds of the engine that does not start."""
    from common import engine, tokenizing

    asked, emptied = [], []

    def evaluate(fails=None, **changes):
        def start(serving, log):
            assert emptied.pop() and not emptied  # the GPU's reserve, before each engine
            if fails and fails in log.name:
                raise UserError(f"no engine for {log.stem}")
            if serving.layers_file:
                with open(serving.layers_file, "w") as file:
                    json.dump([2, 4, 6], file)
            echo = EchoEngine(tokenizer)
            asked.append(echo.prompts)
            return echo

        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
        monkeypatch.setattr(engine, "available_device", lambda: ("cuda", 1))
        monkeypatch.setattr(engine, "start_engine", start)
        monkeypatch.setattr(engine, "stop_engine", lambda _: None)
        monkeypatch.setattr(tokenizing, "load_tokenizer", lambda *_: tokenizer)
        monkeypatch.setattr(eval_acceptance.command_line, "parse", lambda *_, **__: a_command(tmp_path, **changes))
        error = None
        try:
            eval_acceptance.main()
        except Exception as raised:
            error = raised
        return error, json.loads((tmp_path / "o" / "report.json").read_text()), capsys.readouterr().out, asked

    return evaluate


def test_all_runs_are_reported_and_drafters_of_one_name_told_apart(evaluated, tmp_path):
    error, content, printed, _ = evaluated()
    assert error is None and "unfinished" not in content
    assert [(run["name"], run["batch_size"]) for run in content["engine"]] == [
        ("a/final", 1), ("a/final", 2), ("b/final", 1), ("b/final", 2)
    ]  # fmt: skip
    for run in content["engine"]:
        assert run["speed_up"] > 0 and run["plain"]["tokens"] == run["speculative"]["tokens"]
        assert run["identical_share"] == 1 and run["compared"] == 4 and run["layers_to_capture"] == [2, 4, 6]
    assert "b/final" in printed and "b/final" in (tmp_path / "o" / "acceptance.md").read_text()


@pytest.mark.parametrize("fails, part, runs", [
    ("b-final", "the engine with b/final 3/1/4", ["a/final", "a/final"]),
    ("plain", "plain decoding", ["a/final", "a/final", "b/final", "b/final"]),
])  # fmt: skip
def test_measured_runs_survive_an_engine_that_fails_later(evaluated, tmp_path, fails, part, runs):
    error, content, printed, _ = evaluated(fails)
    assert [run["name"] for run in content["engine"]] == runs and content["engine"][0]["speculative"]["tau"] == 2
    assert content["engine"][0]["speed_up"] is None and content["engine"][0]["identical_share"] is None
    assert content["unfinished"]["part"] == part and "no engine for" in content["unfinished"]["error"]
    assert isinstance(error, UserError) and f"{part} failed" in str(error)
    assert str(tmp_path / "o" / "report.json") in str(error)
    assert "a/final" in printed and f"{part} failed" in (tmp_path / "o" / "acceptance.md").read_text()


def test_runs_survive_a_comparison_with_offline_that_fails(evaluated, monkeypatch):
    from common import parity

    monkeypatch.setattr(parity, "parity_of_all", lambda *_: 1 // 0)
    error, content, *_ = evaluated(check_parity=True)
    assert isinstance(error, ZeroDivisionError) and "report.json" in error.__notes__[0]
    assert [run["speed_up"] > 0 for run in content["engine"]] == [True] * 4
    assert content["unfinished"]["error"].startswith("ZeroDivisionError")


def test_drawn_answers_are_not_compared(evaluated):
    _, content, *_ = evaluated(temperature=1.0)
    assert {(run["identical_share"], run["compared"]) for run in content["engine"]} == {(None, 0)}


def test_a_part_of_the_prompts_is_taken_from_every_file(evaluated, tokenizer, tmp_path):
    more = tmp_path / "more.jsonl"
    more.write_text("\n".join(json.dumps({"turns": [f"other {n}"]}) for n in range(4)))
    *_, asked = evaluated(max_samples=2, prompts=[str(tmp_path / "p.jsonl"), str(more)], batch_sizes=[1])
    assert [("question" in text, "other" in text) for text in map(tokenizer.decode, asked[-1][1:])] == [
        (True, False), (False, True)
    ]  # fmt: skip
